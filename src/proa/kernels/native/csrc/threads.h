// Work sharing inside one OpenMP team. The runtime is torch's own, so there is one pool in the process.
#pragma once
#include <cstdint>
#include <omp.h>

namespace proa {

struct Range { int64_t begin, end; };

// The part of [0, n) that the calling thread does. Threads split outputs only, never a sum: results do not depend on them.
static inline Range my_share(int64_t n) {
    int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    return {n * me / team, n * (me + 1) / team};
}

}  // namespace proa
