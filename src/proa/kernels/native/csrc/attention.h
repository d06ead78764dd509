// Paged grouped-query attention: decode, verify and prefill by one routine, flash style.
//
// Cache pages hold keys and values as packed matrices (matmul.h), 16 positions a group:
//   keys    [page][kv head][page_size/16][D/U][16 positions][U]
//   values  [page][kv head][page_size/16][D/16][16/U][16 columns][U]
// so scores and the weighted sum are the same register tile as a linear layer.
//
// One online-softmax order per row: key tiles of 64 positions at absolute multiples of 64. What else is in the batch, how
// the prompt was cut, and the page size do not enter. A tile that a row may not see leaves the row's bits as they are.
#pragma once
#include "matmul.h"
#include <cmath>

namespace proa {

constexpr int GROUP = 16, TILE = 64, MAX_HEAD = 256;

struct Cache {
    void *keys, *values;
    int64_t page_size, kv_heads, head_dim;
    int64_t group(const int32_t* table, int64_t head, int64_t position) const {  // in elements
        int64_t page = table[position / page_size], in_page = position % page_size / GROUP;
        return (((page * kv_heads + head) * (page_size / GROUP)) + in_page) * GROUP * head_dim;
    }
};

struct Rows {  // the rows of one request in this forward
    int64_t first, count, start;  // batch rows [first, first + count) stand at positions start, start + 1, ...
    const int32_t* table;
};

// The `D` elements of one position's key, or value.
template <class T> static inline void write_key(T* group, int64_t position, int64_t D, const T* x) {
    constexpr int U = Unit<T>::U;
    for (int64_t d = 0; d < D; d += U) std::memcpy(group + d * 16 + position % GROUP * U, x + d, U * sizeof(T));
}
template <class T> static inline void write_value(T* group, int64_t position, int64_t D, const T* x) {
    constexpr int U = Unit<T>::U;
    T* to = group + position % GROUP / U * 16 * U + position % U;
    for (int64_t d = 0; d < D; d += 16) for (int64_t i = 0; i < 16; i++) to[d * 16 + i * U] = x[d + i];
}

// The first `count` positions of a value group, zeros behind them: rows that nobody has written yet may hold anything,
// and 0 * NaN would reach the sum.
template <class T> static inline void copy_written(const T* group, int64_t count, int64_t D, T* to) {
    constexpr int U = Unit<T>::U;
    for (int64_t panel = 0; panel < D * GROUP; panel += 16 * GROUP) {
        for (int64_t position = 0; position < GROUP; position += U) {
            u32x16 v = load<u32x16>(group + panel + position * 16);
            if (position >= count) v = u32x16{};
            else if (position + U > count) v &= 0xffffu;  // bfloat16 pair: the first half is the earlier position
            store(to + panel + position * 16, v);
        }
    }
}

// sums[m][d .. d + 16 NB) += weights[m] . values over the groups of one tile.
template <class T, int M, int NB>
static inline void weigh(const T* weights, const T* const (&values)[4], int groups, int64_t d, float (&sums)[M][MAX_HEAD]) {
    f32x16 acc[M][NB];
    for (int m = 0; m < M; m++) for (int b = 0; b < NB; b++) acc[m][b] = load<f32x16>(sums[m] + d + 16 * b);
    for (int g = 0; g < groups; g++) {
        const T* panel[NB];
        for (int b = 0; b < NB; b++) panel[b] = values[g] + (d + 16 * b) * GROUP;
        tile<T, M, NB>(weights + 16 * g, TILE, panel, GROUP, acc);
    }
    for (int m = 0; m < M; m++) for (int b = 0; b < NB; b++) store(sums[m] + d + 16 * b, acc[m][b]);
}

// Scores of one row with a tile of positions -> its softmax weights; positions outside [first, last] of the tile weigh
// nothing. The running maximum and total advance; returns the factor for what was summed before.
template <class T, int GROUPS>
static inline float soften(f32x16 (&scores)[GROUPS], float scale, int64_t first, int64_t last, float& best, float& total, T* weights) {
    const f32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 lower = splat(float(first)), upper = splat(float(last));
    f32x16 top = splat(-INFINITY);
    for (int g = 0; g < GROUPS; g++) {
        f32x16 where = lane + float(16 * g);
        f32x16 s = scores[g] * scale;
        s = where <= upper ? s : splat(-INFINITY);
        s = where >= lower ? s : splat(-INFINITY);
        scores[g] = s;
        top = max(top, s);
    }
    const float peak = max(top);
    if (peak == -INFINITY) {
        for (int g = 0; g < GROUPS; g++) store16(weights + 16 * g, f32x16{});
        return 1.f;
    }
    const float next = peak > best ? peak : best;
    const float shrink = best == -INFINITY ? 0.f : std::exp(best - next);
    f32x16 mass{};
    for (int g = 0; g < GROUPS; g++) {
        f32x16 w = scores[g] == -INFINITY ? f32x16{} : exp(scores[g] - next);
        mass += w;
        store16(weights + 16 * g, w);
    }
    total = total * shrink + sum(mass);
    best = next;
    return shrink;
}

// M query rows of one kv head. `q` is [M][D]; row m stands at position at[m] and sees [at[m] - window + 1, at[m]].
template <class T, int M>
static inline void attend(const T* q, const int64_t (&at)[M], const Cache& cache, const int32_t* table, int64_t head,
                          float scale, int64_t window, T* const (&out)[M]) {
    const int64_t D = cache.head_dim;
    float best[M], total[M];
    alignas(64) float sums[M][MAX_HEAD];
    int64_t last = 0, from = INT64_MAX;
    for (int m = 0; m < M; m++) {
        best[m] = -INFINITY; total[m] = 0;
        for (int64_t d = 0; d < D; d += 16) store(sums[m] + d, f32x16{});
        int64_t low = window > 0 && at[m] >= window ? at[m] - window + 1 : 0;
        last = at[m] > last ? at[m] : last;
        from = low < from ? low : from;
    }
    for (int64_t tile0 = from / TILE * TILE; tile0 <= last; tile0 += TILE) {
        const int groups = int((last - tile0) / GROUP + 1 < 4 ? (last - tile0) / GROUP + 1 : 4);
        const T *keys[4], *values[4];
        for (int g = 0; g < 4; g++) {  // groups beyond the last position repeat a valid one and are masked
            int64_t at_group = cache.group(table, head, tile0 + (g < groups ? g : 0) * GROUP);
            keys[g] = (const T*)cache.keys + at_group;
            values[g] = (const T*)cache.values + at_group;
        }
        f32x16 scores[M][4] = {};
        tile<T, M, 4>(q, D, {keys[0], keys[1], keys[2], keys[3]}, D, scores);
        alignas(64) T weights[M][TILE];
        for (int m = 0; m < M; m++) {
            const int64_t low = window > 0 && at[m] >= window ? at[m] - window + 1 : 0;
            const float shrink = soften(scores[m], scale, low - tile0, at[m] - tile0, best[m], total[m], weights[m]);
            if (shrink != 1.f) for (int64_t d = 0; d < D; d += 16) store(sums[m] + d, load<f32x16>(sums[m] + d) * shrink);
        }
        alignas(64) T written[MAX_HEAD * GROUP];
        if (tile0 + groups * GROUP > last + 1) {
            copy_written(values[groups - 1], last + 1 - tile0 - (groups - 1) * GROUP, D, written);
            values[groups - 1] = written;
        }
        int64_t d = 0;
        for (; d + 64 <= D; d += 64) weigh<T, M, 4>(weights[0], values, groups, d, sums);
        for (; d < D; d += 16) weigh<T, M, 1>(weights[0], values, groups, d, sums);
    }
    for (int m = 0; m < M; m++) for (int64_t d = 0; d < D; d += 16) store16(out[m] + d, load<f32x16>(sums[m] + d) / total[m]);
}

}  // namespace proa
