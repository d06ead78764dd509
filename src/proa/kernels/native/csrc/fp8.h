// Products of block-FP8 weights (e4m3 codes, one float32 scale per block), kept in 8 bits: exact values times their scale.
//
// Packed panel of 16 columns: [K/4][64] codes, four k of each column, so placed that two byte tables and two unpacks make
// bfloat16 pairs of them, as matmul.h wants them (bfloat16 holds every e4m3 value). Scales: [panels][blocks of k].
//
// Order: per block one accumulator over ascending k, then sum += scale * accumulator. Few rows decode in registers; many
// share a block that was decoded once. Both sum alike, so the number of rows does not enter.
#pragma once
#include "matmul.h"
#include <cmath>
#include <utility>

namespace proa {

constexpr int64_t MAX_BLOCK = 128;   // k of one scale; a multiple of 16 (plan/kept.py)
constexpr int64_t SHARED = 3 * ROWS;  // so many rows share a decoded block, up to CHUNK; fewer decode it anew
constexpr int64_t CHUNK = 8 * ROWS;

struct Codes {  // panels of a weight
    const uint8_t* codes;
    const float* scales;
    int64_t K, block;
    int64_t blocks() const { return (K + block - 1) / block; }
    int64_t end(int64_t j) const { return (j + 1) * block < K ? (j + 1) * block : K; }
    Codes panel(int64_t p) const { return {codes + p * 16 * K, scales + p * blocks(), K, block}; }
};

// Where a panel holds column n of k.
static inline int64_t code_at(int64_t k, int64_t n) { return k / 4 * 64 + n / 4 * 16 + k % 4 / 2 * 8 + n % 4 * 2 + k % 2; }

static inline void pack_panel(const uint8_t* w, int64_t count, int64_t K, uint8_t* panel) {
    if (count < 16) std::memset(panel, 0, K * 16);
    for (int64_t k = 0; k < K; k += 2)
        for (int64_t n = 0; n < count; n++) std::memcpy(panel + code_at(k, n), w + n * K + k, 2);
}

static inline float code_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? float(8 + mantissa) * float(1 << exponent) / 1024.f : float(mantissa) / 512.f;
    return (code & 127) == 127 ? NAN : code & 128 ? -size : size;
}

static inline void unpack_code_row(const Codes& w, int64_t n, float* y) {
    const Codes panel = w.panel(n / 16);
    for (int64_t k = 0; k < w.K; k++) y[k] = code_value(panel.codes[code_at(k, n % 16)]) * panel.scales[k / w.block];
}

#if defined(__AVX512VBMI__)
constexpr bool HAS_CODES = true;

struct CodeBytes {  // low and high bytes of the positive values as bfloat16
    alignas(64) uint8_t low[128], high[128];
    CodeBytes() {
        for (int c = 0; c < 128; c++) {
            const uint16_t bits = from_float<bf16>(code_value(uint8_t(c))).bits;
            low[c] = uint8_t(bits), high[c] = uint8_t(bits >> 8);
        }
    }
};
static const CodeBytes CODE_BYTES;

