// y = x W^T for packed W, one accumulation order for every number of rows.
//
// Packed form: columns in panels of 16; a panel is [K/U][16][U], so one 64-byte load feeds 16 outputs.
// U = 2 for bfloat16 (a dot-product pair), 1 for float32. Each output is one accumulator over k = 0, U, 2U, ...: neither
// the number of rows, nor the tile that holds it, nor the thread count changes its bits.
#pragma once
#include "simd.h"
#include "threads.h"
#include <type_traits>

namespace proa {

template <class T> struct Unit;  // how one k step reads weights and activations
template <> struct Unit<bf16> {
    static constexpr int U = 2;
    using Weight = u16x32;
    using Value = uint32_t;  // two activations
    static Value value(const bf16* x) { uint32_t v; std::memcpy(&v, x, 4); return v; }
    static f32x16 dot(f32x16 acc, Value a, Weight w) {
#if defined(__AVX512BF16__)
        return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)w);
#else
        u32x16 pairs; std::memcpy(&pairs, &w, 64);
        acc += as_f32(pairs << 16) * as_f32(u32x16{} + (a << 16));
        return acc + as_f32(pairs & 0xffff0000u) * as_f32(u32x16{} + (a & 0xffff0000u));
#endif
    }
};
template <> struct Unit<float> {
    static constexpr int U = 1;
    using Weight = f32x16;
    using Value = float;
    static Value value(const float* x) { return *x; }
    static f32x16 dot(f32x16 acc, Value a, Weight w) { return acc + w * a; }
};

// One panel from `count` rows of W, zeros for missing ones.
template <class T> static inline void pack_panel(const T* w, int64_t count, int64_t K, T* panel) {
    constexpr int U = Unit<T>::U;
    for (int64_t k = 0; k < K; k += U)
        for (int64_t c = 0; c < 16; c++)
            for (int u = 0; u < U; u++) panel[k * 16 + c * U + u] = c < count ? w[c * K + k + u] : T{};
}

constexpr int ROWS = 6, PANELS = 4;  // the widest register tile: 24 accumulators, 4 weights, 1 value
constexpr int FEW = 8;                  // rows of a step that verifies a proposal, or of a small batch
constexpr int PREFETCH = 256;           // bytes ahead in each of several panels
constexpr int STREAM = 4096;            // bytes ahead in one, whose end is the beginning of the next

// acc[m][b] += x[m, 0:K] . panel[b]; panels need not be neighbours.
template <class T, int M, int NB>
static inline void tile(const T* x, int64_t ldx, const T* const (&panel)[NB], int64_t K, f32x16 (&acc)[M][NB]) {
    using D = Unit<T>;
    constexpr int ahead = (NB == 1 ? STREAM : PREFETCH) / sizeof(T);
    for (int64_t k = 0; k < K; k += D::U) {
        typename D::Weight w[NB];
        for (int b = 0; b < NB; b++) {
            const T* at = panel[b] + k * 16;
            __builtin_prefetch(at + ahead, 0, 3);
            w[b] = load<typename D::Weight>(at);
        }
        for (int m = 0; m < M; m++) {
            typename D::Value a = D::value(x + m * ldx + k);
            for (int b = 0; b < NB; b++) acc[m][b] = D::dot(acc[m][b], a, w[b]);
        }
    }
}

// f(std::integral_constant<int, m>) for 1 <= m <= MAX: turns a row count into a compile-time one.
template <int MAX, class F> static inline void with_rows(int m, F f) {
    if constexpr (MAX > 1) {
        if (m < MAX) return with_rows<MAX - 1>(m, f);
    }
    f(std::integral_constant<int, MAX>{});
}

// Rows of the pass that starts at row m. Up to FEW rows go in one pass, so that weights are read from memory once.
static inline int64_t rows_at_once(int64_t rows, int64_t m) { return rows <= FEW ? rows : rows - m < ROWS ? rows - m : ROWS; }

// Rows [0, R) times panels [0, NB): sums[row * panels + panel].
template <class T, int R, int NB>
static inline void sum_tile(const T* x, int64_t ldx, const T* packed, int64_t K, int64_t panels, f32x16* sums) {
    f32x16 acc[R][NB] = {};
    const T* panel[NB];
    for (int b = 0; b < NB; b++) panel[b] = packed + b * K * 16;
    tile<T, R, NB>(x, ldx, panel, K, acc);
    for (int m = 0; m < R; m++) for (int b = 0; b < NB; b++) sums[m * panels + b] = acc[m][b];
}

// As sum_tile for any R <= FEW and NB = 1 or PANELS. Compiled once, whatever the callers do with the sums.
template <class T>
__attribute__((noinline)) static void sum_tiles(int64_t rows, const T* x, int64_t ldx, const T* packed, int64_t K, int64_t panels,
                                                f32x16* sums) {
    with_rows<FEW>(int(rows), [&](auto count) {
        constexpr int R = decltype(count)::value;
        constexpr int NB = R > ROWS ? PANELS / 2 : PANELS;  // as many accumulators as there are registers for
        if (panels == 1) return sum_tile<T, R, 1>(x, ldx, packed, K, panels, sums);
        for (int b = 0; b < PANELS; b += NB) sum_tile<T, R, NB>(x, ldx, packed + b * K * 16, K, panels, sums + b);
    });
}

// Rows [0, M) times panels [p0, p1) of packed W; `finish(row, column, f32x16)` gets every 16 outputs once. Products of few
// rows take as long as reading W does. One panel at a time is then best: a single stream, which prefetchers follow.
template <class T, class Finish>
static inline void product(int64_t M, const T* x, int64_t ldx, const T* packed, int64_t K, int64_t p0, int64_t p1, Finish finish) {
    f32x16 sums[FEW * PANELS];
    const bool is_stream = M <= FEW;
    for (int64_t p = p0, panels; p < p1; p += panels) {
        panels = is_stream || p1 - p < PANELS ? 1 : PANELS;
        for (int64_t m = 0, pass; m < M; m += pass) {
            pass = rows_at_once(M, m);
            sum_tiles(pass, x + m * ldx, ldx, packed + p * K * 16, K, panels, sums);
            for (int64_t i = 0; i < pass; i++)
                for (int64_t b = 0; b < panels; b++) finish(m + i, (p + b) * 16, sums[i * panels + b]);
        }
    }
}

}  // namespace proa
