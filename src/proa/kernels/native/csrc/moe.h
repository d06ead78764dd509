// Routing, and the experts of all rows at once.
//
// Rows are grouped by slot, so that each touched expert's weights are read once per forward. Threads split (slot, panel)
// work by its cost, never a sum; each entry's result is rounded as a gated MLP's and the row adds them up in its own order:
// the rows beside it do not enter.
//
// Packed slots, one after the other: `down` as matmul.h or fp8.h says; `gate_up` with a gate panel and the up panel of the same 16
// elements in turn, so that one thread has both.
#pragma once
#include "linear.h"
#include "op.h"

namespace proa {

enum Score : int64_t { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };  // native/moe.py: SCORES

struct Router {  // native/moe.py: CRouter. The rules are those of arch/blocks.py: RouterSpec.
    Linear linear;
    const float* correction;  // [experts padded to 16], or null
    int64_t score, groups, top_groups, best_of_group;  // best_of_group: how many scores a group is worth, 0: no groups
    int64_t renormalise, top_k, num_shared, first_shared;
    float scale, shared_weight;
    const void* shared_gate;  // [hidden], or null: shared slots weigh shared_weight
    const int64_t* table;     // each token's experts [token ids, top_k], or null: by choice
};

struct Experts {  // native/moe.py: CExperts
    Linear gate_up, down;  // of all slots: `out` rows each
    int64_t slots, hidden, width;
    const void* gate;  // [hidden], or null
    float limit;       // simd.h: activate
};

constexpr float NEVER = -INFINITY;
constexpr int MAX_GROUPS = 64;

// sigmoid(x . gate)
template <class T> static inline float gate_of(const T* x, const T* gate, int64_t D) {
    f32x16 total{};
    for (int64_t d = 0; d < D; d += 16) total += load16(x + d) * load16(gate + d);
    return 1.f / (1.f + exp(splat(-sum(total)))[0]);
}

// Index of the largest value, the first of equal ones; `n` is a multiple of 16.
static inline int64_t best_of(const float* values, int64_t n) {
    f32x16 top = load<f32x16>(values);
    for (int64_t e = 16; e < n; e += 16) top = max(top, load<f32x16>(values + e));
    const float peak = max(top);
    for (int64_t e = 0; e < n; e++) if (values[e] == peak) return e;
    return 0;  // not a number
}

// Logits [n padded] -> scores, in place.
static inline void score_row(int64_t kind, float* v, int64_t experts, int64_t padded) {
    if (kind == SQRT_SOFTPLUS) {
        for (int64_t e = 0; e < experts; e++) v[e] = std::sqrt(v[e] > 20.f ? v[e] : std::log1p(std::exp(v[e])));
        return;
    }
    if (kind == SIGMOID) {
        for (int64_t e = 0; e < padded; e += 16) store(v + e, 1.f / (1.f + exp(-load<f32x16>(v + e))));
        return;
    }
    for (int64_t e = experts; e < padded; e++) v[e] = NEVER;
    f32x16 top = load<f32x16>(v), mass{};
    for (int64_t e = 16; e < padded; e += 16) top = max(top, load<f32x16>(v + e));
    const float peak = max(top);
    for (int64_t e = 0; e < padded; e += 16) {
        f32x16 w = load<f32x16>(v + e);
        w = w == NEVER ? f32x16{} : exp(w - peak);
        mass += w;
        store(v + e, w);
    }
    const float total = sum(mass);
    for (int64_t e = 0; e < padded; e += 16) store(v + e, load<f32x16>(v + e) / total);
}

// Only the experts of the best groups keep their choice.
static inline void keep_best_groups(const Router& r, float* choice) {
    const int64_t size = r.linear.out / r.groups;
    float worth[MAX_GROUPS];
    for (int64_t g = 0; g < r.groups; g++) {
        float best = NEVER, second = NEVER;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            const float c = choice[e];
            second = c > best ? best : c > second ? c : second;
            best = c > best ? c : best;
        }
        worth[g] = r.best_of_group == 1 ? best : best + second;
    }
    for (int64_t dropped = 0; dropped < r.groups - r.top_groups; dropped++) {  // the worst, the last of equal ones
        int64_t worst = -1;
        for (int64_t g = 0; g < r.groups; g++)
            if (worth[g] != INFINITY && (worst < 0 || worth[g] <= worth[worst])) worst = g;
        if (worst < 0) return;
        worth[worst] = INFINITY;
        for (int64_t e = worst * size; e < (worst + 1) * size; e++) choice[e] = NEVER;
    }
}

static inline void choose(const Router& r, const float* scores, float* choice, int32_t* slots) {
    const int64_t padded = r.linear.panels() * 16;
    for (int64_t e = 0; e < padded; e += 16)
        store(choice + e, r.correction ? load<f32x16>(scores + e) + load<f32x16>(r.correction + e) : load<f32x16>(scores + e));
    for (int64_t e = r.linear.out; e < padded; e++) choice[e] = NEVER;
    if (r.best_of_group) keep_best_groups(r, choice);
    for (int64_t j = 0; j < r.top_k; j++) {
        const int64_t e = best_of(choice, padded);
        choice[e] = NEVER;
        slots[j] = int32_t(e);
    }
}