struct Decoder {
    struct Pairs { u16x32 first, second; };  // k and k + 1, k + 2 and k + 3, of 16 columns
    __m512i low[2], high[2];
    Decoder() {
        for (int i = 0; i < 2; i++) low[i] = load<__m512i>(CODE_BYTES.low + 64 * i), high[i] = load<__m512i>(CODE_BYTES.high + 64 * i);
    }
    Pairs operator()(const uint8_t* at) const {
        __m512i codes = load<__m512i>(at);
        asm("" : "+v"(codes));  // read once: a use as an index destroys it, and copies are cheaper than loads
        const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        __m512i upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
        upper = _mm512_ternarylogic_epi64(upper, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | (b & c)
        return {(u16x32)_mm512_unpacklo_epi8(lower, upper), (u16x32)_mm512_unpackhi_epi8(lower, upper)};
    }
};

template <class T> struct Coded;  // how pairs meet activations, and how they lie in a decoded block
template <> struct Coded<bf16> {
    static f32x16 dot(f32x16 acc, const bf16* x, u16x32 w) { return Unit<bf16>::dot(acc, Unit<bf16>::value(x), w); }
    static void put(bf16* to, u16x32 w) { store(to, w); }
};
template <> struct Coded<float> {
    static f32x16 even(u16x32 w) { u32x16 both; std::memcpy(&both, &w, 64); return as_f32(both << 16); }
    static f32x16 odd(u16x32 w) { u32x16 both; std::memcpy(&both, &w, 64); return as_f32(both & 0xffff0000u); }
    static f32x16 dot(f32x16 acc, const float* x, u16x32 w) {
        return Unit<float>::dot(Unit<float>::dot(acc, x[0], even(w)), x[1], odd(w));
    }
    static void put(float* to, u16x32 w) { store(to, even(w)); store(to + 16, odd(w)); }
};

static inline f32x16 add_scaled(f32x16 total, f32x16 part, float scale) {  // rounded once, wherever it is called
    return (f32x16)_mm512_fmadd_ps((__m512)part, _mm512_set1_ps(scale), (__m512)total);
}

// f(0), ..., f(N - 1) with constants, so that arrays which they index stay in registers.
template <int... I, class F> static inline void each_of(std::integer_sequence<int, I...>, F f) { (f(std::integral_constant<int, I>{}), ...); }
template <int N, class F> static inline void each(F f) { each_of(std::make_integer_sequence<int, N>{}, f); }

// Rows [0, R) times panels [0, NB): sums[row * panels + panel].
template <class T, int R, int NB>
static inline void code_tile(const T* x, int64_t ldx, const Codes& w, int64_t panels, f32x16* sums) {
    const Decoder decode;
    const int64_t blocks = w.blocks();
    for (int m = 0; m < R; m++) for (int b = 0; b < NB; b++) sums[m * panels + b] = f32x16{};
    for (int64_t j = 0; j < blocks; j++) {
        f32x16 acc[R][NB] = {};
        for (int64_t k = j * w.block, end = w.end(j); k < end; k += 4)
            each<NB>([&](auto b) {
                const uint8_t* at = w.codes + (b * w.K + k) * 16;
                __builtin_prefetch(at + PREFETCH, 0, 3);
                const Decoder::Pairs pairs = decode(at);
                each<R>([&](auto m) {
                    const T* a = x + m * ldx + k;
                    acc[m][b] = Coded<T>::dot(Coded<T>::dot(acc[m][b], a, pairs.first), a + 2, pairs.second);
                });
            });
        each<NB>([&](auto b) {
            const float scale = w.scales[b * blocks + j];
            each<R>([&](auto m) { sums[m * panels + b] = add_scaled(sums[m * panels + b], acc[m][b], scale); });
        });
    }
}

template <class T>
__attribute__((noinline)) static void few_rows(int64_t rows, const T* x, int64_t ldx, const Codes& w, int64_t panels, f32x16* sums) {
    with_rows<FEW>(int(rows), [&](auto count) {
        constexpr int R = decltype(count)::value, NB = R > ROWS ? PANELS / 2 : PANELS;
        if (panels == 1) return code_tile<T, R, 1>(x, ldx, w, panels, sums);
        for (int b = 0; b < PANELS; b += NB) code_tile<T, R, NB>(x, ldx, w.panel(b), panels, sums + b);
    });
}

template <class T>
__attribute__((noinline)) static void many_rows(int64_t rows, const T* x, int64_t ldx, const Codes& w, int64_t panels, f32x16* sums) {
    const Decoder decode;
    alignas(64) T decoded[PANELS * MAX_BLOCK * 16];
    f32x16 part[FEW * PANELS];
    const int64_t blocks = w.blocks();
    for (int64_t i = 0; i < rows * panels; i++) sums[i] = f32x16{};
    for (int64_t j = 0; j < blocks; j++) {
        const int64_t first = j * w.block, count = w.end(j) - first;
        for (int64_t b = 0; b < panels; b++)
            for (int64_t k = 0; k < count; k += 4) {
                const Decoder::Pairs pairs = decode(w.codes + (b * w.K + first + k) * 16);
                Coded<T>::put(decoded + (b * count + k) * 16, pairs.first);
                Coded<T>::put(decoded + (b * count + k + 2) * 16, pairs.second);
            }
        for (int64_t m = 0, pass; m < rows; m += pass) {
            pass = rows_at_once(rows, m);
            sum_tiles(pass, x + m * ldx + first, ldx, decoded, count, panels, part);
            for (int64_t i = 0; i < pass; i++)
                for (int64_t b = 0; b < panels; b++) {
                    f32x16& sum = sums[(m + i) * panels + b];
                    sum = add_scaled(sum, part[i * panels + b], w.scales[b * blocks + j]);
                }
        }
    }
}
#else
constexpr bool HAS_CODES = false;
#endif

// As product() of matmul.h.
template <class T, class Finish>
static inline void code_product(int64_t M, const T* x, int64_t ldx, const Codes& w, int64_t p0, int64_t p1, Finish finish) {
#if defined(__AVX512VBMI__)
    f32x16 sums[CHUNK * PANELS];
    for (int64_t p = p0, panels; p < p1; p += panels) {
        panels = p1 - p < PANELS ? 1 : PANELS;
        for (int64_t m = 0, rows; m < M; m += rows) {
            const int64_t left = M - m;
            rows = left <= FEW ? left : left < SHARED ? ROWS : left < CHUNK ? left : CHUNK;
            (rows <= FEW ? few_rows<T> : many_rows<T>)(rows, x + m * ldx, ldx, w.panel(p), panels, sums);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t b = 0; b < panels; b++) finish(m + i, (p + b) * 16, sums[i * panels + b]);
        }
    }
#endif
}

}  // namespace proa
