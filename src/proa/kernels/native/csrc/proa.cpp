// The C interface of Proa's CPU kernels: a list of ops, run by one team of threads. Plain pointers and counts; the ops are
// those of kernels/seam.py. Activations and cache are float32 or bfloat16 (`T`); residuals and norm weights are float32.
//
// Python builds the list once per model (native/program.py) and calls it once per forward, or calls one op at a time.
#include "attention.h"
#include "delta.h"
#include "latent.h"
#include "moe.h"
#include "sample.h"
#include "sparse.h"
#include <vector>

namespace proa {

// a residual [rows, n] (advanced in place), b delta [rows, n] or null, c weight [n], f eps -> out [rows, n]
template <class T> static void add_norm(const Op& op, int64_t rows) {
    const Range mine = my_share(rows);
    for (int64_t m = mine.begin; m < mine.end; m++) {
        float* row = (float*)op.a + m * op.n;
        const T* delta = (const T*)op.b + m * op.n;
        if (op.b) for (int64_t d = 0; d < op.n; d += 16) store(row + d, load<f32x16>(row + d) + load16(delta + d));
        norm_row(row, (const float*)op.c, float(op.f), op.n, (T*)op.out + m * op.n);
    }
}

// a x, rows m apart, c weight [n], f eps -> out [rows, n]
template <class T> static void norm(const Op& op, int64_t rows) {
    const Range mine = my_share(rows);
    for (int64_t m = mine.begin; m < mine.end; m++)
        norm_row((const T*)op.a + m * op.m, (const float*)op.c, float(op.f), op.n, (T*)op.out + m * op.n);
}

// a x [rows, in], rows m apart, b Linear -> out [rows, out] of type Y
template <class T, class Y> static void matmul(const Op& op, int64_t rows, Y* out) {
    const Linear& w = *(const Linear*)op.b;
    apply<T>(w, (const T*)op.a, op.m, rows, op.scratch, [&](int64_t m, int64_t n, f32x16 v) { put(out + m * w.out, n, w.out, v); });
}

// a x [rows, in], b gate and up, c down, f limit (simd.h: activate) -> out [rows, out]. tmp [rows, 2 * width]: gate and up, then
// what became of them in the first half of each row. A thread makes the same columns of gate and up, so only the product
// waits for the others.
template <class T> static void ffn(const Op& op, int64_t rows) {
    const Linear &gate_up = *(const Linear*)op.b, &down = *(const Linear*)op.c;
    const int64_t width = gate_up.out / 2, vectors = width / 16;
    T *hidden = (T*)op.tmp, *y = (T*)op.out;
    const auto keep = [&](int64_t m, int64_t n, f32x16 v) { store16(hidden + m * 2 * width + n, v); };
    const Range mine = my_share(vectors);
    prepare(gate_up, (const T*)op.a, gate_up.in, rows, op.scratch);
    for (int64_t first : {int64_t(0), vectors})
        apply_panels<T>(gate_up, (const T*)op.a, gate_up.in, rows, op.scratch, {first + mine.begin, first + mine.end}, keep);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = mine.begin; i < mine.end; i++) {
            T* gate = hidden + m * 2 * width + i * 16;
            store16(gate, activate(load16(gate), load16(gate + width), float(op.f)));
        }
    wait_for_all();
    apply<T>(down, hidden, 2 * width, rows, op.scratch,
             [&](int64_t m, int64_t n, f32x16 v) { put(y + m * down.out, n, down.out, v); });
}

// a x [rows, n], b gates, rows m apart -> out [rows, n]: x * sigmoid(gate)
template <class T> static void gate(const Op& op, int64_t rows) {
    const Range mine = my_share(rows);
    for (int64_t m = mine.begin; m < mine.end; m++) {
        const T *x = (const T*)op.a + m * op.n, *g = (const T*)op.b + m * op.m;
        for (int64_t d = 0; d < op.n; d += 16) store16((T*)op.out + m * op.n + d, load16(x + d) * sigmoid(load16(g + d)));
    }
}

