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

constexpr int ROWS = 6, PANELS = 4;  // the widest register tile: 24 accumulators, 4 weights, 1 value
constexpr int FEW = 8;                  // rows of a step that verifies a proposal, or of a small batch
constexpr int PREFETCH = 1024;          // bytes ahead in each panel

// acc[m][b] += x[m, 0:K] . panel[b]; panels need not be neighbours.
template <class T, int M, int NB>
static inline void tile(const T* x, int64_t ldx, const T* const (&panel)[NB], int64_t K, f32x16 (&acc)[M][NB]) {
    using D = Unit<T>;
    for (int64_t k = 0; k < K; k += D::U) {
        typename D::Weight w[NB];
        for (int b = 0; b < NB; b++) {
            const T* at = panel[b] + k * 16;
            __builtin_prefetch(at + PREFETCH / sizeof(T), 0, 3);
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

// `tile` from zero, for wide products: compiled once per shape, whatever the caller does with the sums.
template <class T, int M, int NB>
__attribute__((noinline)) static void product_tile(const T* x, int64_t ldx, const T* const (&panel)[NB], int64_t K,
                                                   f32x16 (&out)[M][NB]) {
    f32x16 acc[M][NB] = {};
    tile<T, M, NB>(x, ldx, panel, K, acc);
    for (int m = 0; m < M; m++) for (int b = 0; b < NB; b++) out[m][b] = acc[m][b];
}

// Rows [m, m + R) times panels [p, p + NB) of packed W.
template <class T, int R, int NB, class Finish>
static inline void product_part(int64_t m, const T* x, int64_t ldx, const T* packed, int64_t K, int64_t p, Finish finish) {
    f32x16 acc[R][NB];
    const T* panel[NB];
    for (int b = 0; b < NB; b++) panel[b] = packed + (p + b) * K * 16;
    product_tile<T, R, NB>(x + m * ldx, ldx, panel, K, acc);
    for (int i = 0; i < R; i++) for (int b = 0; b < NB; b++) finish(m + i, (p + b) * 16, acc[i][b]);
}

// Rows [0, M) times panels [p0, p1) of packed W; `finish(row, column, f32x16)` gets every 16 outputs once.
template <class T, class Finish>
static inline void product(int64_t M, const T* x, int64_t ldx, const T* packed, int64_t K, int64_t p0, int64_t p1, Finish finish) {
    for (int64_t p = p0, panels; p < p1; p += panels) {
        panels = p1 - p < PANELS ? 1 : PANELS;
        for (int64_t m = 0, pass; m < M; m += pass) {
            pass = rows_at_once(M, m);
            with_rows<FEW>(int(pass), [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                constexpr int NB = R > ROWS ? PANELS / 2 : PANELS;  // as many accumulators as there are registers for
                if (panels == 1) return product_part<T, R, 1>(m, x, ldx, packed, K, p, finish);
                for (int64_t at = p; at < p + PANELS; at += NB) product_part<T, R, NB>(m, x, ldx, packed, K, at, finish);
            });
        }
    }
}

}  // namespace proa
