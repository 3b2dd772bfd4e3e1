// Attention of a tile of tokens over bfloat16 pages, by the tiles of AMX.
//
// As attention.h does it, with the same running maximum, but products of bfloat16. Queries and weights are float32: each
// is the sum of two bfloat16 here, which have 16 of its 24 bits between them. What a row gives does not depend on the
// rows beside it.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace TANDEM_SET {

enum AttentionTile { HIGH_TILE, LOW_TILE, FIRST_TILE, SECOND_TILE, FIRST_SUMS_TILE, SECOND_SUMS_TILE };

// What a tile of tokens needs beside the pages, one after the other: no more than attention_scratch says. Rows are
// padded to whole tiles.
struct AttentionRoom {
    uint32_t* keys;    // [dim / 32][2][16][16]: neighbours of a head in each word; 16 tokens side by side
    uint32_t* values;  // [dim / 16][16][16]: two tokens in each word
    uint16_t *q_high, *q_low;              // [rows, dim]
    uint16_t *weights_high, *weights_low;  // [rows, 32]
    float* scores;                         // [rows, 32]
    float* sums;                           // [rows, dim]
    float *peaks, *totals;                 // [rows]

    INLINE AttentionRoom(float* from, int64_t rows, int64_t dim) {
        const auto take = [&](int64_t count) {
            float* taken = from;
            from += count;
            return taken;
        };
        keys = (uint32_t*)take(CONTEXT / 2 * dim), values = (uint32_t*)take(CONTEXT / 2 * dim);
        q_high = (uint16_t*)take(rows * dim / 2), q_low = (uint16_t*)take(rows * dim / 2);
        weights_high = (uint16_t*)take(rows * CONTEXT / 2), weights_low = (uint16_t*)take(rows * CONTEXT / 2);
        scores = take(rows * CONTEXT), sums = take(rows * dim), peaks = take(rows), totals = take(rows);
    }
};

INLINE void split(Floats v, uint16_t* high, uint16_t* low) {
    to_bf16(high, v);
    to_bf16(low, sub(v, from_bf16(high)));
}

INLINE void load_key_pairs(const void* const* rows, int dim, uint32_t* pairs) {
    for (int d = 0; d < dim; d += 32)
        for (int t = 0; t < CONTEXT; t += 16, pairs += 256) transpose(rows + t, 2 * d, pairs, 16);
}

INLINE void load_value_pairs(const void* const* rows, int dim, uint32_t* pairs) {
    for (int t = 0; t < CONTEXT; t += 2)
        for (int d = 0; d < dim; d += 16) {
            const Ints even = from_u16((const uint16_t*)rows[t] + d), odd = from_u16((const uint16_t*)rows[t + 1] + d);
            store_ints(pairs + 16 * d + 8 * t, either(even, left<16>(odd)));
        }
}

// scores [16, 32] of the rows from `first` on.
INLINE void score_tile(const AttentionRoom& room, int first, int dim) {
    zero_tile<FIRST_SUMS_TILE>();
    zero_tile<SECOND_SUMS_TILE>();
    for (int d = 0; d < dim; d += 32) {
        load_tile<HIGH_TILE>(room.q_high + first * dim + d, 2 * dim);
        load_tile<LOW_TILE>(room.q_low + first * dim + d, 2 * dim);
        load_tile<FIRST_TILE>(room.keys + 16 * d, 64);
        load_tile<SECOND_TILE>(room.keys + 16 * d + 256, 64);
        add_bf16_tile_product<FIRST_SUMS_TILE, HIGH_TILE, FIRST_TILE>();
        add_bf16_tile_product<SECOND_SUMS_TILE, HIGH_TILE, SECOND_TILE>();
        add_bf16_tile_product<FIRST_SUMS_TILE, LOW_TILE, FIRST_TILE>();
        add_bf16_tile_product<SECOND_SUMS_TILE, LOW_TILE, SECOND_TILE>();
    }
    store_tile<FIRST_SUMS_TILE>(room.scores + first * CONTEXT, 4 * CONTEXT);
    store_tile<SECOND_SUMS_TILE>(room.scores + first * CONTEXT + 16, 4 * CONTEXT);
}

