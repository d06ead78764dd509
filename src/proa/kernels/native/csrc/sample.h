// Sampling: the token of each row, or UNDECIDED where rounding could change it; kernels/reference/sample.py then decides.
//
// Filters keep a head of one total order (value descending, then id ascending), so nothing is sorted: the best of all ids
// is drawn, and if the filters do not keep it, the best of those before it, and so on. A draw lands uniformly in the mass
// that is left, so keeping a mass p takes about 1 + ln(1 / p) draws.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "op.h"

namespace proa {

constexpr int64_t UNDECIDED = -1;
constexpr float MASKED = -INFINITY;
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;  // SplitMix64
constexpr double MOST_NOISE = 45.1;  // of the smallest uniform number, 2^-65
constexpr double TIE = 1e-9;         // scores: far more than two libraries' logarithms differ by
constexpr double BAND = 1e-4;        // masses, relative: far more than the error of sums of float32 exponentials
constexpr double SLACK = 1e-3;       // bounds on scores: far more than the error of a float32 exponential

struct Draw {  // native/sample.py: DRAW
    int64_t row;
    uint64_t key;
    int64_t top_k;  // 0: no limit
    double temperature, top_p, floor;
};

using u32x8 = uint32_t __attribute__((vector_size(32)));
using u64x8 = uint64_t __attribute__((vector_size(64)));
using f64x8 = double __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));

// One bit per lane of a comparison.
static inline uint32_t lanes(i32x16 mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
    __m256 half[2]; std::memcpy(half, &mask, 64);
    return uint32_t(_mm256_movemask_ps(half[0]) | _mm256_movemask_ps(half[1]) << 8);
#else
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= uint32_t(mask[i] < 0) << i;
    return bits;
#endif
}

// f(first id, sixteen values) over a row; -inf fills the last vector.
template <class F> static inline void each(const float* x, int64_t size, F f) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) f(i, load<f32x16>(x + i));
    if (i == size) return;
    f32x16 last = splat(MASKED);
    std::memcpy(&last, x + i, (size - i) * sizeof(float));
    f(i, last);
}

// The first id for which `is` holds; there is one.
template <class Is> static inline int64_t first_id(const float* x, int64_t size, Is is) {
    int64_t i = 0;
    while (i < size && !is(x[i])) i++;
    return i;
}

struct Largest { float value; int64_t id; bool has_nan; };

// The largest value and the lowest id that has it; with a NaN in the row the id of the first one.
static Largest largest(const float* x, int64_t size) {
    constexpr int64_t PART = 1024;  // searched again for the id
    Largest best{MASKED, 0, false};
    for (int64_t part = 0; part < size; part += PART) {
        const int64_t count = std::min(PART, size - part);
        f32x16 top[2] = {splat(MASKED), splat(MASKED)};
        i32x16 nan{};
        each(x + part, count, [&](int64_t i, f32x16 v) {
            f32x16& t = top[i / 16 % 2];
            t = max(v, t);
            nan |= v != v;
        });
        if (lanes(nan)) return {MASKED, part + first_id(x + part, count, [](float v) { return v != v; }), true};
        const float value = max(max(top[0], top[1]));
        if (value > best.value) best = {value, part, false};
    }
    best.id += first_id(x + best.id, std::min(PART, size - best.id), [&](float v) { return v == best.value; });
    return best;
}

// A row as it is drawn from: values relative to the largest one, divided by the temperature, in the definition's float32.
struct Row {
    const float* x;
    int64_t size, best;  // best: the id of the largest
    float largest, temperature;

    template <class V> V scaled(V v) const { return (v - largest) / temperature; }
    float at(int64_t id) const { return scaled(x[id]); }
};

// A place in the total order.
struct Place {
    float value;
    int64_t id;
    bool is_after(float v, int64_t i) const { return v > value || (v == value && i < id); }
};

static inline u64x8 mixed(u64x8 w) {
    w = (w ^ (w >> 30)) * MIX_1;
    return (w ^ (w >> 27)) * MIX_2;  // the last step of the mix leaves the upper 31 bits alone
}

// 2^24 times at most the uniform numbers of ids [first, first + 16).
static inline f32x16 uniform_floors(uint64_t key, int64_t first) {
    constexpr u64x8 steps = {GAMMA, 2 * GAMMA, 3 * GAMMA, 4 * GAMMA, 5 * GAMMA, 6 * GAMMA, 7 * GAMMA, 8 * GAMMA};
    const u64x8 words = steps + (key + uint64_t(first) * GAMMA);
    u32x8 upper[2] = {__builtin_convertvector(mixed(words) >> 40, u32x8),
                      __builtin_convertvector(mixed(words + 8 * GAMMA) >> 40, u32x8)};
    return __builtin_convertvector(load<i32x16>(upper), f32x16);
}

// The noise of one id, up to the last bits of the logarithms; the uniform number is the definition's, bit for bit.
static double gumbel(uint64_t key, int64_t id) {
    uint64_t w = key + uint64_t(id + 1) * GAMMA;
    w = (w ^ (w >> 30)) * MIX_1;
    w = (w ^ (w >> 27)) * MIX_2;
    const int64_t bits = int64_t(w ^ (w >> 31));
    double uniform = double(bits);
    if (bits < 0) uniform += 0x1p64;
    uniform = std::min((uniform + 0.5) * 0x1p-64, 1 - 0x1p-53);
    return -std::log(-std::log1p(-uniform));
}

