// A few threads that share out a loop.
//
// Whoever is free takes the next piece, the caller too; the caller waits only for pieces that another has begun. So a
// thread that gets no core, since another process has it, costs nothing but its help. Threads watch for work for some
// tens of microseconds, as long as the serial parts of a step last, then sleep.
#pragma once

#include <stdint.h>

namespace tandem {

using Piece = void (*)(void* context, int64_t index, int thread);

// Starts threads until there are `count`, the caller among them, or lets those beyond it sleep.
void set_threads(int count);
int num_threads();

// Calls `piece` for 0 to count - 1. One caller at a time: hold `Turn`.
void share_out(int64_t count, Piece piece, void* context);

// A step has the pool to itself.
struct Turn {
    Turn();
    ~Turn();
};

template <class Body>
inline void parallel(int64_t count, Body&& body) {
    if (count <= 1) {
        if (count == 1) body(int64_t(0), 0);
        return;
    }
    share_out(count, [](void* context, int64_t index, int thread) { (*(Body*)context)(index, thread); }, &body);
}

}  // namespace tandem
