// The indexer of sparse attention (DSA): index keys to their cache, and for each row its best earlier rows.
//
// A score depends on its query and its cached key alone, and its heads are added in order; the best rows are those of a
// total order (score, then position). So the selection does not depend on the batch. Attention over it: latent.h.
#pragma once
#include "latent.h"
#include <algorithm>

namespace proa {

struct Index {  // native/latent.py: CIndex
    void* rows;                // [cache rows][size]
    const float *norm, *bias;  // [size]
    const void* weights;       // [rows][heads], `next` apart
    int64_t next, page_size, heads, size, rope, is_interleaved, top_k, buffers, capacity;
    float eps;
    int64_t padded() const { return (size + 31) / 32 * 32; }
};

// Layer norm and rotation of one key, into its cache row.
template <class T> static inline void index_key(const Index& w, const T* x, const float* cos, const float* sin, T* y) {
    float mean = 0, square = 0, v[MAX_HEAD];
    for (int64_t d = 0; d < w.size; d++) mean += to_float(x[d]);
    mean /= float(w.size);
    for (int64_t d = 0; d < w.size; d++) v[d] = to_float(x[d]) - mean, square += v[d] * v[d];
    const float inverse = 1.f / std::sqrt(square / float(w.size) + w.eps);
    for (int64_t d = 0; d < w.size; d++) v[d] = v[d] * inverse * w.norm[d] + w.bias[d];
    rotate(v, w.rope, w.is_interleaved, cos, sin, y);
    for (int64_t d = w.rope; d < w.size; d++) y[d] = from_float<T>(v[d]);
}

// scores[begin .. end) of one row's queries [heads][padded]; begin is a multiple of four.
template <class T>
static void index_scores(const Index& w, const T* q, const T* weights, const int32_t* table, int64_t begin, int64_t end, float* scores) {
    const float root = std::sqrt(float(w.heads * w.size));
    for (int64_t at = begin; at < end; at += 4) {
        const T* row[4];
        for (int64_t p = 0; p < 4; p++) {
            const int64_t position = at + p < end ? at + p : at;
            row[p] = (const T*)w.rows + (table[position / w.page_size] * w.page_size + position % w.page_size) * w.size;
        }
        f32x4 total{};
        for (int64_t h = 0, heads; h < w.heads; h += heads) {
            heads = w.heads - h < 4 ? 1 : 4;
            float products[4][SPAN];
            if (heads == 4) score_rows<T, 4>(q + h * w.padded(), w.padded(), row, w.size, products, 0);
            else score_rows<T, 1>(q + h * w.padded(), w.padded(), row, w.size, (float (&)[1][SPAN])products, 0);
            for (int64_t i = 0; i < heads; i++) {
                const f32x4 p = load<f32x4>(products[i]);
                total += to_float(weights[h + i]) / root * (p > 0 ? p : f32x4{});
            }
        }
        for (int64_t p = 0; p < 4 && at + p < end; p++) scores[at + p] = total[p] == total[p] ? total[p] : -INFINITY;
    }
}

// The `k` best of `count` scores, equal ones by position: list[0] = k, then the positions in ascending order.
static void best_rows(const float* scores, int64_t count, int64_t k, float* copy, int32_t* list) {
    std::memcpy(copy, scores, count * sizeof(float));
    std::nth_element(copy, copy + k - 1, copy + count, [](float a, float b) { return a > b; });
    const float least = copy[k - 1];
    int64_t above = 0, put = 0;
    for (int64_t s = 0; s < count; s++) above += scores[s] > least;
    for (int64_t s = 0; s < count; s++)
        if (scores[s] > least || (scores[s] == least && above < k && ++above)) list[++put] = int32_t(s);
    list[0] = int32_t(k);
}

// a queries [rows, heads * size], rows n apart; b Index; c keys, m apart; d cosines and e sines [rows, rope] -> out lists
// int32 [rows, 1 + top_k]: how many, then positions. tmp turned queries [rows, heads, padded]; scratch [buffers, 2, capacity].
template <class T> static void index_rows(const Op& op, const Batch& batch) {
    const Index& w = *(const Index*)op.b;
    const int64_t parts = w.heads + 1, P = w.padded();
    T* turned = (T*)op.tmp;
    const Range mine = my_share(batch.rows * parts);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const int64_t m = i / parts, head = i % parts;
        const float *cos = (const float*)op.d + m * w.rope, *sin = (const float*)op.e + m * w.rope;
        if (head == w.heads) {
            index_key(w, (const T*)op.c + m * op.m, cos, sin, (T*)w.rows + batch.slots[m] * w.size);
            continue;
        }
        const T* x = (const T*)op.a + m * op.n + head * w.size;
        T* y = turned + (m * w.heads + head) * P;
        rotate(x, w.rope, w.is_interleaved, cos, sin, y);
        std::memcpy(y + w.rope, x + w.rope, (w.size - w.rope) * sizeof(T));
        std::memset(y + w.size, 0, (P - w.size) * sizeof(T));
    }
    wait_for_all();
    const int64_t threads = omp_get_num_threads(), team = threads < w.buffers ? threads : w.buffers, me = omp_get_thread_num();
    const bool together = batch.rows < team;  // too few rows to give each thread some: they share each row's positions
    for (int step = together ? 0 : 1; step < 2; step++) {
        for (int64_t r = 0; r < batch.num_requests; r++)
            for (int64_t i = 0; i < batch.requests[r].count; i++) {
                const Rows& one = batch.requests[r];
                const int64_t m = one.first + i, seen = one.start + i + 1, buffer = together ? m : me;
                int32_t* list = (int32_t*)op.out + m * (w.top_k + 1);
                float* scores = (float*)op.scratch + buffer * 2 * w.capacity;
                auto score = [&](int64_t begin, int64_t end) {
                    index_scores(w, turned + m * w.heads * P, (const T*)w.weights + m * w.next, one.table, begin, end, scores);
                };
                if (step == 0 && seen > w.top_k) {
                    const Range quads = my_share((seen + 3) / 4);
                    score(quads.begin * 4, quads.end * 4 < seen ? quads.end * 4 : seen);
                }
                if (step == 0 || me != m % team) continue;
                if (seen <= w.top_k) {
                    list[0] = int32_t(seen);
                    for (int64_t s = 0; s < seen; s++) list[1 + s] = int32_t(s);
                    continue;
                }
                if (!together) score(0, seen);
                best_rows(scores, seen, w.top_k, scores + w.capacity, list);
            }
        if (step == 0) wait_for_all();
    }
}

}  // namespace proa