static inline void weigh(const Router& r, const float* scores, const int32_t* slots, float* weights) {
    float total = 1e-20f;
    for (int64_t j = 0; j < r.top_k; j++) total += weights[j] = scores[slots[j]];
    for (int64_t j = 0; j < r.top_k; j++) weights[j] = (r.renormalise ? weights[j] / total : weights[j]) * r.scale;
}

// a x [rows, hidden], b Router -> out slots int32 [rows, k], tmp weights [rows, k]; scratch [rows, 2, experts padded]
template <class T> static void route(const Op& op, const Batch& batch) {
    const Router& r = *(const Router*)op.b;
    const int64_t rows = batch.rows, padded = r.linear.panels() * 16, k = r.top_k + r.num_shared, D = r.linear.in;
    const T* x = (const T*)op.a;
    float* scores = (float*)op.scratch;
    const Range panels = my_share(r.linear.panels());
    product<T>(rows, x, D, (const T*)r.linear.packed, D, panels.begin, panels.end,
               [&](int64_t m, int64_t n, f32x16 v) { store(scores + m * 2 * padded + n, v); });
    wait_for_all();
    const Range mine = my_share(rows);
    for (int64_t m = mine.begin; m < mine.end; m++) {
        float *row = scores + m * 2 * padded, *weights = (float*)op.tmp + m * k;
        int32_t* slots = (int32_t*)op.out + m * k;
        score_row(r.score, row, r.linear.out, padded);
        if (r.table) std::copy_n(r.table + batch.token_ids[m] * r.top_k, r.top_k, slots);
        else choose(r, row, row + padded, slots);
        weigh(r, row, slots, weights);
        const float shared = r.shared_gate ? gate_of(x + m * D, (const T*)r.shared_gate, D) : r.shared_weight;
        for (int64_t s = 0; s < r.num_shared; s++) {
            slots[r.top_k + s] = int32_t(r.first_shared + s);
            weights[r.top_k + s] = shared;
        }
    }
}

// Entries (row, j) by slot: `start[s]` is the first of slot s, `place` [entries] where an entry went.
static inline void group(const int32_t* slots, int64_t entries, int64_t count, int32_t* start, int32_t* place) {
    for (int64_t s = 0; s <= count; s++) start[s] = 0;
    for (int64_t i = 0; i < entries; i++) start[slots[i] + 1]++;
    for (int64_t s = 0; s < count; s++) start[s + 1] += start[s];
    for (int64_t i = 0; i < entries; i++) place[i] = start[slots[i]]++;
    for (int64_t s = count; s > 0; s--) start[s] = start[s - 1];
    start[0] = 0;
}

// f(first entry, entries, slot, first unit, end): the calling thread's part of all touched slots' `units` each. A unit costs
// the time to read its weights, which is that of about STREAM rows' products, or that of its products where there are more.
template <class F> static inline void share_slots(const int32_t* start, int64_t slots, int64_t units, F f) {
    constexpr int64_t STREAM = 8;
    auto cost = [&](int64_t s) {
        const int64_t n = start[s + 1] - start[s];
        return n == 0 ? 0 : n < STREAM ? STREAM : n;
    };
    int64_t total = 0, at = 0;
    for (int64_t s = 0; s < slots; s++) total += cost(s) * units;
    const Range mine = my_share(total);
    for (int64_t s = 0; s < slots; s++) {
        const int64_t each = cost(s);
        if (each == 0) continue;
        auto first_from = [&](int64_t edge) {
            const int64_t u = edge <= at ? 0 : (edge - at + each - 1) / each;
            return u < units ? u : units;
        };
        const int64_t begin = first_from(mine.begin), end = first_from(mine.end);
        if (begin < end) f(start[s], start[s + 1] - start[s], s, begin, end);
        at += each * units;
    }
}

// One slot's part of the weights of all slots.
template <class T> static inline Linear slot_of(Linear w, int64_t slot) {
    const int64_t row = is_quantised(w.form) ? quant_row_bytes(w.form, w.in) : w.in * (w.form == F8 ? 1 : sizeof(T));
    w.packed = (const char*)w.packed + slot * w.out * row;
    if (w.form == F8) w.scales += slot * w.panels() * w.codes().blocks();
    return w;
}

// Rows [first, first + count) of x, or of their quantised form, times panels [p0, p1) of one slot.
template <class T, class Finish>
static inline void slot_product(const Linear& all, int64_t slot, const T* x, const QuantisedRows& quantised, int64_t first, int64_t count,
                                int64_t p0, int64_t p1, Finish finish) {
    const Linear w = slot_of<T>(all, slot);
    if (!is_quantised(w.form)) return multiply(w, count, x + first * w.in, w.in, p0, p1, finish);
    with_form(w.form, [&](auto form) { quant_product<decltype(form)>(w, quantised, first, count, {p0, p1}, finish); });
}

