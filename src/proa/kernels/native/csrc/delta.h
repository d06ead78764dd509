// The gated delta rule (GDN, KDA): decode, verify, prefill and replay by one routine, row by row.
//
// arch/delta_blocks.py has the formula. A row's arithmetic is the same whatever is beside it and however many rows come at
// once, so a verified row, a replayed one and a decoded one leave the same bits, and so does a prompt in any cutting. The
// chunkwise form would save little here: in float32 a block of 64 rows takes as many multiplications as 64 single rows.
//
// Two passes over the work. First, all that is a function of a row and its neighbours: convolution, lengths, gates. Then the
// rule itself, per request and value head, in blocks of columns of the state, which do not see each other until the norm of
// the result. Between the rows of a request the state stays in a cache; states for later steps are written past it.
#pragma once
#include "op.h"

namespace proa {

constexpr int MAX_DELTA = 256;  // elements of a key head
constexpr int MAX_TAPS = 8;
constexpr float LENGTH_EPS = 1e-6f;

struct Delta {  // native/delta.py: CDelta. Tensors as in kernels/delta.py
    int64_t key_heads, value_heads, key_dim, value_dim, taps;
    int64_t per_channel, sigmoid_gate;            // flags: decays per key channel; the gate's function
    int64_t mixed_width, decay_width, gate_width;  // elements from one row to the next
    float eps;
    const float *conv, *rate, *bias, *norm;
    void* conv_state;  // [slots, taps - 1, channels]
    float* states;     // [slots, value_heads, key_dim, value_dim]
    void* kept;        // [rows, kept_width()], written where StateRows.kept says, or null
    int64_t is_replay;  // input rows are those that StateRows.kept names

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }
    int64_t decays() const { return value_heads * (per_channel ? key_dim : 1); }
    int64_t kept_width() const { return channels() + value_heads + decays(); }

    // The scratch of R rows, kept_width() wide, holds one section per head, so that the rows of a head are neighbours: q, k and v after the first
    // pass (head `h` of section `first`, which begins at that channel), decays e^g per channel, betas, decays per head.
    float* part(float* scratch, int64_t R, int64_t first, int64_t h, int64_t size) const { return scratch + (first + h * size) * R; }
    float* decay(float* scratch, int64_t R, int64_t h) const {
        return per_channel ? part(scratch, R, channels(), h, key_dim) : part(scratch, R, channels() + value_heads, h, 1);
    }
    float* beta(float* scratch, int64_t R, int64_t h) const { return part(scratch, R, channels() + (per_channel ? decays() : 0), h, 1); }
};

struct StateRows {  // the rows of one request; native/delta.py: state_rows
    int64_t first, count, source;  // source: slot, or -1 for a request that begins
    const int64_t *targets, *kept;  // [count]
};

// a * b + c with one rounding; the compiler's own choice of what to contract could differ from place to place.
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    return load<f32x16>(z);
#else
    return a * b + c;
#endif
}

static inline f32x16 same(float x) { return x - f32x16{}; }  // a broadcast; adding zero would cost an addition, for -0

// Stores that leave the caches alone: the state is read again only after all layers' states and weights. 64-byte aligned.
static inline void stream(float* p, f32x16 v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
    __m256 x[2];
    std::memcpy(x, &v, 64);
    _mm256_stream_ps(p, x[0]), _mm256_stream_ps(p + 8, x[1]);
#else
    store(p, v);
#endif
}
static inline void streamed() {  // before another thread reads them
#if defined(__AVX__)
    _mm_sfence();
#endif
}

// ln(1 + e^x) = max(x, 0) + 2 atanh(u / (2 + u)), u = e^-|x|: the argument is at most 1/3, seven terms give float32.
static inline f32x16 softplus(f32x16 x) {
    const f32x16 u = exp(-max(x, -x)), s = u / (u + 2.f), z = s * s;
    f32x16 p = splat(1.f / 13);
    for (int odd = 11; odd > 0; odd -= 2) p = fma(p, z, splat(1.f / float(odd)));
    return fma(s * 2.f, p, max(x, f32x16{}));
}
static inline f32x16 sigmoid(f32x16 x) { return 1.f / (exp(-x) + 1.f); }

// The first `count` of sixteen elements, zeros behind them: the last heads of a row may be its last elements.
template <class T> static inline f32x16 load_part(const T* p, int64_t count) {
    if (count >= 16) return load16(p);
    f32x16 v{};
    for (int64_t i = 0; i < count; i++) v[i] = to_float(p[i]);
    return v;
}

