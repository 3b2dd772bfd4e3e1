#include "board.h"

#include <time.h>

namespace tandem {
namespace {

// How long a claim lasts that nobody renews. A piece of a loop takes less, and so does waiting for a core.
constexpr uint64_t CLAIM_NS = 50'000'000;
// How long it outlives a step: the next one begins sooner while there are answers.
constexpr uint64_t REST_NS = 2'000'000;

Board* board;
int own_seat, num_cores;

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

template <class T>
void write(T& place, T value) { __atomic_store_n(&place, value, __ATOMIC_RELAXED); }
template <class T>
T read(const T& place) { return __atomic_load_n(&place, __ATOMIC_RELAXED); }

// Calls `each(seat, wanted)` for the others that compute.
template <class Each>
void each_other(uint64_t now, Each&& each) {
    const int num_seats = int(read(board->num_seats));
    for (int i = 0; i < num_seats; i++) {
        const Seat& seat = board->seats[i];
        // An end that is past wraps around; one that is too far ahead is of another clock.
        if (i != own_seat && read(seat.ends_ns) - now <= CLAIM_NS) each(i, int(read(seat.wanted)));
    }
}

// All that is wanted, if nobody else computes. Else an even part, and an even part of what that leaves over, since it is
// no whole number or others want less.
int part_of_cores(uint64_t now, int wanted) {
    int count = 1;
    each_other(now, [&](int, int) { count++; });
    if (count == 1) return wanted;
    const int even = num_cores / count;
    int spare = num_cores % count, takers = 1, takers_before = 0;
    each_other(now, [&](int seat, int theirs) {
        if (theirs < even)
            spare += even - theirs;
        else
            takers++, takers_before += seat < own_seat;
    });
    const int part = even + spare / takers + (takers_before < spare % takers);
    return part < 1 ? 1 : part < wanted ? part : wanted;
}

}  // namespace

void join_board(Board* shared, int seat, int cores) {
    uint32_t known = read(shared->num_seats);
    const uint32_t least = uint32_t(seat) + 1;
    while (known < least && !__atomic_compare_exchange_n(&shared->num_seats, &known, least, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    own_seat = seat, num_cores = cores, board = shared;
}

int claim_cores(int wanted) {
    if (!board) return wanted;
    const uint64_t now = now_ns();
    Seat& own = board->seats[own_seat];
    write(own.wanted, uint32_t(wanted));
    write(own.ends_ns, now + CLAIM_NS);
    const int part = part_of_cores(now, wanted);
    write(own.taken, uint32_t(part));
    return part;
}

void let_cores_go() {
    if (board) write(board->seats[own_seat].ends_ns, now_ns() + REST_NS);
}

}  // namespace tandem
