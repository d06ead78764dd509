// Products of quantised weights with activations quantised on the way in: the checkpoint's own blocks, never re-rounded.
//
// A block is 32 consecutive k of one output column, in one or two groups with a scale each. Weights are stored unsigned,
// activations signed, so that one vpdpbusd multiplies four pairs of sixteen columns. Per group and column:
//   w = scale * u + offset,   sum_k w a  =  a_scale * (scale * sum u a + offset * sum a)
// Activations: per row and block, a_scale = max|x| / 127 (Q8_1 of ggml does the same).
//
// Packed panel of 16 columns, per block: bytes, then scales [groups][16], then, where they are stored, offsets [16].
//   8 bit: [8 steps][16 columns][4]      4 bit: [4][16][4], low nibble = step s, high nibble = step s + 4
#pragma once
#include "simd.h"
#include "threads.h"
#include <algorithm>
#include <type_traits>

namespace proa {

constexpr int BLOCK = 32;

struct Quantised {  // one row of activations: K int8 values, per block its scale, per 16 values their sum
    int8_t* values;
    float* scales;
    int32_t* sums;
};

template <class T> static inline void quantise_row(const T* x, int64_t K, Quantised q) {
    for (int64_t b = 0; b < K / BLOCK; b++) {
        f32x16 lo = load16(x + b * BLOCK), hi = load16(x + b * BLOCK + 16);
        f32x16 top = max(max(lo, -lo), max(hi, -hi));
        const float peak = max(top), inverse = peak > 0 ? 127.f / peak : 0.f;
        q.scales[b] = peak / 127.f;
        for (int half = 0; half < 2; half++) {
            int32_t total = 0;
            f32x16 r = ((half ? hi : lo) * inverse + 12582912.f) - 12582912.f;
            i32x16 n = __builtin_convertvector(r, i32x16);
            auto bytes = __builtin_convertvector(n, int8_t __attribute__((vector_size(16))));
            std::memcpy(q.values + b * BLOCK + 16 * half, &bytes, 16);
            for (int i = 0; i < 16; i++) total += n[i];
            q.sums[2 * b + half] = total;
        }
    }
}

using u8x64 = uint8_t __attribute__((vector_size(64)));
static inline i32x16 dot4(i32x16 acc, u8x64 w, int32_t a) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
#else
    (void)w, (void)a;
    return acc;  // never called: linear.h, with_form
#endif
}
static inline f32x16 half16(const uint16_t* p) {
#if defined(__F16C__) && defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    using h16 = _Float16 __attribute__((vector_size(32)));
    return __builtin_convertvector(load<h16>(p), f32x16);
#endif
}

static inline f32x16 factors16(const float* p) { return load<f32x16>(p); }
static inline f32x16 factors16(const uint16_t* p) { return half16(p); }

// `Factor`: float16 (as stored) or float32 (made of two stored factors). ZERO: offset / -scale where none is stored.
template <int BITS_, int GROUPS_, class Factor_, bool HAS_OFFSET_, int ZERO_> struct BlockForm {
    static constexpr int BITS = BITS_, GROUPS = GROUPS_, ZERO = ZERO_;
    static constexpr bool HAS_OFFSET = HAS_OFFSET_;
    using Factor = Factor_;
    static constexpr int BYTES = 16 * BLOCK * BITS / 8;
    static constexpr int SIZE = BYTES + (GROUPS + HAS_OFFSET) * 16 * int(sizeof(Factor));
};
using FormQ8_0 = BlockForm<8, 1, uint16_t, false, 128>;
using FormQ4_0 = BlockForm<4, 1, uint16_t, false, 8>;
using FormQ4_1 = BlockForm<4, 1, uint16_t, true, 0>;
using FormQ4_K = BlockForm<4, 1, float, true, 0>;
using FormQ6_K = BlockForm<8, 2, float, false, 32>;

// Rows m of the quantised activations times one panel: acc[m] over all blocks in ascending k. Not inlined: the callers
// differ in what they do with the sums, and each form is compiled once.
template <class F, int M>
__attribute__((noinline)) static void quant_tile(const Quantised* q, const uint8_t* panel, int64_t blocks, f32x16 (&acc)[M]) {
    constexpr int STEPS = F::BITS / F::GROUPS;  // loads of one group
    for (int64_t k = 0; k < blocks; k++) {
        const uint8_t* at = panel + k * F::SIZE;
        for (int line = 0; line < F::SIZE; line += 64) __builtin_prefetch(at + 4096 + line, 0, 3);
        const auto* factors = (const typename F::Factor*)(at + F::BYTES);
        for (int g = 0; g < F::GROUPS; g++) {
            i32x16 dot[M] = {};
            for (int s = g * STEPS; s < (g + 1) * STEPS; s++) {
                u8x64 w = load<u8x64>(at + 64 * s);
                if constexpr (F::BITS == 8) {
                    for (int m = 0; m < M; m++) dot[m] = dot4(dot[m], w, load<int32_t>(q[m].values + k * BLOCK + 4 * s));
                } else {
                    u8x64 low = w & 15, high = (u8x64)((u16x32)w >> 4) & 15;
                    for (int m = 0; m < M; m++) {
                        dot[m] = dot4(dot[m], low, load<int32_t>(q[m].values + k * BLOCK + 4 * s));
                        dot[m] = dot4(dot[m], high, load<int32_t>(q[m].values + k * BLOCK + 16 + 4 * s));
                    }
                }
            }
            const f32x16 scale = factors16(factors + 16 * g);
            const f32x16 offset = F::HAS_OFFSET ? factors16(factors + 16) : scale * float(-F::ZERO);
            for (int m = 0; m < M; m++) {
                const int32_t* sums = q[m].sums + 2 * k;
                const int32_t total = F::GROUPS == 2 ? sums[g] : sums[0] + sums[1];
                f32x16 part = __builtin_convertvector(dot[m], f32x16) * scale + offset * float(total);
                acc[m] += part * q[m].scales[k];
            }
        }
    }
}

