// Who computes on this machine: a page that its processes share, a cache line for each of them.
//
// A process that computes writes down until when it surely goes on, and reads what the others wrote; from that it knows
// its part of the cores. Nobody waits for anybody, and what a process wrote that was killed or stopped runs out.
#pragma once

#include <stdint.h>

namespace tandem {

struct alignas(64) Seat {
    uint64_t ends_ns;  // until when its threads compute, on the monotonic clock
    uint32_t wanted;   // how many there are
    uint32_t taken;    // how many of them compute
};

struct Board {
    alignas(64) uint32_t num_seats;  // those ever taken are the first
    Seat seats[63];
};
static_assert(sizeof(Board) == 4096);

// Takes part from now on, with a seat of its own, among processes that have `num_cores` together.
void join_board(Board* board, int seat, int num_cores);

// Says that this process computes, with `wanted` threads if it may. Returns how many are its part of the cores.
int claim_cores(int wanted);

// Says that its step is over. The claim lasts a little longer, as long as there is between two steps of an answer.
void let_cores_go();

}  // namespace tandem
