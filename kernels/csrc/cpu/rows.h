// Rows of activations times packed matrices.
//
// Activations are rounded to int8, 32 columns at a time; sums of codes are exact in int32, and one float32 product and
// sum a group follows them, in the order of the columns. What a row gives does therefore not depend, to the bit, on the
// rows beside it, nor on the instruction set as far as that has a fused multiply-add.
//
// A column that is much greater than the others of its group leaves them few of the 8 bits. So what the rounding of the
// coarsest quarter of a row's groups left is rounded once more, and its products are added at the end.
//
// KV outlives a release, on disks and in stores. So whoever changes the bits that come out here, in attention.h or in
// elementwise.h raises NUMERICS in kernels/cpu/native.py.
#pragma once

#include "formats.h"

namespace TANDEM_SET {

// What goes with 32 codes of a row: their scale, it times their sum, and minus the sums of all and of each half.
struct Group {
    float scale, offset;
    int32_t minus, minus_low, minus_high;
};

// What was left of a group of a row, by its number in the block of rows.
struct Rest {
    int32_t row;
    Group group;
    int8_t codes[32];
};

// 32 codes of 16 rows and what goes with them, for products by tiles, which read it from end to end.
constexpr int TILE = 16;
struct alignas(64) TileGroup {
    float scales[TILE], offsets[TILE];
    int8_t codes[TILE][32];
};

// Up to 16 rests of a group: those from `first` on.
struct Run {
    int32_t group, first, count;
};

#if defined(TANDEM_TILES)
constexpr int64_t ROW_BLOCK = 256;  // for which a strip is unpacked once
#else
constexpr int64_t ROW_BLOCK = 64;
#endif

// M rows of k columns, in blocks of ROW_BLOCK. `codes` [M, k], `groups` [M, k / 32]; `rests` [M, rests_of(k)]: those of
// a block in the order of the groups, of group g from `starts` [blocks, k / 32 + 2] of g on to that of g + 1.
// For products by tiles, null if there are none: `tile_groups` [M / 16, k / 32], `runs` [blocks, most_runs(k)], of which
// a block has `num_runs`. `floats` [M, k] for matrices without groups.
struct Rows {
    const int8_t* codes;
    const Group* groups;
    const Rest* rests;
    const int32_t* starts;
    const TileGroup* tile_groups;
    const Run* runs;
    const int32_t* num_runs;
    const float* floats;
    int64_t k;
};

INLINE int64_t rests_of(int64_t k) { return (k / 32 + 3) / 4; }
INLINE int64_t most_runs(int64_t k) { return k / 32 + ROW_BLOCK * rests_of(k) / TILE; }

// 127 over less is no float32: columns that are all smaller are taken as zero.
constexpr float LEAST_PEAK = 0x1p-120f;

// Rounds 32 columns to codes of -127 to 127.
INLINE Group round_group(const Floats* v, int8_t* codes) {
    Floats top = zeros();
    UNROLL for (int i = 0; i < 32 / W; i++) top = max(top, abs(v[i]));
    const float found = greatest(top), peak = found < LEAST_PEAK ? 0.0f : found;
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
    int32_t sums[2] = {0, 0};
    UNROLL for (int i = 0; i < 32 / W; i++) {
        const Ints code = to_ints(mul(v[i], all(inverse)));
        to_i8(codes + W * i, code);
        sums[W * i / 16] += sum(code);
    }
    const int32_t both = sums[0] + sums[1];
    return Group{scale, scale * float(both), -both, -sums[0], -sums[1]};
}

// Of each 64 groups, writes the numbers of the quarter with the greatest scales, ascending; -1 where there are fewer.
INLINE void choose_coarsest(const Group* groups, int64_t num_groups, int32_t* numbers) {
    constexpr int64_t MOST = 64;
    for (int64_t first = 0; first < num_groups; first += MOST) {
        const int64_t count = num_groups - first < MOST ? num_groups - first : MOST;
        float scales[MOST] = {};
        for (int64_t g = 0; g < count; g++) scales[g] = groups[first + g].scale;
        int64_t left = rests_of(32 * count);
        float least = INFINITY;
        for (int64_t r = 0; r < left; r++) {
            Floats top = zeros();
            for (int64_t g = 0; g < count; g += W) {
                const Floats scale = load(scales + g);
                top = max(top, sub(scale, zero_below(scale, scale, least)));
            }
            const float next = greatest(top);
            if (!(next > 0)) break;
            least = next;
        }
        for (int64_t g = 0; g < count && left > 0; g++)
            if (scales[g] >= least) *numbers++ = int32_t(first + g), left--;
        for (; left > 0; left--) *numbers++ = -1;
    }
}

// Rounds k columns, a multiple of 32, and chooses what is to be rounded again.
INLINE void round_row(const float* x, int64_t k, int8_t* codes, Group* groups, int32_t* numbers) {
    for (int64_t g = 0; g < k / 32; g++) {
        Floats v[32 / W];
        UNROLL for (int i = 0; i < 32 / W; i++) v[i] = load(x + 32 * g + W * i);
        groups[g] = round_group(v, codes + 32 * g);
    }
    choose_coarsest(groups, k / 32, numbers);
}

// Rounds what was left of the chosen groups of a block of rows, and puts it in the order of the groups. `starts`
// [k / 32 + 2]: the last is for this function.
INLINE void round_rests(const float* x, int64_t num_rows, int64_t k, const int8_t* codes, const Group* groups, const int32_t* numbers, Rest* rests, int32_t* starts) {
    const int64_t num_groups = k / 32, each = rests_of(k);
    memset(starts, 0, (num_groups + 2) * sizeof *starts);
    for (int64_t i = 0; i < num_rows * each; i++)
        if (numbers[i] >= 0) starts[numbers[i] + 2]++;
    for (int64_t g = 0; g < num_groups; g++) starts[g + 2] += starts[g + 1];
    for (int64_t i = 0; i < num_rows * each; i++) {
        const int64_t row = i / each, g = numbers[i];
        if (g < 0) continue;
        const int64_t first = row * k + 32 * g;
        const float scale = groups[row * num_groups + g].scale;
        Rest& rest = rests[starts[g + 1]++];
        Floats v[32 / W];
        UNROLL for (int j = 0; j < 32 / W; j++)
            v[j] = fma(to_floats(from_i8(codes + first + W * j)), all(-scale), load(x + first + W * j));
        rest.row = int32_t(row);
        rest.group = round_group(v, rest.codes);
    }
}

// Cuts the rests of a block into runs; returns their number.
INLINE int32_t cut_runs(const int32_t* starts, int64_t num_groups, Run* runs) {
    int32_t count = 0;
    for (int32_t g = 0; g < num_groups; g++)
        for (int32_t first = starts[g], last = starts[g + 1]; first < last; first += TILE)
            runs[count++] = {g, first, last - first < TILE ? last - first : TILE};
    return count;
}

// Puts a block of rows in the order of tiles: `out` [rows / 16, k / 32].
INLINE void group_by_tiles(const int8_t* codes, const Group* groups, int64_t num_rows, int64_t num_groups, TileGroup* out) {
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t g = 0; g < num_groups; g++, codes += 32, groups++) {
            TileGroup& tile = out[row / TILE * num_groups + g];
            tile.scales[row % TILE] = groups->scale, tile.offsets[row % TILE] = groups->offset;
            memcpy(tile.codes[row % TILE], codes, 32);
        }
}

}  // namespace TANDEM_SET