static inline float half(const uint8_t* p) {
    _Float16 h; std::memcpy(&h, p, 2);
    return float(h);
}

// Stored blocks of ggml -> 32 unsigned values and the factors of one panel column. `row` is the stored row, k the block.
struct Unpacked { uint8_t u[BLOCK]; float scale[2], offset; uint16_t stored[2]; };

// [float16 scale, float16 minimum (Q4_1), values]: int8, or nibbles whose low halves are values 0-15, high halves 16-31
template <class F> static inline void read_block(const uint8_t* row, int64_t k, Unpacked& out) {
    constexpr int FACTORS = F::HAS_OFFSET ? 4 : 2, STORED = FACTORS + BLOCK * F::BITS / 8;
    const uint8_t *block = row + k * STORED, *at = block + FACTORS;
    for (int i = 0; i < BLOCK; i++) out.u[i] = F::BITS == 8 ? uint8_t(at[i] + 128) : i < 16 ? at[i] & 15 : at[i - 16] >> 4;
    std::memcpy(out.stored, block, FACTORS);
}
// 256 values: float16 d and dmin, eight 6-bit scales and minima in 12 bytes, nibbles; w = d * scale * u - dmin * minimum
template <> inline void read_block<FormQ4_K>(const uint8_t* row, int64_t k, Unpacked& out) {
    const uint8_t *block = row + k / 8 * 144, *six = block + 4, *at = block + 16 + k % 8 / 2 * 32;
    const int j = int(k % 8);
    for (int i = 0; i < BLOCK; i++) out.u[i] = j % 2 ? at[i] >> 4 : at[i] & 15;
    const int scale = j < 4 ? six[j] & 63 : (six[j + 4] & 15) | (six[j - 4] >> 6) << 4;
    const int minimum = j < 4 ? six[j + 4] & 63 : six[j + 4] >> 4 | (six[j] >> 6) << 4;
    out.scale[0] = half(block) * float(scale);
    out.offset = -half(block + 2) * float(minimum);
}
// 256 values: low nibbles [128], high pairs of bits [64], sixteen int8 scales, float16 d; w = d * scale * (u - 32)
template <> inline void read_block<FormQ6_K>(const uint8_t* row, int64_t k, Unpacked& out) {
    const uint8_t* block = row + k / 8 * 210;
    const int part = int(k % 8 / 4), quarter = int(k % 4);
    const uint8_t *low = block + part * 64 + quarter % 2 * 32, *high = block + 128 + part * 32;
    for (int i = 0; i < BLOCK; i++)
        out.u[i] = uint8_t((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4);
    for (int g = 0; g < 2; g++) out.scale[g] = half(block + 208) * float(int8_t(block[192 + part * 8 + quarter * 2 + g]));
}

template <class F> static inline void put_factors(const Unpacked& from, int c, uint8_t* at) {
    auto* factors = (typename F::Factor*)at;
    if constexpr (sizeof(typename F::Factor) == 2) {
        factors[c] = from.stored[0];
        if (F::HAS_OFFSET) factors[16 + c] = from.stored[1];
    } else {
        for (int g = 0; g < F::GROUPS; g++) factors[16 * g + c] = from.scale[g];
        if (F::HAS_OFFSET) factors[16 + c] = from.offset;
    }
}

// One panel: column c of the panel is row `first + c` of the stored matrix; rows past the end are zero.
template <class F> static void pack_quant_panel(const uint8_t* stored, int64_t row_bytes, int64_t first, int64_t rows,
                                                int64_t blocks, uint8_t* panel) {
    if (first + 16 > rows) std::memset(panel, 0, blocks * F::SIZE);
    for (int64_t k = 0; k < blocks; k++, panel += F::SIZE)
        for (int c = 0; c < 16 && first + c < rows; c++) {
            Unpacked one;
            read_block<F>(stored + (first + c) * row_bytes, k, one);
            for (int s = 0; s < F::BITS; s++) {  // four values at once: 8 steps of bytes, or 4 of two nibbles
                uint32_t four = load<uint32_t>(one.u + 4 * s);
                if (F::BITS == 4) four |= load<uint32_t>(one.u + 16 + 4 * s) << 4;
                store(panel + 64 * s + 4 * c, four);
            }
            put_factors<F>(one, c, panel + F::BYTES);
        }
}

template <class F> static void unpack_quant_row(const uint8_t* packed, int64_t n, int64_t in, float* y) {
    const int64_t blocks = in / BLOCK, c = n % 16;
    const uint8_t* panel = packed + n / 16 * blocks * F::SIZE;
    for (int64_t k = 0; k < blocks; k++, panel += F::SIZE, y += BLOCK) {
        const auto* factors = (const typename F::Factor*)(panel + F::BYTES);
        for (int i = 0; i < BLOCK; i++) {
            const int step = i / 4, g = F::GROUPS == 2 ? i / 16 : 0;
            const float scale = factors16(factors + 16 * g)[c];
            const float offset = F::HAS_OFFSET ? factors16(factors + 16)[c] : scale * float(-F::ZERO);
            const uint8_t byte = panel[(F::BITS == 4 ? step % 4 : step) * 64 + c * 4 + i % 4];
            y[i] = scale * float(F::BITS == 8 ? byte : step >= 4 ? byte >> 4 : byte & 15) + offset;
        }
    }
}

}  // namespace proa
