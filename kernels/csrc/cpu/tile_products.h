// Rows of activations times packed matrices, 16 rows at a time, by the tiles of AMX: for prompts and wide batches.
//
// The sums of a group's codes are those of products.h, since they are exact, and the same products and sums of floats
// follow them in the same order: the bits are the same. A strip is unpacked once for a block of rows. Its vectors of
// codes are rows of a tile already.
#pragma once

#include "products.h"
#include "tiles.h"

namespace TANDEM_SET {

// A strip taken apart. `codes` [k / 32][8][64] with their signs; `scales` [k / 32][2][16]: those of a group, and what
// else it has (least values, or the scales of its second half).
struct OpenStrip {
    int8_t* codes;
    float* scales;
};

INLINE int64_t open_strip_nbytes(int64_t k) { return k * 16 + k / 32 * 2 * 64; }
INLINE OpenStrip open_strip_at(uint8_t* room, int64_t k) { return {(int8_t*)room, (float*)(room + k * 16)}; }

// What a group's codes are multiplied in: all at once, or each half by itself.
template <class F>
constexpr int PARTS = F::SCALES == Scales::K_16 ? 2 : 1;

enum TileNumber { CODES_TILE, WEIGHTS_TILE, SUMS_TILE, NUM_TILES = 6 };

template <class F>
constexpr TileShapes product_shapes() {
    TileShapes shapes;
    shapes.set(CODES_TILE, TILE, 32 / PARTS<F>);
    shapes.set(WEIGHTS_TILE, 8 / PARTS<F>, 64);
    for (int tile = SUMS_TILE; tile < NUM_TILES; tile++) shapes.set(tile, TILE, 64);
    return shapes;
}

template <class F>
INLINE void open_strip(const uint8_t* codes, const uint8_t* scales, int64_t num_groups, const OpenStrip& out) {
    constexpr int GROUPS = F::BLOCK / 32;
    int8_t* to = out.codes;
    float* scale = out.scales;
    for (int64_t block = 0; block < num_groups / GROUPS; block++, scales += F::SCALE_NBYTES) {
        BlockScales<F> of_block;
        of_block.read(scales, 0);
        for (int i = 0; i < GROUPS; i++, codes += F::GROUP_NBYTES, to += 512, scale += 32) {
            Floats both[2];
            of_block.of_group(i, both[0], both[1]);
            store(scale, both[0]), store(scale + 16, both[1]);
            repeat<4>([&](auto pair) {
                constexpr int I = decltype(pair)::value;
                Bytes u[2];
                load_pair<F, I>(codes, u);
                UNROLL for (int j = 0; j < 2; j++) store_bytes(to + 128 * I + 64 * j, less(u[j], F::ZERO_BITS ? 1 << F::ZERO_BITS : 0));
            });
        }
    }
}

// Sums of codes of two groups, or runs of rests, [PARTS][16 rows][16] each. Tiles take their time from memory through
// a product and back. So while the sums of one are added up, those of the next come out of a product, to be stored
// after that, and the product after it begins.
template <class F>
struct CodeSums {
    alignas(64) int32_t of[2][PARTS<F> * 256];

    // Calls `each(index, sum)` for 0 to count - 1, where `sum(weights, codes, stride)` is called; then `add(index, sums)`.
    template <class Each, class Add>
    INLINE void pass(int64_t count, Each&& each, Add&& add) {
        if (count == 0) return;
        begin<0>(0, each);
        if (count > 1) begin<1>(1, each);
        keep<0>();
        int64_t i = 0;
        for (; i + 3 < count; i += 2) {
            begin<0>(i + 2, each);
            add(i, of[0]);
            keep<1>();
            begin<1>(i + 3, each);
            add(i + 1, of[1]);
            keep<0>();
        }
        if (i + 2 < count) begin<0>(i + 2, each);
        add(i, of[0]);
        if (i + 1 == count) return;
        keep<1>();
        add(i + 1, of[1]);
        if (i + 2 == count) return;
        keep<0>();
        add(i + 2, of[0]);
    }