struct Winner { int64_t id; float value; bool is_sure; };

// The id with the largest value plus noise among those before `end`, which the best id must be. Noise is at most
// -log(uniform), so a score of s takes exp(value) >= exp(s) * uniform: what fails that for the best s so far is passed over.
static Winner winner(const Row& row, uint64_t key, Place end) {
    int64_t id = -1;
    double best = -INFINITY, next = -INFINITY;
    float lowest = end.value, threshold = 0;
    const auto consider = [&](int64_t i) {
        const float value = row.at(i);
        if (i == id || !(value > MASKED) || !end.is_after(value, i)) return;
        const double score = value + gumbel(key, i);
        if (score <= best) { next = std::max(next, score); return; }
        next = best, best = score, id = i;
        lowest = std::max(end.value, float(best - MOST_NOISE - SLACK));
        threshold = float(std::exp(best) * (1 - SLACK) * 0x1p-24);
    };
    consider(row.best);
    each(row.x, row.size, [&](int64_t first, f32x16 x) {
        const f32x16 values = row.scaled(x);
        const i32x16 near = values >= lowest;
        if (!lanes(near)) return;
        uint32_t left = lanes(near & (exp(values) >= uniform_floors(key, first) * threshold));
        for (; left; left &= left - 1) consider(first + __builtin_ctz(left));
    });
    return {id, row.at(id), best - next > TIE};
}

struct Head { int64_t count; double mass; };

// How many ids come before `place`, and the sum of their exponentials.
static Head head(const Row& row, Place place) {
    const i32x16 steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t count = 0;
    f64x8 mass{};
    each(row.x, row.size, [&](int64_t first, f32x16 x) {
        const f32x16 values = row.scaled(x);
        if (!lanes(values >= place.value)) return;
        const i32x16 before = (values > place.value) | ((values == place.value) & (steps + int32_t(first) < int32_t(place.id)));
        count += __builtin_popcount(lanes(before));
        const f32x16 kept = before ? exp(values) : f32x16{};
        f32x8 half[2]; std::memcpy(half, &kept, 64);
        mass += __builtin_convertvector(half[0], f64x8) + __builtin_convertvector(half[1], f64x8);
    });
    double total = 0;
    for (int i = 0; i < 8; i++) total += mass[i];
    return {count, total};
}

// The k-th largest value of a row of more than k: at least k of the maxima of disjoint groups reach the k-th of those, so
// it is among the few values that do.
static float kth_largest(const float* x, int64_t size, int64_t k) {
    constexpr int64_t VECTORS = 32;  // of one group per lane
    std::vector<float> found;
    f32x16 top = splat(MASKED);
    each(x, size, [&](int64_t i, f32x16 v) {
        top = max(v, top);
        if (i / 16 % VECTORS == VECTORS - 1 || i + 16 >= size) {
            for (int lane = 0; lane < 16; lane++) found.push_back(top[lane]);
            top = splat(MASKED);
        }
    });
    const auto nth = [&] { std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>()); return found[k - 1]; };
    const float bound = k <= int64_t(found.size()) ? nth() : MASKED;
    found.clear();
    each(x, size, [&](int64_t, f32x16 v) {
        for (uint32_t left = lanes(v >= bound); left; left &= left - 1) found.push_back(v[__builtin_ctz(left)]);
    });
    return nth();
}

// The mass that top-p takes its part of: of all ids, or of the k first.
static double whole_mass(const Row& row, int64_t top_k) {
    if (!top_k) return head(row, {MASKED, 0}).mass;
    const float last = row.scaled(kth_largest(row.x, row.size, top_k));
    const Head above = head(row, {last, 0});
    return above.mass + double(top_k - above.count) * std::exp(double(last));
}

static int64_t draw(const float* x, int64_t size, const Draw& d) {
    const Largest top = largest(x, size);
    if (d.temperature == 0) return top.id;
    const float temperature = std::max(float(d.temperature), FLT_MIN);
    if (top.has_nan || std::isinf(top.value) || std::isinf(temperature)) return UNDECIDED;
    const Row row{x, size, top.id, top.value, temperature};
    const int64_t top_k = d.top_k < size ? d.top_k : 0;
    double wanted = 0;
    for (Place end{MASKED, 0};;) {
        const Winner won = winner(row, d.key, end);
        if (!won.is_sure) return UNDECIDED;
        if (won.id == row.best || (!top_k && d.top_p >= 1 && d.floor == MASKED)) return won.id;
        end = {won.value, won.id};
        if (won.value < d.floor) continue;
        if (!top_k && d.top_p >= 1) return won.id;
        const Head before = head(row, end);
        if (top_k && before.count >= top_k) continue;
        if (d.top_p >= 1) return won.id;
        if (!wanted) wanted = d.top_p * whole_mass(row, top_k);
        if (std::abs(before.mass - wanted) <= BAND * (before.mass + wanted)) return UNDECIDED;
        if (before.mass < wanted) return won.id;
    }
}

// a logits [.., n], rows m apart, b Draw [rows] -> out tokens int64 [rows]
static void sample(const Op& op, int64_t rows) {
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < rows; r++) {
        const Draw& d = ((const Draw*)op.b)[r];
        ((int64_t*)op.out)[r] = draw((const float*)op.a + d.row * op.m, op.n, d);
    }
}

}  // namespace proa