// sums [16, dim] += weights [16, 32] * values [32, dim]
INLINE void add_values_tile(const AttentionRoom& room, int first, int dim) {
    load_tile<HIGH_TILE>(room.weights_high + first * CONTEXT, 2 * CONTEXT);
    load_tile<LOW_TILE>(room.weights_low + first * CONTEXT, 2 * CONTEXT);
    for (int d = 0; d < dim; d += 32) {
        float* sums = room.sums + first * dim + d;
        load_tile<FIRST_SUMS_TILE>(sums, 4 * dim);
        load_tile<SECOND_SUMS_TILE>(sums + 16, 4 * dim);
        load_tile<FIRST_TILE>(room.values + 16 * d, 64);
        load_tile<SECOND_TILE>(room.values + 16 * d + 256, 64);
        add_bf16_tile_product<FIRST_SUMS_TILE, HIGH_TILE, FIRST_TILE>();
        add_bf16_tile_product<SECOND_SUMS_TILE, HIGH_TILE, SECOND_TILE>();
        add_bf16_tile_product<FIRST_SUMS_TILE, LOW_TILE, FIRST_TILE>();
        add_bf16_tile_product<SECOND_SUMS_TILE, LOW_TILE, SECOND_TILE>();
        store_tile<FIRST_SUMS_TILE>(sums, 4 * dim);
        store_tile<SECOND_SUMS_TILE>(sums + 16, 4 * dim);
    }
}

// What attend_tile is to float32 pages.
inline void attend_tile_bf16(const float* q, int64_t q_stride, const void* keys, const void* values, const AttentionShape& s, const int32_t* table, int64_t first_seen, const Tile& tile, int kv_head, float* scratch, float* out) {
    const int dim = s.head_dim, group = s.group(), rows = tile.count * group, padded = (rows + 15) / 16 * 16;
    const AttentionRoom room(scratch, padded, dim);
    TileShapes shapes;
    for (int i = HIGH_TILE; i <= SECOND_SUMS_TILE; i++)
        shapes.set(i, i == FIRST_TILE || i == SECOND_TILE || rows > 16 ? 16 : rows, 64);
    begin_tiles(shapes);
    const int64_t row_width = int64_t(s.num_heads) * dim, at_head = int64_t(kv_head) * group * dim;
    for (int r = 0; r < padded; r++) {
        const float* query = q + (tile.row + r / group) * q_stride + at_head + r % group * dim;
        for (int d = 0; d < dim; d += W) {
            split(r < rows ? load(query + d) : zeros(), room.q_high + r * dim + d, room.q_low + r * dim + d);
            store(room.sums + r * dim + d, zeros());
        }
        for (int t = 0; t < CONTEXT; t += W) split(zeros(), room.weights_high + r * CONTEXT + t, room.weights_low + r * CONTEXT + t);
        room.peaks[r] = HIDDEN, room.totals[r] = 0.0f;
    }
    const int64_t last = tile.position + tile.count - 1, oldest = oldest_seen(s, first_seen, tile.position);
    for (int64_t first = oldest / CONTEXT * CONTEXT; first <= last; first += CONTEXT) {
        const void* tokens[CONTEXT];
        token_rows(keys, s, table, kv_head, first, last, tokens);
        load_key_pairs(tokens, dim, room.keys);
        token_rows(values, s, table, kv_head, first, last, tokens);
        load_value_pairs(tokens, dim, room.values);
        const int begin = first > tile.position ? int(first - tile.position) * group : 0;  // of rows that see any of it
        for (int r = begin / 16 * 16; r < rows; r += 16) score_tile(room, r, dim);
        for (int r = begin; r < rows; r++) {
            const Span seen = seen_of(s, first_seen, tile.position + r / group, first);
            float* scores = room.scores + r * CONTEXT;
            weigh(scores, seen.from, seen.to, room.peaks + r, room.totals + r, room.sums + r * dim, dim);
            for (int t = 0; t < CONTEXT; t += W)
                split(load(scores + t), room.weights_high + r * CONTEXT + t, room.weights_low + r * CONTEXT + t);
        }
        for (int r = begin / 16 * 16; r < begin; r++)
            for (int t = 0; t < CONTEXT; t += W) split(zeros(), room.weights_high + r * CONTEXT + t, room.weights_low + r * CONTEXT + t);
        for (int r = begin / 16 * 16; r < rows; r += 16) add_values_tile(room, r, dim);
    }
    end_tiles();
    for (int r = 0; r < rows; r++) {
        const Floats share = all(1.0f / room.totals[r]);
        float* to = out + (tile.row + r / group) * row_width + at_head + r % group * dim;
        for (int d = 0; d < dim; d += W) store(to + d, mul(load(room.sums + r * dim + d), share));
    }
}

}  // namespace TANDEM_SET
