// A strip times a block of rows, by what is fastest for them.
#pragma once

#include "products.h"
#if defined(TANDEM_TILES)
#include "tile_products.h"
#endif

namespace TANDEM_SET {

#if defined(TANDEM_TILES)
constexpr int64_t LEAST_TILE_ROWS = 32;  // fewer are faster by vectors
INLINE bool takes_tiles(int64_t num_rows) { return num_rows >= LEAST_TILE_ROWS; }
INLINE int64_t room_nbytes(int64_t k) { return open_strip_nbytes(k); }
#else
INLINE bool takes_tiles(int64_t) { return false; }
INLINE int64_t room_nbytes(int64_t) { return 0; }
#endif

template <class F>
void multiply_format(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, uint8_t* room, float* result, const float* y, int64_t stride) {
    const uint8_t* codes = w.codes + strip * (w.k / 32) * F::GROUP_NBYTES;
    const uint8_t* scales = w.scales + strip * (w.k / F::BLOCK) * F::SCALE_NBYTES;
#if defined(TANDEM_TILES)
    if (x.tile_groups && takes_tiles(row1 - row0)) return tile_strip<F>(codes, scales, x, row0, row1, room, result, y, stride);
#endif
    vector_strip<F>(codes, scales, x, row0, row1, result);
}

// Rows `row0` to `row1`, a block or all of few, times a strip, plus its bias: result [ROW_BLOCK, 16]. `room`:
// room_nbytes(k) of the thread's own. `y`, unless it is null: row 0 of where the result will go.
inline void multiply_strip(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, uint8_t* room, float* result, const float* y, int64_t stride) {
    const bool has_groups = with_format(w.kind, [&](auto format) {
        multiply_format<decltype(format)>(w, strip, x, row0, row1, room, result, y, stride);
    });
    if (!has_groups) {
        if (w.kind == KIND_F32) strip_plain<AsF32>(w, strip, x, row0, row1, result);
        if (w.kind == KIND_F16) strip_plain<AsF16>(w, strip, x, row0, row1, result);
        if (w.kind == KIND_BF16) strip_plain<AsBF16>(w, strip, x, row0, row1, result);
    }
    if (!w.bias) return;
    float bias[16] = {};
    for (int i = 0; i < 16 && 16 * strip + i < w.n; i++) bias[i] = w.bias[16 * strip + i];
    for (int64_t i = 0; i < 16 * (row1 - row0); i += W) store(result + i, add(load(result + i), load(bias + i % 16)));
}

// Puts `result` [rows, 16] in y [rows, n], `stride` apart; added to what is there if `adds`.
INLINE void write_strip(const float* result, int64_t strip, int64_t n, int64_t row0, int64_t row1, float* y, int64_t stride, bool adds) {
    const int64_t column = 16 * strip;
    for (int64_t row = row0; row < row1; row++, result += 16) {
        float* to = y + row * stride + column;
        if (column + 16 > n) {
            for (int i = 0; column + i < n; i++) to[i] = adds ? result[i] + to[i] : result[i];
            continue;
        }
        UNROLL for (int i = 0; i < 16; i += W) store(to + i, adds ? add(load(result + i), load(to + i)) : load(result + i));
    }
}

}  // namespace TANDEM_SET