// a x [rows, n], f beta, m original -> out [rows, n]: x times 1 + beta ln(1 + floor(position / original))
template <class T> static void scale(const Op& op, const Batch& batch) {
    const Range mine = my_share(batch.rows);
    for (int64_t m = mine.begin; m < mine.end; m++) {
        const float factor = 1.f + float(op.f) * std::log1p(float(batch.positions[m] / op.m));
        const T* x = (const T*)op.a + m * op.n;
        for (int64_t d = 0; d < op.n; d++) ((T*)op.out)[m * op.n + d] = from_float<T>(to_float(x[d]) * factor);
    }
}

// a frequencies [n], b signs [n] -> out cosines [rows, n], tmp signed sines [rows, n]
static void rotation(const Op& op, const Batch& batch) {
    const float *frequency = (const float*)op.a, *sign = (const float*)op.b;
    const Range mine = my_share(batch.rows);
    for (int64_t m = mine.begin; m < mine.end; m++)
        for (int64_t d = 0; d < op.n; d++) {
            const float angle = float(batch.positions[m]) * frequency[d];
            ((float*)op.out)[m * op.n + d] = std::cos(angle) * float(op.f);
            ((float*)op.tmp)[m * op.n + d] = std::sin(angle) * sign[d] * float(op.f);
        }
}

struct HeadShape {  // native/abi.py: CHeads
    int64_t query, key_value, size, rope, is_interleaved, is_whole;
    float eps;
    const float* norm;  // [query + key_value, size], or null
};

// a projected heads [rows, query + 2 key_value, size], rows m apart, b HeadShape, c Cache, d cosines, e sines -> out
// queries [rows, query, size]; keys and values go to the cache rows `slots`. Queries and keys are normed, each head by itself or all
// of a row as one vector, and their first `rope` elements rotated.
template <class T> static void write(const Op& op, const Batch& batch) {
    const HeadShape& h = *(const HeadShape*)op.b;
    const Cache& cache = *(const Cache*)op.c;
    const int64_t heads = h.query + 2 * h.key_value;
    const Range mine = my_share(batch.rows * heads);
    int64_t normed = -1;
    float inverse = 1.f;
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const int64_t m = i / heads, head = i % heads, is_key = head >= h.query;
        const bool is_value = head >= h.query + h.key_value;
        const T *row = (const T*)op.a + m * op.m, *x = row + head * h.size;
        alignas(64) float v[MAX_HEAD], turned[MAX_HEAD];
        for (int64_t d = 0; d < h.size; d += 16) store(v + d, load16(x + d));
        if (!is_value && h.norm) {
            if (!h.is_whole) {
                inverse = inverse_rms(x, h.size, h.eps);
            } else if (normed != 2 * m + is_key) {
                normed = 2 * m + is_key;
                const T* first = row + is_key * h.query * h.size;
                inverse = inverse_rms(first, (is_key ? h.key_value : h.query) * h.size, h.eps);
            }
            for (int64_t d = 0; d < h.size; d++) v[d] = v[d] * inverse * h.norm[head * h.size + d];
        }
        if (!is_value) {
            const float *cos = (const float*)op.d + m * h.rope, *sin = (const float*)op.e + m * h.rope;
            rotate(v, h.rope, h.is_interleaved, cos, sin, turned);
            std::memcpy(v, turned, h.rope * sizeof(float));
        }
        if (head < h.query) {
            T* to = (T*)op.out + (m * h.query + head) * h.size;
            for (int64_t d = 0; d < h.size; d += 16) store16(to + d, load<f32x16>(v + d));
            continue;
        }
        alignas(64) T rounded[MAX_HEAD];
        for (int64_t d = 0; d < h.size; d += 16) store16(rounded + d, load<f32x16>(v + d));
        const int64_t kv_head = (head - h.query) % h.key_value, offset = batch.slots[m] % cache.page_size;
        const int32_t page = int32_t(batch.slots[m] / cache.page_size);
        const int64_t group = cache.group(&page, kv_head, offset);
        if (is_value) write_value((T*)cache.values + group, offset, h.size, rounded);
        else write_key((T*)cache.keys + group, offset, h.size, rounded);
    }
}

