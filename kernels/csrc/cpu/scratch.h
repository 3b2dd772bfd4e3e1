// Memory that steps use again and again; it grows and is never given back. Only for who has the pool's turn.
#pragma once

#include <stddef.h>

namespace tandem {

enum class Slot { CODES, GROUPS, NUMBERS, RESTS, STARTS, TILE_GROUPS, RUNS, NUM_RUNS, STRIPS, TILES, ATTENTION, NORMED, GATED, HIDDEN, QKV, MIXED, LEFT, WANTED, COUNT };

// `nbytes` at a multiple of 64. Ends the process where there is no memory.
void* scratch_bytes(Slot slot, size_t nbytes);

template <class T>
inline T* scratch(Slot slot, size_t count) {
    return (T*)scratch_bytes(slot, count * sizeof(T));
}

}  // namespace tandem