// Input rows of one request, those before it included.
template <class T> struct DeltaInput {
    const Delta& d;
    const T *mixed, *decay, *history;
    const int64_t* index;  // null: rows follow one another
    int64_t row(int64_t t) const { return index ? index[t] : t; }
    // q, k, v of row t; rows -1, -2, ... are the state's. Null: before the request began.
    const T* channels(int64_t t) const {
        if (t >= 0) return mixed + row(t) * d.mixed_width;
        return history ? history + (d.taps - 1 + t) * d.channels() : nullptr;
    }
    const T* decays(int64_t t) const { return decay + row(t) * d.decay_width; }
};

// One head of q, k or v of all rows of a request: convolution, silu, and for q and k the length; then its conv states.
template <class T>
static inline void delta_conv(const Delta& d, const DeltaInput<T>& in, const StateRows& rows, int64_t head, float* out) {
    const bool is_value = head >= 2 * d.key_heads;
    const int64_t size = is_value ? d.value_dim : d.key_dim, C = d.channels();
    const int64_t at = is_value ? 2 * d.keys() + (head - 2 * d.key_heads) * size : head * size;
    const float length = head < d.key_heads ? 1.f / std::sqrt(float(size)) : 1.f;
    for (int64_t t = 0; t < rows.count; t++, out += size) {
        const T* seen[MAX_TAPS];
        for (int64_t j = 0; j < d.taps; j++) seen[j] = in.channels(t - d.taps + 1 + j);
        f32x16 squares{};
        for (int64_t c = 0; c < size; c += 16) {
            f32x16 total{};
            for (int64_t j = 0; j < d.taps; j++)
                if (seen[j]) total = fma(load16(seen[j] + at + c), load<f32x16>(d.conv + j * C + at + c), total);
            total = silu(total);
            squares = fma(total, total, squares);
            store(out + c, total);
        }
        if (is_value) continue;
        const float factor = length / std::sqrt(sum(squares) + LENGTH_EPS);
        for (int64_t c = 0; c < size; c += 16) store(out + c, load<f32x16>(out + c) * factor);
    }
    for (int64_t t = 0; t < rows.count; t++) {
        if (rows.targets[t] < 0) continue;
        T* to = (T*)d.conv_state + rows.targets[t] * (d.taps - 1) * C + at;  // may be the source, which is read ahead of it
        for (int64_t j = 0; j < d.taps - 1; j++, to += C) {
            const T* from = in.channels(t - d.taps + 2 + j);
            if (from) std::memmove(to, from + at, size * sizeof(T));
            else std::memset(to, 0, size * sizeof(T));
        }
    }
}

// Betas of all heads, and the decays where there is one per head. `R`: rows of the scratch.
template <class T>
static inline void delta_gates(const Delta& d, const DeltaInput<T>& in, const StateRows& rows, float* scratch, int64_t R) {
    for (int64_t t = 0; t < rows.count; t++)
        for (int64_t h = 0; h < d.value_heads; h += 16) {
            const int64_t count = std::min<int64_t>(d.value_heads - h, 16), row = rows.first + t;
            const f32x16 beta = sigmoid(load_part(in.channels(t) + d.channels() + h, count));
            for (int64_t i = 0; i < count; i++) d.beta(scratch, R, h + i)[row] = beta[i];
            if (d.per_channel) continue;
            const f32x16 a = load_part(in.decays(t) + h, count) + load_part(d.bias + h, count);
            const f32x16 decay = exp(-(load_part(d.rate + h, count) * softplus(a)));
            for (int64_t i = 0; i < count; i++) d.decay(scratch, R, h + i)[row] = decay[i];
        }
}

// The decays of one head's channels.
template <class T>
static inline void delta_decays(const Delta& d, const DeltaInput<T>& in, const StateRows& rows, int64_t head, float* out) {
    const int64_t at = head * d.key_dim;
    const f32x16 rate = same(d.rate[head]);
    for (int64_t t = 0; t < rows.count; t++, out += d.key_dim)
        for (int64_t c = 0; c < d.key_dim; c += 16)
            store(out + c, exp(-(rate * softplus(load16(in.decays(t) + at + c) + load<f32x16>(d.bias + at + c)))));
}

template <class T> static inline void delta_keep(const Delta& d, const DeltaInput<T>& in, const StateRows& rows) {
    const int64_t head = d.channels() + d.value_heads;
    for (int64_t t = 0; t < rows.count; t++) {
        if (rows.kept[t] < 0) continue;
        T* to = (T*)d.kept + rows.kept[t] * d.kept_width();
        std::memcpy(to, in.channels(t), head * sizeof(T));
        std::memcpy(to + head, in.decays(t), d.decays() * sizeof(T));
    }
}