// a queries [rows, n heads, D], b Cache, f scale, m window (0: none) -> out [rows, n, D]
template <class T> static void attention(const Op& op, const Batch& batch) {
    const Cache& cache = *(const Cache*)op.b;
    const int64_t heads = op.n, share = heads / cache.kv_heads, D = cache.head_dim;
    const int64_t parts = 4 * omp_get_num_threads(), few = (batch.rows * heads + parts - 1) / parts;  // work for all threads
    share_queries(batch, heads, cache.kv_heads, few < 1 ? 1 : few < ROWS ? few : ROWS, [&](auto n, const Rows& rows, int64_t kv, int64_t first) {
        constexpr int M = decltype(n)::value;
        alignas(64) T q[M * MAX_HEAD];
        int64_t at[M];
        T* to[M];
        for (int m = 0; m < M; m++) {
            const int64_t row = (first + m) / share, head = kv * share + (first + m) % share;
            const int64_t place = ((rows.first + row) * heads + head) * D;
            std::memcpy(q + m * D, (const T*)op.a + place, D * sizeof(T));
            at[m] = rows.start + row;
            to[m] = (T*)op.out + place;
        }
        attend<T, M>(q, at, cache, rows.table, kv, float(op.f), op.m, to);
    });
}

// b Linear: rows `token_ids` of a packed matrix -> out float32 [rows, in]
template <class T> static void lookup(const Op& op, const Batch& batch) {
    const Linear& w = *(const Linear*)op.b;
    const Range mine = my_share(batch.rows);
    for (int64_t m = mine.begin; m < mine.end; m++) unpack_row<T>(w, batch.token_ids[m], (float*)op.out + m * w.in);
}

// a matrix [.., n]: rows `token_ids` -> out float32 [rows, n]
template <class T> static void table(const Op& op, const Batch& batch) {
    const Range mine = my_share(batch.rows);
    for (int64_t m = mine.begin; m < mine.end; m++)
        for (int64_t k = 0; k < op.n; k++)
            ((float*)op.out)[m * op.n + k] = to_float(((const T*)op.a)[batch.token_ids[m] * op.n + k]);
}

// a [rows, n bytes]: the rows that want logits -> out
static void select(const Op& op, const Batch& batch) {
    const Range mine = my_share(batch.num_logits);
    for (int64_t m = mine.begin; m < mine.end; m++)
        std::memcpy((char*)op.out + m * op.n, (const char*)op.a + batch.logits_rows[m] * op.n, op.n);
}

template <class T> static void execute(const Op& op, const Batch& batch) {
    const int64_t rows = op.selected ? batch.num_logits : batch.rows;
    switch (op.kind) {
        case LOOKUP: return lookup<T>(op, batch);
        case TABLE: return table<T>(op, batch);
        case ADD_NORM: return add_norm<T>(op, rows);
        case MATMUL: return matmul<T>(op, rows, (T*)op.out);
        case LOGITS: return matmul<T>(op, rows, batch.logits);
        case FFN: return ffn<T>(op, rows);
        case ROTATION: return rotation(op, batch);
        case WRITE: return write<T>(op, batch);
        case ATTENTION: return attention<T>(op, batch);
        case SELECT: return select(op, batch);
        case ROUTE: return route<T>(op, batch);
        case EXPERTS: return experts<T>(op, rows);
        case DELTA: return delta<T>(op, batch);
        case GATE: return gate<T>(op, rows);
        case SCALE: return scale<T>(op, batch);
        case INDEX: return index_rows<T>(op, batch);
        case LATENT_WRITE: return latent_write<T>(op, batch);
        case LATENT_ATTENTION: return latent_attention<T>(op, batch);
        case NORM: return norm<T>(op, rows);
        case SAMPLE: return sample(op, rows);
    }
}

