// Work sharing inside one OpenMP team. The runtime is torch's own, so there is one pool in the process.
#pragma once
#include <atomic>
#include <cstdint>
#include <omp.h>
#include <sched.h>

namespace proa {

struct Range { int64_t begin, end; };

// The part of [0, n) that the calling thread does. Threads split outputs only, never a sum: results do not depend on them.
static inline Range my_share(int64_t n) {
    int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    return {n * me / team, n * (me + 1) / team};
}

// Where the threads of one team wait for each other. OpenMP's own barrier makes a system call each time, which costs more
// than most of the small ops of a step of one row; this one is two cache lines. Who waits long gives its core away.
class Meeting {
    static constexpr int PATIENCE = 4096;  // pauses, some 50 microseconds
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> round{0};

public:
    void wait() {
        const int64_t team = omp_get_num_threads(), now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
            if (spins >= PATIENCE) sched_yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }
};

static thread_local Meeting* meeting = nullptr;  // of the team that this thread is in

static inline void wait_for_all() { meeting->wait(); }

// f() on every thread of a team, which may wait for each other.
template <class F> static inline void with_team(F f) {
    Meeting own;
#pragma omp parallel
    {
        meeting = &own;
        f();
    }
}

}  // namespace proa
