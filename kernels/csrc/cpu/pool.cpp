#include "pool.h"

#include "board.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tandem {
namespace {

constexpr int MOST_THREADS = 256;
// One look takes some 20 to 40 ns with the pause in it: 50 to 100 us in all.
constexpr int LOOKS_BEFORE_SLEEP = 2500, LOOKS_OF_CALLER = 4000;

// The loop at hand in one word, so that whoever takes a piece of it learns in the same instant whether there was one:
// its number in bits 48 to 63, the count of pieces in 24 to 47, the next piece in 0 to 23.
alignas(64) uint64_t loop_word;
alignas(64) uint32_t num_done;
uint32_t is_awaited;  // whether the caller sleeps until all are done
Piece loop_piece;
void* loop_context;
int num_wanted = 1, num_started = 1;
int num_active = 1;  // of those wanted, as many as this process has cores for now

// Where threads sleep.
struct alignas(64) Bell {
    uint32_t num_rings;
    int num_sleepers;
};
Bell work_bell;    // until there is a loop
Bell active_bell;  // until there is a core for them

pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

constexpr uint64_t NEXT = (1u << 24) - 1;

inline bool has_more(uint64_t word) { return (word & NEXT) < (word >> 24 & NEXT); }

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

inline void futex(uint32_t& word, int what, uint32_t number) {
    syscall(SYS_futex, &word, what, number, nullptr, nullptr, 0);
}

inline bool is_active(int thread) { return thread < __atomic_load_n(&num_active, __ATOMIC_SEQ_CST); }

template <class IsNeeded>
void sleep_until_rung(Bell& bell, IsNeeded&& is_needed) {
    __atomic_fetch_add(&bell.num_sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t heard = __atomic_load_n(&bell.num_rings, __ATOMIC_SEQ_CST);
    if (!is_needed()) futex(bell.num_rings, FUTEX_WAIT_PRIVATE, heard);
    __atomic_fetch_sub(&bell.num_sleepers, 1, __ATOMIC_SEQ_CST);
}

void ring(Bell& bell) {
    if (__atomic_load_n(&bell.num_sleepers, __ATOMIC_SEQ_CST) == 0) return;
    __atomic_fetch_add(&bell.num_rings, 1, __ATOMIC_SEQ_CST);
    futex(bell.num_rings, FUTEX_WAKE_PRIVATE, MOST_THREADS);
}

// Takes this process's part of the cores, for the turn's owner.
void take_part() {
    const int before = num_active, now = claim_cores(num_wanted);
    if (now != before) __atomic_store_n(&num_active, now, __ATOMIC_SEQ_CST);
    if (now > before) ring(active_bell);
}

// Computes pieces until none is left, or the core is another's.
void work(int thread) {
    while (is_active(thread) && has_more(__atomic_load_n(&loop_word, __ATOMIC_ACQUIRE))) {
        const uint64_t word = __atomic_fetch_add(&loop_word, 1, __ATOMIC_ACQ_REL);
        if (!has_more(word)) return;
        loop_piece(loop_context, int64_t(word & NEXT), thread);
        const uint32_t done = __atomic_add_fetch(&num_done, 1, __ATOMIC_SEQ_CST);
        if (thread == 0)
            take_part();
        else if (done == (word >> 24 & NEXT) && __atomic_load_n(&is_awaited, __ATOMIC_SEQ_CST))
            futex(num_done, FUTEX_WAKE_PRIVATE, 1);
    }
}

// Waits for the pieces that others have begun. Who does not run has lost its core to another process: the caller leaves
// its own, for that thread to go on there.
void await_pieces(uint32_t count) {
    for (int looks = 0; looks < LOOKS_OF_CALLER; looks++) {
        if (__atomic_load_n(&num_done, __ATOMIC_ACQUIRE) == count) return;
        pause();
    }
    __atomic_store_n(&is_awaited, 1, __ATOMIC_SEQ_CST);
    for (uint32_t done; (done = __atomic_load_n(&num_done, __ATOMIC_SEQ_CST)) != count;)
        futex(num_done, FUTEX_WAIT_PRIVATE, done);
    __atomic_store_n(&is_awaited, 0, __ATOMIC_RELAXED);
}

void* help(void* number) {
    const int thread = int(intptr_t(number));
    int looks = 0;
    for (;;) {
        if (!is_active(thread)) {
            sleep_until_rung(active_bell, [&] { return is_active(thread); });
            looks = 0;
        } else if (has_more(__atomic_load_n(&loop_word, __ATOMIC_SEQ_CST))) {
            work(thread);
            looks = 0;
        } else if (++looks > LOOKS_BEFORE_SLEEP) {
            sleep_until_rung(work_bell, [] { return has_more(__atomic_load_n(&loop_word, __ATOMIC_SEQ_CST)); });
            looks = 0;
        } else {
            pause();
        }
    }
    return nullptr;
}

}  // namespace

Turn::Turn() { pthread_mutex_lock(&turn); }
Turn::~Turn() {
    let_cores_go();
    pthread_mutex_unlock(&turn);
}

int num_threads() { return num_wanted; }

void set_threads(int count) {
    const Turn mine;
    count = count < 1 ? 1 : count > MOST_THREADS ? MOST_THREADS : count;
    for (; num_started < count; num_started++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, help, (void*)intptr_t(num_started)) != 0) break;
        pthread_detach(thread);
    }
    num_wanted = count < num_started ? count : num_started;
    take_part();
}

void share_out(int64_t count, Piece piece, void* context) {
    take_part();
    if (num_wanted == 1 || count > int64_t(NEXT) - MOST_THREADS) {
        for (int64_t i = 0; i < count; i++) piece(context, i, 0);
        return;
    }
    loop_piece = piece;
    loop_context = context;
    __atomic_store_n(&num_done, 0, __ATOMIC_RELAXED);
    const uint64_t number = (__atomic_load_n(&loop_word, __ATOMIC_RELAXED) >> 48) + 1;
    __atomic_store_n(&loop_word, number << 48 | uint64_t(count) << 24, __ATOMIC_SEQ_CST);
    ring(work_bell);
    work(0);
    await_pieces(uint32_t(count));
}

}  // namespace tandem
