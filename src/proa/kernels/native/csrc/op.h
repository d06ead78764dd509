// What crosses the C interface: one op, and what changes from one forward to the next.
#pragma once
#include "attention.h"

namespace proa {

enum Kind : int64_t {  // native/abi.py: Kind
    LOOKUP, TABLE, ADD_NORM, MATMUL, LOGITS, FFN, ROTATION, WRITE, ATTENTION, SELECT, ROUTE, EXPERTS, LATENT_WRITE,
    LATENT_ATTENTION, NORM, DELTA, GATE, SCALE, INDEX, SAMPLE,
};

struct Op {  // native/abi.py: COp. Which fields an op uses stands at its function.
    int64_t kind, selected;  // selected: over the rows that want logits instead of all rows
    int64_t n, m;
    double f;
    const void *a, *b, *c, *d, *e;
    void *out, *tmp, *scratch;
};

struct StateRows;  // delta.h

struct Batch {  // native/abi.py: CBatch
    int64_t rows, num_logits, num_requests, num_states;
    const int64_t *token_ids, *positions, *slots, *logits_rows;
    const Rows* requests;
    const StateRows* states;
    float* logits;
};

// 1 / RMS of `n` elements.
template <class X> static inline float inverse_rms(const X* x, int64_t n, float eps) {
    f32x16 squares{};
    for (int64_t d = 0; d < n; d += 16) { f32x16 v = load16(x + d); squares += v * v; }
    return 1.f / std::sqrt(sum(squares) / float(n) + eps);
}

// RMS norm of one row.
template <class X, class T> static inline void norm_row(const X* x, const float* weight, float eps, int64_t D, T* y) {
    const float inverse = inverse_rms(x, D, eps);
    for (int64_t d = 0; d < D; d += 16) store16(y + d, load16(x + d) * inverse * load<f32x16>(weight + d));
}

// Rotates `size` elements from `x` to `y`: pairs lie in two halves, or are neighbours and come to lie in two halves.
template <class X, class Y>
static inline void rotate(const X* x, int64_t size, bool is_interleaved, const float* cos, const float* sin, Y* y) {
    const int64_t half = size / 2;
    const auto turn = [&](int64_t d, float a, float b) {
        y[d] = from_float<Y>(a * cos[d] + b * sin[d]);
        y[d + half] = from_float<Y>(b * cos[d + half] + a * sin[d + half]);
    };
    if (is_interleaved) for (int64_t d = 0; d < half; d++) turn(d, to_float(x[2 * d]), to_float(x[2 * d + 1]));
    else for (int64_t d = 0; d < half; d++) turn(d, to_float(x[d]), to_float(x[d + half]));
}

// f(std::integral_constant<int, M>, request, kv head, first query): the calling thread's part of attention, in tasks of M
// query heads of one kv head of one request, `width` where there are so many. The split does not change a row's bits.
template <class F>
static inline void share_queries(const Batch& batch, int64_t heads, int64_t kv_heads, int64_t width, F f) {
    const int64_t share = heads / kv_heads, team = omp_get_num_threads();
    int64_t task = 0;
    for (int64_t r = 0; r < batch.num_requests; r++) {
        const Rows& rows = batch.requests[r];
        const int64_t queries = rows.count * share, tiles = (queries + width - 1) / width;
        for (int64_t t = tiles * kv_heads - 1; t >= 0; t--, task++) {  // longest first
            if (task % team != omp_get_thread_num()) continue;
            const int64_t kv = t % kv_heads, first = t / kv_heads * width;
            with_rows<ROWS>(int(queries - first < width ? queries - first : width), [&](auto n) { f(n, rows, kv, first); });
        }
    }
}

}  // namespace proa
