// Sampling: the token of each row, or UNDECIDED where rounding could change it; kernels/reference/sample.py then decides.
//
// Filters keep a head of one total order (value descending, then id ascending), so nothing is sorted: the best of all ids
// is drawn, and if the filters do not keep it, the best of those before it, and so on. A draw lands uniformly in the mass
// that is left, so keeping a mass p takes about 1 + ln(1 / p) draws.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "op.h"

namespace proa {

constexpr int64_t UNDECIDED = -1;
constexpr float MASKED = -INFINITY;
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;  // SplitMix64
constexpr double LOG2E = 1.4426950408889634;
constexpr double MOST_NOISE = 65.01;  // base 2, of the smallest uniform number, 2^-65
constexpr double TIE = 1e-9;          // scores: far more than two libraries' logarithms differ by
constexpr double BAND = 1e-4;         // masses, relative: far more than the error of sums of float32 exponentials
constexpr float SLACK = 1e-3f;        // bounds, base 2: far more than the error of `Row::power`

struct Draw {  // native/sample.py: DRAW
    int64_t row;
    uint64_t key;
    int64_t top_k;  // 0: no limit
    double temperature, top_p, floor;
};

using u64x8 = uint64_t __attribute__((vector_size(64)));

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

// Those lanes that are at least `bound`.
static inline uint32_t reaching(f32x16 v, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GE_OQ);
#else
    return lanes(v >= bound);
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
        f32x16 top = splat(MASKED);
        i32x16 nan{};
        each(x + part, count, [&](int64_t, f32x16 v) {
            top = max(v, top);
            nan |= v != v;
        });
        if (lanes(nan)) return {MASKED, part + first_id(x + part, count, [](float v) { return v != v; }), true};
        const float value = max(top);
        if (value > best.value) best = {value, part, false};
    }
    best.id += first_id(x + best.id, std::min(PART, size - best.id), [&](float v) { return v == best.value; });
    return best;
}

// A row as it is drawn from: values relative to the largest one, divided by the temperature, in the definition's float32.
// `power` is about as much base 2, times 2^23, for bounds: a product where the definition divides, off by less than SLACK
// where it matters, above -150.
struct Row {
    const float* x;
    int64_t size, best;  // best: the id of the largest
    float largest, temperature, factor = float(LOG2E / temperature * 0x1p23);

    template <class V> V scaled(V v) const { return (v - largest) / temperature; }
    f32x16 power(f32x16 v) const { return (v - largest) * factor; }
    float at(int64_t id) const { return scaled(x[id]); }
};

// A place in the total order. Nothing at or after `power` comes before it.
struct Place {
    float value;
    int64_t id;
    bool is_after(float v, int64_t i) const { return v > value || (v == value && i < id); }
    float power() const { return (float(value * LOG2E) - SLACK * (1 - value)) * 0x1p23f; }
};

static inline u64x8 mixed(u64x8 w) {
    w = (w ^ (w >> 30)) * MIX_1;
    return (w ^ (w >> 27)) * MIX_2;  // the last step of the mix leaves the upper 31 bits alone
}

