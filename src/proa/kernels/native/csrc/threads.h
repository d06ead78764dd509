// Work sharing inside one OpenMP team. The runtime is torch's own, so there is one pool in the process.
#pragma once
#include <atomic>
#include <cstdint>
#include <omp.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace proa {

struct Range { int64_t begin, end; };

// The part of [0, n) that the calling thread does. Threads split outputs only, never a sum: results do not depend on them.
static inline Range my_share(int64_t n) {
    int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    return {n * me / team, n * (me + 1) / team};
}

// Where the threads of one team wait for each other. OpenMP's own barrier makes a system call each time, which costs more
// than most small ops of a step of one row. Here one is made only where somebody sleeps: who has waited long does, because
// on a busy machine the thread that it waits for may need its core.
class Meeting {
    static constexpr int PATIENCE = 1000;  // pauses, some 15 microseconds
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<uint32_t> round{0};
    std::atomic<uint32_t> sleepers{0};

    void sleep(uint32_t now) {
#if defined(__linux__)
        sleepers.fetch_add(1);
        while (round.load() == now) syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
        sleepers.fetch_sub(1);
#else
        while (round.load() == now) sched_yield();
#endif
    }
    void wake() {
#if defined(__linux__)
        if (sleepers.load()) syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

public:
    void wait() {
        const uint32_t now = round.load();
        if (arrived.fetch_add(1) + 1 == omp_get_num_threads()) {
            arrived.store(0);
            round.store(now + 1);
            return wake();
        }
        for (int spins = 0; spins < PATIENCE; spins++) {
            if (round.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        sleep(now);
    }
};

static thread_local Meeting* meeting = nullptr;  // of the team that this thread is in

static inline void wait_for_all() { meeting->wait(); }

// f() on every thread of a team, which may wait for each other; on the caller alone if `is_for_one`.
template <class F> static inline void with_team(bool is_for_one, F f) {
    Meeting own;
#pragma omp parallel if (!is_for_one)
    {
        meeting = &own;
        f();
    }
}

}  // namespace proa
