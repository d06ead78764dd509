// Latent attention (MLA) over the paged cache, absorbed: decode, verify and prefill by one routine, flash style.
//
// All heads read the same cached rows [rank + rope], as they are: a score is a product of two rows, and the weighted sum
// takes rows in pairs (bfloat16) whose halves become a dot product's weights. The up-projection is packed per head
// (matmul.h) and applied to queries before and to attended rows after.
//
// One order per output: a score's lanes are elements modulo 16 (32 in bfloat16), tiles of positions lie at absolute
// multiples of SPAN. What else is in the batch, how the prompt was cut, and the page size do not enter.
#pragma once
#include "linear.h"
#include "op.h"

namespace proa {

constexpr int SPAN = 32, MAX_RANK = 512;

struct Latent {  // native/latent.py: CLatent
    const void *key, *value;  // [heads] packed [rank, nope] and [value, rank]
    void* rows;               // [cache rows][rank + rope]
    const float* norm;        // [rank]
    int64_t page_size, heads, nope, rope, value_size, rank, is_interleaved;
    float eps;
    int64_t query() const { return nope + rope; }
    int64_t row() const { return rank + rope; }
    int64_t padded() const { return (row() + 31) / 32 * 32; }  // of an absorbed query; zeros behind it
};

template <class T> struct Lanes;  // a vector of neighbouring elements, and 32 columns of Unit<T>::U rows
template <> struct Lanes<bf16> {
    static constexpr int N = 32;
    using V = u16x32;
    static f32x16 dot(f32x16 acc, V a, V b) {
#if defined(__AVX512BF16__)
        return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
        u32x16 p, q; std::memcpy(&p, &a, 64); std::memcpy(&q, &b, 64);
        acc += as_f32(p << 16) * as_f32(q << 16);
        return acc + as_f32(p & 0xffff0000u) * as_f32(q & 0xffff0000u);
#endif
    }
    // Even columns, then odd ones, each a pair of both rows.
    static void columns(const bf16* const* row, int64_t d, int64_t count, u16x32 (&w)[2]) {
        const u32x16 a = part<u32x16>(row[0] + d, count), b = part<u32x16>(row[1] + d, count);
        w[0] = (u16x32)((a & 0xffffu) | (b << 16));
        w[1] = (u16x32)((a >> 16) | (b & 0xffff0000u));
    }
    static void put(bf16* to, int64_t count, f32x16 even, f32x16 odd) {
        u32x16 both = __builtin_convertvector(round_bf16(even), u32x16) | __builtin_convertvector(round_bf16(odd), u32x16) << 16;
        std::memcpy(to, &both, count * sizeof(bf16));
    }
    template <class W> static W part(const bf16* p, int64_t count) {
        if (count >= N) return load<W>(p);
        W v{}; std::memcpy(&v, p, count * sizeof(bf16));
        return v;
    }
};
template <> struct Lanes<float> {
    static constexpr int N = 16;
    using V = f32x16;
    static f32x16 dot(f32x16 acc, V a, V b) { return acc + a * b; }
    static void columns(const float* const* row, int64_t d, int64_t count, f32x16 (&w)[2]) {
        w[0] = part<V>(row[0] + d, count);
        w[1] = count > N ? part<V>(row[0] + d + N, count - N) : V{};
    }
    static void put(float* to, int64_t count, f32x16 first, f32x16 second) {
        const f32x16 both[2] = {first, second};
        std::memcpy(to, both, count * sizeof(float));
    }
    template <class W> static W part(const float* p, int64_t count) {
        if (count >= N) return load<W>(p);
        W v{}; std::memcpy(&v, p, count * sizeof(float));
        return v;
    }
};

// Four sums of sixteen lanes each, one fixed order.
using f32x4 = float __attribute__((vector_size(16)));
static inline f32x4 fold(f32x16 v) {
    f32x4 q[4]; std::memcpy(q, &v, 64);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
static inline f32x4 sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    const f32x4 p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    return (f32x4{p[0], q[0], r[0], s[0]} + f32x4{p[2], q[2], r[2], s[2]}) +
           (f32x4{p[1], q[1], r[1], s[1]} + f32x4{p[3], q[3], r[3], s[3]});
}

// scores[m][0..4) of M queries with four cached rows of K elements; queries are `ld` apart and padded with zeros.
template <class T, int M>
static inline void score_rows(const T* q, int64_t ld, const T* const* row, int64_t K, float (&scores)[M][SPAN], int at) {
    using L = Lanes<T>;
    f32x16 acc[M][4] = {};
    auto step = [&](int64_t k, auto read) {
        typename L::V c[4];
        for (int b = 0; b < 4; b++) c[b] = read(row[b] + k);
        for (int m = 0; m < M; m++) {
            auto a = load<typename L::V>(q + m * ld + k);
            for (int b = 0; b < 4; b++) acc[m][b] = L::dot(acc[m][b], a, c[b]);
        }
    };
    int64_t k = 0;
    for (; k + L::N <= K; k += L::N) step(k, [](const T* p) { return load<typename L::V>(p); });
    if (k < K) step(k, [&](const T* p) { return L::template part<typename L::V>(p, K - k); });
    for (int m = 0; m < M; m++) store(scores[m] + at, sums(acc[m][0], acc[m][1], acc[m][2], acc[m][3]));
}

// total[m][d .. d + 32 NB) += weights[m] . rows, for `count` rows; the last NB may be of fewer than 32 columns.
template <class T, int M, int NB>
static inline void weigh_rows(const T* weights, const T* const* row, int count, int64_t d, int64_t columns, float (&total)[M][MAX_RANK]) {
    constexpr int U = Unit<T>::U;
    f32x16 acc[M][2 * NB];
    for (int m = 0; m < M; m++) for (int b = 0; b < 2 * NB; b++) acc[m][b] = load<f32x16>(total[m] + d + 16 * b);
    for (int p = 0; p < count; p += U) {
        typename Unit<T>::Weight w[NB][2];
        for (int b = 0; b < NB; b++) Lanes<T>::columns(row + p, d + 32 * b, NB == 1 ? columns : 32, w[b]);
        for (int m = 0; m < M; m++) {
            auto a = Unit<T>::value(weights + m * SPAN + p);
            for (int b = 0; b < 2 * NB; b++) acc[m][b] = Unit<T>::dot(acc[m][b], a, w[b / 2][b % 2]);
        }
    }
    for (int m = 0; m < M; m++) for (int b = 0; b < 2 * NB; b++) store(total[m] + d + 16 * b, acc[m][b]);
}

// M absorbed queries `ld` apart, query m at position at[m]; their attended rows [rank] take their place. `chosen`: positions
// that they see, in ascending order, at[m] being the place of the last one; null: every position up to their own.
template <class T, int M>
static inline void attend_latent(T* q, int64_t ld, const int64_t (&at)[M], const Latent& w, const int32_t* table,
                                 const int32_t* chosen, float scale) {
    const int64_t R = w.rank;
    float best[M], mass[M];
    alignas(64) float total[M][MAX_RANK];
    int64_t last = 0;
    for (int m = 0; m < M; m++) {
        best[m] = -INFINITY; mass[m] = 0;
        for (int64_t d = 0; d < R; d += 16) store(total[m] + d, f32x16{});
        if (R % 32) store(total[m] + R, f32x16{});
        last = at[m] > last ? at[m] : last;
    }
    for (int64_t tile0 = 0; tile0 <= last; tile0 += SPAN) {
        const int count = int(last - tile0 + 1 < SPAN ? last - tile0 + 1 : SPAN);
        const T* row[SPAN];
        for (int p = 0; p < SPAN; p++) {  // rows that nobody may have written repeat a valid one and weigh nothing
            const int64_t place = tile0 + (p < count ? p : 0), position = chosen ? chosen[place] : place;
            row[p] = (const T*)w.rows + (table[position / w.page_size] * w.page_size + position % w.page_size) * w.row();
        }
        alignas(64) float scores[M][SPAN];
        alignas(64) T weights[M][SPAN];
        for (int p = 0; p < SPAN; p += 4) {
            if (p < count) score_rows<T, M>(q, ld, row + p, w.row(), scores, p);
            else for (int m = 0; m < M; m++) store(scores[m] + p, f32x4{});
        }
        for (int m = 0; m < M; m++) {
            f32x16 both[2] = {load<f32x16>(scores[m]), load<f32x16>(scores[m] + 16)};
            const float shrink = soften(both, scale, 0, at[m] - tile0, best[m], mass[m], weights[m]);
            if (shrink != 1.f) for (int64_t d = 0; d < R; d += 16) store(total[m] + d, load<f32x16>(total[m] + d) * shrink);
            if (shrink != 1.f && R % 32) store(total[m] + R, load<f32x16>(total[m] + R) * shrink);
        }
        int64_t d = 0;
        for (; d + 64 <= R; d += 64) weigh_rows<T, M, 2>(weights[0], row, count, d, 64, total);
        for (; d < R; d += 32) weigh_rows<T, M, 1>(weights[0], row, count, d, R - d, total);
    }
    for (int m = 0; m < M; m++)
        for (int64_t d = 0; d < R; d += 32)
            Lanes<T>::put(q + m * ld + d, R - d < 32 ? R - d : 32, load<f32x16>(total[m] + d) / mass[m],
                          load<f32x16>(total[m] + d + 16) / mass[m]);
}

// a queries, rows n apart; b Latent; c latent rows, m apart; d cosines and e sines [rows, rope], or null -> out queries
// [rows, heads, nope + rope], rotated; the normed and rotated latent rows go to the cache rows `slots`.
template <class T> static void latent_write(const Op& op, const Batch& batch) {
    const Latent& w = *(const Latent*)op.b;
    const int64_t parts = w.heads + 1, Q = w.query();
    const Range mine = my_share(batch.rows * parts);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const int64_t m = i / parts, head = i % parts;
        auto turn = [&](const T* x, T* y) {
            const int64_t at = m * w.rope;
            if (op.d) rotate(x, w.rope, w.is_interleaved, (const float*)op.d + at, (const float*)op.e + at, y);
            else std::memcpy(y, x, w.rope * sizeof(T));
        };
        if (head < w.heads) {
            const T* x = (const T*)op.a + m * op.n + head * Q;
            T* y = (T*)op.out + (m * w.heads + head) * Q;
            std::memcpy(y, x, w.nope * sizeof(T));
            turn(x + w.nope, y + w.nope);
            continue;
        }
        const T* x = (const T*)op.c + m * op.m;
        T* row = (T*)w.rows + batch.slots[m] * w.row();
        norm_row(x, w.norm, w.eps, w.rank, row);
        turn(x + w.rank, row + w.rank);
    }
}