    template <int PLACE, class Each>
    INLINE static void begin(int64_t index, Each&& each) {
        each(index, [&](const int8_t* weights, const int8_t* codes, int64_t stride) {
            repeat<PARTS<F>>([&](auto part) {
                constexpr int P = decltype(part)::value, SUMS = SUMS_TILE + PARTS<F> * PLACE + P;
                zero_tile<SUMS>();
                load_tile<CODES_TILE>(codes + 16 * P, stride);
                load_tile<WEIGHTS_TILE>(weights + 256 * P, 64);
                add_tile_product<SUMS, CODES_TILE, WEIGHTS_TILE>();
            });
        });
    }

    template <int PLACE>
    INLINE void keep() {
        repeat<PARTS<F>>([&](auto part) {
            store_tile<SUMS_TILE + PARTS<F> * PLACE + decltype(part)::value>(of[PLACE] + 256 * decltype(part)::value, 64);
        });
    }
};

// Adds a row's part of a group to its total.
template <class F>
INLINE Floats add_sums(const int32_t* sums, const Floats* scales, float scale, float offset, Floats total) {
    total = fma(to_floats(load_ints(sums)), mul(scales[0], all(scale)), total);
    if constexpr (PARTS<F> == 2) total = fma(to_floats(load_ints(sums + 256)), mul(scales[1], all(scale)), total);
    if constexpr (F::HAS_MIN) total = fma(scales[1], all(offset), total);
    return total;
}

// 16 rows times a strip, without what their rounding left: result [16, 16].
template <class F>
INLINE void multiply_tile(const OpenStrip& strip, const TileGroup* groups, int64_t num_groups, float* result) {
    CodeSums<F> sums;
    Floats totals[TILE];
    UNROLL for (int m = 0; m < TILE; m++) totals[m] = zeros();
    sums.pass(
        num_groups,
        [&](int64_t g, auto sum) { sum(strip.codes + 512 * g, groups[g].codes[0], 32); },
        [&](int64_t g, const int32_t* own) __attribute__((always_inline)) {
            const Floats scales[2] = {load(strip.scales + 32 * g), load(strip.scales + 32 * g + 16)};
            UNROLL for (int m = 0; m < TILE; m++)
                totals[m] = add_sums<F>(own + 16 * m, scales, groups[g].scales[m], groups[g].offsets[m], totals[m]);
        });
    UNROLL for (int m = 0; m < TILE; m++) store(result + 16 * m, totals[m]);
}

// Adds what the rounding of a block of rows left to `result` [rows, 16].
template <class F>
INLINE void add_tile_rests(const OpenStrip& strip, const Rest* rests, const Run* runs, int32_t num_runs, float* result) {
    CodeSums<F> sums;
    sums.pass(
        num_runs,
        [&](int64_t r, auto sum) { sum(strip.codes + 512 * runs[r].group, rests[runs[r].first].codes, sizeof(Rest)); },
        [&](int64_t r, const int32_t* own) {
            const int64_t g = runs[r].group;
            const Floats scales[2] = {load(strip.scales + 32 * g), load(strip.scales + 32 * g + 16)};
            const Rest* rest = rests + runs[r].first;
            for (int32_t m = 0; m < runs[r].count; m++, rest++, own += 16) {
                float* to = result + 16 * rest->row;
                store(to, add_sums<F>(own, scales, rest->group.scale, rest->group.offset, load(to)));
            }
        });
}

// A strip times rows `row0` to `row1` of a block: result [rows + 15, 16]. `y`, unless it is null: where that will go.
template <class F>
void tile_strip(const uint8_t* codes, const uint8_t* scales, const Rows& x, int64_t row0, int64_t row1, uint8_t* room, float* result, const float* y, int64_t stride) {
    static constexpr TileShapes SHAPES = product_shapes<F>();
    const int64_t num_groups = x.k / 32;
    const OpenStrip strip = open_strip_at(room, x.k);
    open_strip<F>(codes, scales, num_groups, strip);
    begin_tiles(SHAPES);
    for (int64_t row = row0; row < row1; row += TILE) {
        for (int64_t i = row; y && i < row + TILE && i < row1; i++) prefetch_to_write(y + i * stride);
        multiply_tile<F>(strip, x.tile_groups + row / TILE * num_groups, num_groups, result + 16 * (row - row0));
    }
    const int64_t block = row0 / ROW_BLOCK;
    add_tile_rests<F>(strip, x.rests + row0 * rests_of(x.k), x.runs + block * most_runs(x.k), x.num_runs[block], result);
    end_tiles();
}

}  // namespace TANDEM_SET