// 2^23 (32 + 127 + the logarithms, base 2, of the uniform numbers of ids [first, first + 16)), or up to 0.09 * 2^23 less:
// the bits of a float, here of a number's upper 32 bits, are a logarithm with a straight line for its fraction.
static inline f32x16 low_logs(uint64_t key, int64_t first) {
    constexpr u64x8 steps = {GAMMA, 3 * GAMMA, 5 * GAMMA, 7 * GAMMA, 9 * GAMMA, 11 * GAMMA, 13 * GAMMA, 15 * GAMMA};
    const u64x8 even = steps + (key + uint64_t(first) * GAMMA), odd = even + GAMMA;
    const u64x8 upper = mixed(even) >> 32 | (mixed(odd) & ~uint64_t(0xFFFFFFFF));
    return __builtin_convertvector((i32x16)__builtin_convertvector((u32x16)upper, f32x16), f32x16);
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
// -log(uniform): what cannot reach the largest sum so far with that much is passed over.
static Winner winner(const Row& row, uint64_t key, Place end) {
    int64_t id = -1;
    double best = -INFINITY, next = -INFINITY;
    float lowest = 0, bound = 0;  // in powers: what a value must reach, and its sum with the noise
    const auto consider = [&](int64_t i) {
        const float value = row.at(i);
        if (i == id || !(value > MASKED) || !end.is_after(value, i)) return;
        const double sum = value + gumbel(key, i);
        if (sum <= best) { next = std::max(next, sum); return; }
        next = best, best = sum, id = i;
        bound = (float(best * LOG2E) - SLACK - (32 + 127)) * 0x1p23f;
        lowest = std::max(end.power(), (float(best * LOG2E - MOST_NOISE) - SLACK) * 0x1p23f);
    };
    consider(row.best);
    each(row.x, row.size, [&](int64_t first, f32x16 x) {
        const f32x16 power = row.power(x);
        if (!reaching(power, lowest)) return;
        uint32_t left = reaching(power - low_logs(key, first), bound);
        for (; left; left &= left - 1) consider(first + __builtin_ctz(left));
    });
    return {id, row.at(id), best - next > TIE};
}

struct Head { int64_t count; double mass; };

// How many ids come before `place`, and the sum of their exponentials.
static Head head(const Row& row, Place place) {
    const i32x16 steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float lowest = place.power();
    Head found{0, 0};
    each(row.x, row.size, [&](int64_t first, f32x16 x) {
        if (!reaching(row.power(x), lowest)) return;
        const f32x16 values = row.scaled(x);
        const i32x16 tied = (values == place.value) & (steps + int32_t(first) < int32_t(place.id));
        const i32x16 before = (values > place.value) | tied;
        if (!lanes(before)) return;
        found.count += __builtin_popcount(lanes(before));
        found.mass += sum(before ? exp(values) : f32x16{});
    });
    return found;
}

// The k-th largest value of a row of more than k: at least k of the maxima of disjoint groups reach the k-th of those, so
// it is among the few values that do.
static float kth_largest(const float* x, int64_t size, int64_t k) {
    const int64_t part = std::max<int64_t>(1, size / std::max<int64_t>(4 * k, 512)) * 16;  // ids of a group per lane
    std::vector<float> found;
    for (int64_t i = 0; i < size; i += part) {
        f32x16 top = splat(MASKED);
        each(x + i, std::min(part, size - i), [&](int64_t, f32x16 v) { top = max(v, top); });
        for (int lane = 0; lane < 16; lane++) found.push_back(top[lane]);
    }
    const auto nth = [&] {
        std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>());
        return found[k - 1];
    };
    const float bound = k <= int64_t(found.size()) ? nth() : MASKED;
    found.clear();
    each(x, size, [&](int64_t, f32x16 v) {
        for (uint32_t left = reaching(v, bound); left; left &= left - 1) found.push_back(v[__builtin_ctz(left)]);
    });
    return nth();
}

static double mass_of_all(const Row& row) {
    constexpr int64_t PART = 1024;  // summed in float32
    double mass = 0;
    for (int64_t part = 0; part < row.size; part += PART) {
        f32x16 sums{};
        each(row.x + part, std::min(PART, row.size - part), [&](int64_t, f32x16 x) {
            sums += exp(row.power(x) * float(0x1p-23 / LOG2E));
        });
        mass += sum(sums);
    }
    return mass;
}

static double mass_of_first(const Row& row, int64_t k) {
    const float last = row.scaled(kth_largest(row.x, row.size, k));
    const Head above = head(row, {last, 0});
    return above.mass + double(k - above.count) * std::exp(double(last));
}

static int64_t draw(const float* x, int64_t size, const Draw& d) {
    const Largest top = largest(x, size);
    if (d.temperature == 0) return top.id;
    const float temperature = float(d.temperature);
    if (top.has_nan || std::isinf(top.value) || !(temperature > 1e-30f && temperature < 1e30f)) return UNDECIDED;
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
        if (!wanted) wanted = d.top_p * (top_k ? mass_of_first(row, top_k) : mass_of_all(row));
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