struct DeltaVectors {  // of one row and head; key, query: decayed
    alignas(64) float decay[MAX_DELTA], key[MAX_DELTA], query[MAX_DELTA];
    float overlap;  // of the plain key and query
};

// `key`, `query` and `decay`: those of a request's first row.
static inline void delta_vectors(const Delta& d, int64_t t, const float* key, const float* query, const float* decay, DeltaVectors& by) {
    f32x16 overlap{};
    for (int64_t c = 0, at = t * d.key_dim; c < d.key_dim; c += 16, at += 16) {
        const f32x16 e = d.per_channel ? load<f32x16>(decay + at) : same(decay[t]), k = load<f32x16>(key + at), q = load<f32x16>(query + at);
        store(by.decay + c, e), store(by.key + c, k * e), store(by.query + c, q * e);
        overlap = fma(k, q, overlap);
    }
    by.overlap = sum(overlap);
}

// A state's 16 NB columns times a row's decayed key and query.
template <int NB> struct DeltaSums {
    f32x16 seen[NB], out[NB];
    void add(int b, f32x16 s, f32x16 k, f32x16 q) { seen[b] = fma(s, k, seen[b]), out[b] = fma(s, q, out[b]); }
};

// put(i, column, elements) gets the state after a row: what it was, decayed, and the change along the key.
template <int NB, class Put>
static inline void delta_advance(const float* from, int64_t width, int64_t size, const float* decay, const float* key,
                                 const f32x16 (&change)[NB], Put put) {
    for (int64_t i = 0; i < size; i++) {
        const f32x16 e = same(decay[i]), k = same(key[i]);
        for (int b = 0; b < NB; b++) put(i, b, fma(change[b], k, load<f32x16>(from + i * width + 16 * b) * e));
    }
}

// All rows of a request, columns [at, at + 16 NB) of one head. The state between rows stays in `own`; it is read once a row,
// for the row's change and the next row's sums. v holds values and becomes results.
template <int NB>
static inline void delta_columns(const Delta& d, const StateRows& rows, int64_t head, int64_t at, float* scratch, int64_t R) {
    const int64_t D = d.key_dim, group = d.value_heads / d.key_heads, slot = d.value_heads * D * d.value_dim, last = rows.count - 1;
    float* const mine = d.states + head * D * d.value_dim + at;
    alignas(64) float own[MAX_DELTA * 16 * NB];
    const float* from = rows.source < 0 ? own : mine + rows.source * slot;
    int64_t width = rows.source < 0 ? 16 * NB : d.value_dim;
    if (from == own) std::memset(own, 0, D * 16 * NB * sizeof(float));
    const float *query = d.part(scratch, R, 0, head / group, D) + rows.first * D, *key = query + d.keys() * R;
    const float *beta = d.beta(scratch, R, head) + rows.first, *decay = d.decay(scratch, R, head) + rows.first * (d.per_channel ? D : 1);
    float* v = d.part(scratch, R, 2 * d.keys(), head, d.value_dim) + rows.first * d.value_dim + at;
    DeltaVectors of[2];
    delta_vectors(d, 0, key, query, decay, of[0]);
    DeltaSums<NB> sums{};
    for (int64_t i = 0; i < D; i++)
        for (int b = 0; b < NB; b++)
            sums.add(b, load<f32x16>(from + i * width + 16 * b), same(of[0].key[i]), same(of[0].query[i]));
    for (int64_t t = 0; t <= last; t++, v += d.value_dim) {
        DeltaVectors &by = of[t % 2], &next = of[(t + 1) % 2];
        f32x16 change[NB];
        for (int b = 0; b < NB; b++) {
            change[b] = (load<f32x16>(v + 16 * b) - sums.seen[b]) * beta[t];
            store(v + 16 * b, fma(change[b], same(by.overlap), sums.out[b]));
        }
        float* const target = rows.targets[t] < 0 ? nullptr : mine + rows.targets[t] * slot;
        auto advance = [&](auto put) { delta_advance<NB>(from, width, D, by.decay, key + t * D, change, put); };
        auto to_target = [&](int64_t i, int b, f32x16 s) { stream(target + i * d.value_dim + 16 * b, s); };
        if (t == last) {
            if (target == from) advance([&](int64_t i, int b, f32x16 s) { store(target + i * d.value_dim + 16 * b, s); });
            else if (target) advance(to_target);
            return;
        }
        delta_vectors(d, t + 1, key, query, decay, next);
        sums = {};
        auto to_next = [&](int64_t i, int b, f32x16 s) {
            store(own + (i * NB + b) * 16, s);
            sums.add(b, s, same(next.key[i]), same(next.query[i]));
        };
        if (target) advance([&](int64_t i, int b, f32x16 s) { to_next(i, b, s), to_target(i, b, s); });
        else advance(to_next);
        from = own, width = 16 * NB;
    }
}

