// One linear map of any packed form, applied by a running OpenMP team. The forms share one calling pattern, so a caller
// (matmul, attention input, gated MLP) does not know which it has.
#pragma once
#include "fp8.h"
#include "matmul.h"
#include "quant.h"

namespace proa {

enum Form : int64_t { F32, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, F8 };

// f(FormQ8_0{}) and so on: turns the form of a quantised weight into a type. Plans use these forms where the processor has
// the dot product; elsewhere they are not compiled, which takes most of the compiler's time.
template <class F> static inline void with_form(int64_t form, F f) {
#if defined(__AVX512VNNI__)
    switch (form) {
        case Q8_0: return f(FormQ8_0{});
        case Q4_0: return f(FormQ4_0{});
        case Q4_1: return f(FormQ4_1{});
        case Q4_K: return f(FormQ4_K{});
        case Q6_K: return f(FormQ6_K{});
    }
#else
    (void)form, (void)f;
#endif
}

struct Linear {  // filled by Python (native/ops.py: CLinear); rows of W are padded to whole panels of 16
    const void* packed;
    const float* bias;  // [rows padded to 16], or null
    int64_t form, out, in;
    const float* scales;  // of form F8: [panels][blocks of `block` k]
    int64_t block;
    int64_t panels() const { return (out + 15) / 16; }
    Codes codes() const { return {(const uint8_t*)packed, scales, in, block}; }
};

static inline bool is_quantised(int64_t form) { return form >= Q8_0 && form < F8; }

// Bytes that one row takes in panels of a quantised `form`, 0 where this processor has no products of it.
static inline int64_t quant_row_bytes(int64_t form, int64_t in) {
    int64_t bytes = 0;
    with_form(form, [&](auto f) { bytes = in / BLOCK * decltype(f)::SIZE / 16; });
    return bytes;
}

// Quantised activations, [rows]: values, scales and sums one after the other, in a scratch of scratch_bytes().
static inline int64_t scratch_bytes(int64_t rows, int64_t in) { return rows * (in + in / BLOCK * 12 + 64); }
struct QuantisedRows {
    Quantised first;
    int64_t in;
    QuantisedRows(void* scratch, int64_t rows, int64_t in) : in(in) {
        first.values = (int8_t*)scratch;
        first.scales = (float*)(first.values + (rows * in + 63) / 64 * 64);
        first.sums = (int32_t*)(first.scales + rows * (in / BLOCK));
    }
    Quantised operator[](int64_t m) const {
        return {first.values + m * in, first.scales + m * (in / BLOCK), first.sums + m * (in / BLOCK) * 2};
    }
};

// Rows [from, from + rows) times the panels of `share`; `finish` counts rows from 0.
// One panel at a time: each thread reads the weights in one long stream, which the processor's prefetchers follow.
template <class F, class Finish>
static inline void quant_product(const Linear& w, const QuantisedRows& x, int64_t from, int64_t rows, Range share, Finish finish) {
    const int64_t blocks = w.in / BLOCK, stride = blocks * F::SIZE;
    for (int64_t p = share.begin; p < share.end; p++) {
        const uint8_t* panel = (const uint8_t*)w.packed + p * stride;
        for (int64_t m = 0, pass; m < rows; m += pass) {
            pass = rows_at_once(rows, m);
            with_rows<FEW>(int(pass), [&](auto count) {
                constexpr int R = decltype(count)::value;
                Quantised q[R];
                for (int i = 0; i < R; i++) q[i] = x[from + m + i];
                f32x16 acc[R] = {};
                quant_tile<F, R>(q, panel, blocks, acc);
                for (int i = 0; i < R; i++) finish(m + i, p * 16, acc[i]);
            });
        }
    }
}

// Rows [0, rows) times panels [p0, p1) of a form that takes activations as they are.
template <class T, class Finish>
static inline void multiply(const Linear& w, int64_t rows, const T* x, int64_t ldx, int64_t p0, int64_t p1, Finish finish) {
    if (w.form == F8) code_product(rows, x, ldx, w.codes(), p0, p1, finish);
    else product<T>(rows, x, ldx, (const T*)w.packed, w.in, p0, p1, finish);
}

// What a map does with x [rows, in], rows `ldx` apart, before its panels can be applied: quantised ones round it.
template <class T> static inline void prepare(const Linear& w, const T* x, int64_t ldx, int64_t rows, void* scratch) {
    if (!is_quantised(w.form)) return;
    const QuantisedRows quantised(scratch, rows, w.in);
    const Range mine = my_share(rows);
    for (int64_t m = mine.begin; m < mine.end; m++) quantise_row(x + m * ldx, w.in, quantised[m]);
    wait_for_all();
}

// The outputs of panels `share` of y = x W^T + b, by the calling thread alone: `finish(row, first column, 16 sums)`.
template <class T, class Finish>
static inline void apply_panels(const Linear& w, const T* x, int64_t ldx, int64_t rows, void* scratch, Range share, Finish finish) {
    auto with_bias = [&](int64_t m, int64_t n, f32x16 v) { finish(m, n, w.bias ? v + load<f32x16>(w.bias + n) : v); };
    if (!is_quantised(w.form)) return multiply(w, rows, x, ldx, share.begin, share.end, with_bias);
    const QuantisedRows quantised(scratch, rows, w.in);
    with_form(w.form, [&](auto form) { quant_product<decltype(form)>(w, quantised, 0, rows, share, with_bias); });
}

// y = x W^T + b. Every thread of the team calls it; `finish` may run on any.
template <class T, class Finish>
static inline void apply(const Linear& w, const T* x, int64_t ldx, int64_t rows, void* scratch, Finish finish) {
    prepare(w, x, ldx, rows, scratch);
    apply_panels(w, x, ldx, rows, scratch, my_share(w.panels()), finish);
}

// Row `n` of W as float32.
template <class T> static inline void unpack_row(const Linear& w, int64_t n, float* y) {
    if (w.form == F8) return unpack_code_row(w.codes(), n, y);
    if (is_quantised(w.form))
        return with_form(w.form, [&](auto form) { unpack_quant_row<decltype(form)>((const uint8_t*)w.packed, n, w.in, y); });
    constexpr int U = Unit<T>::U;
    const T* panel = (const T*)w.packed + n / 16 * 16 * w.in + n % 16 * U;
    for (int64_t k = 0; k < w.in; k++) y[k] = to_float(panel[k / U * U * 16 + k % U]);
}

// Sixteen results of one row to y [.., out]; the last panel may be partly outside.
template <class Y> static inline void put(Y* row, int64_t n, int64_t out, f32x16 v) {
    if (n + 16 <= out) return store16(row + n, v);
    Y last[16];
    store16(last, v);
    std::memcpy(row + n, last, (out - n) * sizeof(Y));
}

}  // namespace proa