// a x [rows, hidden], b Experts, c slots int32 [rows, n], d weights [rows, n], e shared [rows, hidden] or null, f scale
// -> out [rows, hidden]. tmp [rows * n, hidden + width]: the entries' rows of x, later their results; then gated elements.
// scratch int32 [slots + 1 + rows * n], and from the next 64 bytes on, for quantised weights, room for the entries' rows.
template <class T> static void experts(const Op& op, int64_t rows) {
    const Experts& w = *(const Experts*)op.b;
    const int64_t k = op.n, entries = rows * k, D = w.hidden, W = w.width;
    const T *x = (const T*)op.a, *shared = (const T*)op.e;
    const float* weights = (const float*)op.d;
    T *gathered = (T*)op.tmp, *hidden = gathered + entries * D;
    int32_t *start = (int32_t*)op.scratch, *place = start + w.slots + 1;
    if (omp_get_thread_num() == 0) group((const int32_t*)op.c, entries, w.slots, start, place);
    wait_for_all();
    void* room = (char*)op.scratch + ((w.slots + 1 + entries) * sizeof(int32_t) + 63) / 64 * 64;
    const QuantisedRows inputs(room, entries, D), inner(room, entries, W);
    const Range own = my_share(entries);
    for (int64_t i = own.begin; i < own.end; i++) {
        if (is_quantised(w.gate_up.form)) quantise_row(x + i / k * D, D, inputs[place[i]]);
        else std::memcpy(gathered + place[i] * D, x + i / k * D, D * sizeof(T));
    }
    wait_for_all();
    share_slots(start, w.slots, W / 16, [&](int64_t first, int64_t count, int64_t slot, int64_t begin, int64_t end) {
        T* to = hidden + first * W;
        slot_product(w.gate_up, slot, gathered, inputs, first, count, 2 * begin, 2 * end, [&](int64_t m, int64_t n, f32x16 v) {
            T* at = to + m * W + n / 32 * 16;
            if (n % 32 == 0) return store16(at, v);
            T up[16];
            store16(up, v);
            store16(at, activate(load16(at), load16(up), w.limit));
        });
    });
    wait_for_all();
    if (is_quantised(w.down.form)) {
        for (int64_t i = own.begin; i < own.end; i++) quantise_row(hidden + i * W, W, inner[i]);
        wait_for_all();
    }
    share_slots(start, w.slots, D / 16, [&](int64_t first, int64_t count, int64_t slot, int64_t begin, int64_t end) {
        T* to = gathered + first * D;
        slot_product(w.down, slot, hidden, inner, first, count, begin, end,
                     [&](int64_t m, int64_t n, f32x16 v) { store16(to + m * D + n, v); });
    });
    wait_for_all();
    const Range mine = my_share(rows);
    for (int64_t m = mine.begin; m < mine.end; m++) {
        const float entry = w.gate ? gate_of(x + m * D, (const T*)w.gate, D) : 1.f;
        for (int64_t d = 0; d < D; d += 16) {
            f32x16 total{};
            for (int64_t i = m * k; i < (m + 1) * k; i++) total += load16(gathered + place[i] * D + d) * weights[i];
            total *= float(op.f);
            if (shared) total += load16(shared + m * D + d) * entry;
            store16((T*)op.out + m * D + d, total);
        }
    }
}

// The stored row with which panel p of a slot of `out` rows begins. `halves` 2: panels of the upper and the lower half of
// the rows in turn.
static inline int64_t panel_row(int64_t p, int64_t out, int64_t halves) { return p % halves * (out / halves) + p / halves * 16; }

// Slot by slot in place: a slot's packed form takes the memory of its rows.
template <class T> static void pack_slots(T* w, int64_t slots, int64_t out, int64_t in, int64_t halves) {
#pragma omp parallel
    {
        T* copy = new T[out * in];
        const Range mine = my_share(slots);
        for (int64_t s = mine.begin; s < mine.end; s++) {
            T* slot = w + s * out * in;
            std::memcpy(copy, slot, out * in * sizeof(T));
            for (int64_t p = 0; p < out / 16; p++)
                pack_panel(copy + panel_row(p, out, halves) * in, 16, in, slot + p * 16 * in);
        }
        delete[] copy;
    }
}

// Stored blocks [slots][out rows] -> panels of all slots.
template <class F>
static void pack_block_slots(const uint8_t* stored, int64_t row_bytes, int64_t slots, int64_t out, int64_t in, int64_t halves, uint8_t* packed) {
    const int64_t panels = out / 16, blocks = in / BLOCK;
#pragma omp parallel
    {
        const Range mine = my_share(slots * panels);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t first = i / panels * out + panel_row(i % panels, out, halves);
            pack_quant_panel<F>(stored, row_bytes, first, slots * out, blocks, packed + i * blocks * F::SIZE);
        }
    }
}

}  // namespace proa
