// The tiles of AMX: registers of up to 16 rows of 64 bytes, and products of them.
//
// Written as assembly: what compilers offer for it takes no number of a register from a template, and GCC does not tell
// itself that it reads memory.
#pragma once

#include "simd.h"

namespace TANDEM_SET {

// Rows of results lie far apart, where the CPU foresees nothing: this asks for a line of one while others are computed.
INLINE void prefetch_to_write(const float* p) { __builtin_prefetch(p, 1); }

// What tiles hold, as LDTILECFG reads it.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_nbytes[16] = {};
    uint8_t num_rows[16] = {};

    constexpr void set(int tile, int rows, int nbytes) { num_rows[tile] = uint8_t(rows), row_nbytes[tile] = uint16_t(nbytes); }
};

INLINE void begin_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
// The system saves and restores tiles that are in use at each switch of threads.
INLINE void end_tiles() { __asm__ volatile("tilerelease"); }

template <int T>
INLINE void zero_tile() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T>
INLINE void load_tile(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T>
INLINE void store_tile(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(p), "r"(stride) : "memory");
}
// Tile SUM [m, n] of int32 += tile A [m, k] of int8 times tile B [k / 4, 4 n] of int8.
template <int SUM, int A, int B>
INLINE void add_tile_product() { __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B)); }
// Tile SUM [m, n] of float32 += tile A [m, k] of bfloat16 times tile B [k / 2, 2 n] of bfloat16.
template <int SUM, int A, int B>
INLINE void add_bf16_tile_product() { __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B)); }

}  // namespace TANDEM_SET