// RMS norm of one head's results, times the activated gate, for all rows of a request.
template <class T>
static inline void delta_out(const Delta& d, const StateRows& rows, int64_t head, const float* v, const T* gate, T* out) {
    const int64_t at = head * d.value_dim;
    for (int64_t row = rows.first; row < rows.first + rows.count; row++, v += d.value_dim) {
        f32x16 squares{};
        for (int64_t c = 0; c < d.value_dim; c += 16) squares = fma(load<f32x16>(v + c), load<f32x16>(v + c), squares);
        const float inverse = 1.f / std::sqrt(sum(squares) / float(d.value_dim) + d.eps);
        for (int64_t c = 0; c < d.value_dim; c += 16) {
            const f32x16 z = load16(gate + row * d.gate_width + at + c), active = d.sigmoid_gate ? sigmoid(z) : silu(z);
            store16(out + row * d.values() + at + c, load<f32x16>(v + c) * inverse * load<f32x16>(d.norm + c) * active);
        }
    }
}

// a rows q, k, v, b (or kept rows), b Delta, c rows a, d rows z or null, scratch float32 [rows, kept_width()] -> out
// [rows, values()] or null. Work is divided by heads of requests; threads share neither sums nor states.
template <class T> static void delta(const Op& op, const Batch& batch) {
    const Delta& d = *(const Delta*)op.b;
    const int64_t R = batch.rows, keys = 2 * d.key_heads;
    const int64_t gates = keys + d.value_heads, tasks = gates + 1 + (d.per_channel ? d.value_heads : 0);
    float* const scratch = (float*)op.scratch;
    Range mine = my_share(R * tasks);
    for (int64_t r = 0, done = 0; r < batch.num_states; r++) {
        const StateRows& rows = batch.states[r];
        const T* history = (const T*)d.conv_state + rows.source * (d.taps - 1) * d.channels();
        const int64_t first = d.is_replay ? 0 : rows.first;
        const DeltaInput<T> in{d, (const T*)op.a + first * d.mixed_width, (const T*)op.c + first * d.decay_width,
                               rows.source < 0 ? nullptr : history, d.is_replay ? rows.kept : nullptr};
        for (int64_t task = 0; task < tasks; task++, done += rows.count) {
            if (done < mine.begin || done >= mine.end) continue;
            if (task < keys) delta_conv(d, in, rows, task, d.part(scratch, R, 0, task, d.key_dim) + rows.first * d.key_dim);
            else if (task < gates) {
                float* values = d.part(scratch, R, 2 * d.keys(), task - keys, d.value_dim);
                delta_conv(d, in, rows, task, values + rows.first * d.value_dim);
            } else if (task > gates) {
                const int64_t head = task - gates - 1;
                delta_decays(d, in, rows, head, d.decay(scratch, R, head) + rows.first * d.key_dim);
            } else {
                delta_gates(d, in, rows, scratch, R);
                if (d.kept && !d.is_replay) delta_keep(d, in, rows);
            }
        }
    }
    wait_for_all();
    mine = my_share(R * d.value_heads);
    for (int64_t r = 0, done = 0; r < batch.num_states; r++)
        for (int64_t head = 0; head < d.value_heads; head++, done += batch.states[r].count) {
            if (done < mine.begin || done >= mine.end) continue;
            const StateRows& rows = batch.states[r];
            int64_t at = 0;
            for (; at + 128 <= d.value_dim; at += 128) delta_columns<8>(d, rows, head, at, scratch, R);
            for (; at + 64 <= d.value_dim; at += 64) delta_columns<4>(d, rows, head, at, scratch, R);
            for (; at < d.value_dim; at += 16) delta_columns<1>(d, rows, head, at, scratch, R);
            const float* results = d.part(scratch, R, 2 * d.keys(), head, d.value_dim) + rows.first * d.value_dim;
            if (op.out) delta_out<T>(d, rows, head, results, (const T*)op.d, (T*)op.out);
        }
    streamed();
}

}  // namespace proa