// One team for the whole list: between two ops its threads meet, which no end and start of a parallel region would match.
template <class T> static void run(const Op* ops, int64_t count, const Batch& batch) {
    const bool is_for_one = ops->kind == SAMPLE && batch.rows == 1;  // done before the others are awake
    with_team(is_for_one, [&] {
        for (int64_t i = 0; i < count; i++) {
            if (i > 0) wait_for_all();
            execute<T>(ops[i], batch);
        }
    });
}

template <class T> static void pack(const T* w, int64_t out, int64_t in, T* packed) {
#pragma omp parallel
    {
        std::vector<T> copy(w == packed ? 16 * in : 0);
        const Range mine = my_share((out + 15) / 16);
        for (int64_t p = mine.begin; p < mine.end; p++) {
            const T* rows = w + p * 16 * in;
            if (w == packed) rows = (const T*)std::memcpy(copy.data(), rows, 16 * in * sizeof(T));
            pack_panel(rows, out - p * 16 < 16 ? out - p * 16 : 16, in, packed + p * 16 * in);
        }
    }
}

template <class F> static void pack_blocks(const uint8_t* stored, int64_t row_bytes, int64_t out, int64_t in, uint8_t* packed) {
    const int64_t blocks = in / BLOCK;
#pragma omp parallel
    {
        const Range mine = my_share((out + 15) / 16);
        for (int64_t p = mine.begin; p < mine.end; p++)
            pack_quant_panel<F>(stored, row_bytes, p * 16, out, blocks, packed + p * blocks * F::SIZE);
    }
}

// This file is compiled twice at the same time (native/build.py), because most of the work is in the two types of run().
#if defined(PROA_BF16)
void run_bf16(const Op* ops, int64_t count, const Batch& batch) { run<bf16>(ops, count, batch); }

}  // namespace proa
#else
void run_bf16(const Op* ops, int64_t count, const Batch& batch);

}  // namespace proa

using namespace proa;

extern "C" {

int64_t proa_scratch_bytes(int64_t rows, int64_t in) { return scratch_bytes(rows, in); }

// Rows of a plain type, or of the codes of F8 -> panels. Whole panels may take the memory of their rows: `packed` is `w`.
void proa_pack(int64_t form, const void* w, int64_t out, int64_t in, void* packed) {
    if (form == BF16) pack((const bf16*)w, out, in, (bf16*)packed);
    else if (form == F32) pack((const float*)w, out, in, (float*)packed);
    else pack((const uint8_t*)w, out, in, (uint8_t*)packed);
}

// Experts [slots][out][in] -> their panels, in place (moe.h).
void proa_pack_slots(int64_t form, void* w, int64_t slots, int64_t out, int64_t in, int64_t halves) {
    if (form == BF16) pack_slots((bf16*)w, slots, out, in, halves);
    else if (form == F32) pack_slots((float*)w, slots, out, in, halves);
    else pack_slots((uint8_t*)w, slots, out, in, halves);
}

// Bytes that one row takes in panels of a quantised `form`, 0 where this processor has no products of it.
int64_t proa_row_bytes(int64_t form, int64_t in) {
    return form == F8 && HAS_CODES ? in : quant_row_bytes(form, in);
}

// Stored rows of blocks -> panels of `form`.
void proa_pack_blocks(int64_t form, const void* stored, int64_t row_bytes, int64_t out, int64_t in, void* packed) {
    with_form(form, [&](auto f) {
        pack_blocks<decltype(f)>((const uint8_t*)stored, row_bytes, out, in, (uint8_t*)packed);
    });
}

// Experts [slots][out rows of blocks] -> panels of `form` (moe.h).
void proa_pack_block_slots(int64_t form, const void* stored, int64_t row_bytes, int64_t slots, int64_t out, int64_t in, int64_t halves,
                           void* packed) {
    with_form(form, [&](auto f) {
        pack_block_slots<decltype(f)>((const uint8_t*)stored, row_bytes, slots, out, in, halves, (uint8_t*)packed);
    });
}

void proa_run(int64_t is_bf16, const Op* ops, int64_t count, const Batch* batch) {
    if (is_bf16) run_bf16(ops, count, *batch);
    else run<float>(ops, count, *batch);
}

}  // extern "C"
#endif