// f(head, first panel, end): the calling thread's part of `panels` of every head.
template <class F> static inline void share_heads(int64_t heads, int64_t panels, F f) {
    const Range mine = my_share(heads * panels);
    for (int64_t i = mine.begin, next; i < mine.end; i = next) {
        next = (i / panels + 1) * panels;
        next = next < mine.end ? next : mine.end;
        f(i / panels, i % panels, next - i / panels * panels);
    }
}

// a queries [rows, heads, nope + rope], b Latent, e lists of chosen rows (sparse.h), m apart, or null, f scale -> out
// [rows, heads * value]. tmp [rows, heads, padded]: absorbed queries, then attended rows.
template <class T> static void latent_attention(const Op& op, const Batch& batch) {
    const Latent& w = *(const Latent*)op.b;
    const int64_t rows = batch.rows, ld = w.padded(), H = w.heads, Q = w.query(), R = w.rank, V = w.value_size;
    const T* queries = (const T*)op.a;
    T* absorbed = (T*)op.tmp;
    share_heads(H, R / 16, [&](int64_t head, int64_t begin, int64_t end) {
        product<T>(rows, queries + head * Q, H * Q, (const T*)w.key + head * R * w.nope, w.nope, begin, end,
                   [&](int64_t m, int64_t n, f32x16 v) { store16(absorbed + (m * H + head) * ld + n, v); });
    });
    const Range copied = my_share(rows * H);
    for (int64_t i = copied.begin; i < copied.end; i++) {
        std::memcpy(absorbed + i * ld + R, queries + i * Q + w.nope, w.rope * sizeof(T));
        std::memset(absorbed + i * ld + w.row(), 0, (ld - w.row()) * sizeof(T));
    }
    wait_for_all();
    const int64_t team = omp_get_num_threads(), rounds = (rows * H + team * ROWS - 1) / (team * ROWS);
    int64_t width = (rows * H + team * rounds - 1) / (team * rounds);
    while (op.e && H % width) width--;  // rows see different lists
    share_queries(batch, H, 1, width, [&](auto n, const Rows& one, int64_t, int64_t first) {
        constexpr int M = decltype(n)::value;
        const int32_t* list = op.e ? (const int32_t*)op.e + (one.first + first / H) * op.m : nullptr;
        int64_t at[M];
        for (int m = 0; m < M; m++) at[m] = list ? list[0] - 1 : one.start + (first + m) / H;
        attend_latent<T, M>(absorbed + (one.first * H + first) * ld, ld, at, w, one.table, list ? list + 1 : nullptr, float(op.f));
    });
    wait_for_all();
    const int64_t panels = (V + 15) / 16;
    share_heads(H, panels, [&](int64_t head, int64_t begin, int64_t end) {
        product<T>(rows, absorbed + head * ld, H * ld, (const T*)w.value + head * panels * 16 * R, R, begin, end,
                   [&](int64_t m, int64_t n, f32x16 v) { put((T*)op.out + (m * H + head) * V, n, V, v); });
    });
}

}  // namespace proa
