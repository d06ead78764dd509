// Sixteen-lane vectors for every instruction set, through GCC/Clang vector extensions: the compiler lowers them to one
// 512-bit or two 256-bit registers. Only the bf16 and int8 dot products need an intrinsic, and each has a plain form here.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace proa {

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using u16x32 = uint16_t __attribute__((vector_size(64)));

template <class V> static inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> static inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
static inline f32x16 splat(float x) { return f32x16{} + x; }
static inline f32x16 as_f32(u32x16 v) { f32x16 r; std::memcpy(&r, &v, 64); return r; }
static inline u32x16 as_u32(f32x16 v) { u32x16 r; std::memcpy(&r, &v, 64); return r; }

// bfloat16 is the upper half of a float32; storing rounds to nearest, ties to even. NaN does not occur in activations.
struct bf16 { uint16_t bits; };
static inline float to_float(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
static inline float to_float(float x) { return x; }
template <class T> static inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t u; std::memcpy(&u, &x, 4);
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
static inline u16x16 round_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x16 u = as_u32(v);
    u += 0x7fffu + ((u >> 16) & 1u);
    return __builtin_convertvector(u >> 16, u16x16);
#endif
}
static inline f32x16 widen(u16x16 v) { return as_f32(__builtin_convertvector(v, u32x16) << 16); }

// Sixteen consecutive elements of an activation or weight row, as float32.
static inline f32x16 load16(const float* p) { return load<f32x16>(p); }
static inline f32x16 load16(const bf16* p) { return widen(load<u16x16>(p)); }
static inline void store16(float* p, f32x16 v) { store(p, v); }
static inline void store16(bf16* p, f32x16 v) { store(p, round_bf16(v)); }

static inline float sum(f32x16 v) {  // one fixed order: halves, then pairs
    float t[16]; store(t, v);
    for (int width = 8; width > 0; width /= 2) for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}
static inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
static inline float max(f32x16 v) {
    float t[16]; store(t, v); float m = t[0];
    for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
    return m;
}

// e^x: 2^n * p(f) with x*log2(e) = n + f, |f| <= 1/2, degree-6 Taylor of 2^f in Horner form. Relative error < 3e-7 on [-87, 88].
static inline f32x16 exp(f32x16 x) {
    x = max(x, splat(-87.f));
    x = x > 88.f ? splat(88.f) : x;
    f32x16 t = x * 1.44269504089f;
    f32x16 n = (t + 12582912.f) - 12582912.f;  // round to nearest: 1.5 * 2^23
    f32x16 f = t - n;
    f32x16 p = splat(1.5403530393e-4f);
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.f;
    i32x16 e = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale; std::memcpy(&scale, &e, 64);
    return p * scale;
}
static inline f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.f); }

// silu(gate) * up, gate cut to at most `limit` and up to -limit..limit; INFINITY cuts nothing. arch/blocks.py: ActivationSpec.
static inline f32x16 activate(f32x16 gate, f32x16 up, float limit) {
    gate = gate > limit ? splat(limit) : gate;
    up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
    return silu(gate) * up;
}

}  // namespace proa
