// Attention of rows over the pages of their sequences.
//
// A tile is some rows of one sequence at consecutive positions, with all heads that share a KV head. It goes through
// the context 32 tokens at a time, from the start of the sequence (or of the window) on, with a running maximum (Milakov
// and Gimelshein 2018). Each row's sums are in the order of the tokens, whatever rows stand beside it in the tile.
// tile_attention.h has the same for CPUs with AMX.
#pragma once

#include "api.h"
#include "simd.h"

namespace TANDEM_SET {

constexpr int CONTEXT = 32;     // tokens at a time
constexpr int TILE_ROWS = 16;   // tokens of a tile
constexpr float HIDDEN = -1e30f;

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim, block_size, is_float32, window;
    int group() const { return num_heads / num_kv_heads; }
    int64_t page() const { return int64_t(block_size) * head_dim; }
};

struct Tile {
    int32_t row, count, position, sequence;
};

// Floats of scratch that a thread needs for a tile of tokens.
INLINE int64_t attention_scratch(const AttentionShape& s) {
    const int64_t rows = int64_t(TILE_ROWS) * s.group();
    return 2 * CONTEXT * s.head_dim + 2 * rows * (CONTEXT + s.head_dim + 1);
}

// The first position that a row sees.
INLINE int64_t oldest_seen(const AttentionShape& s, int64_t first_seen, int64_t position) {
    const int64_t in_window = s.window && position >= s.window ? position - s.window + 1 : 0;
    return in_window > first_seen ? in_window : first_seen;
}

// What a row sees of the 32 tokens from `first` on.
struct Span {
    int from, to;
};
INLINE Span seen_of(const AttentionShape& s, int64_t first_seen, int64_t position, int64_t first) {
    const int64_t from = oldest_seen(s, first_seen, position) - first, to = position - first + 1;
    return {int(from < 0 ? 0 : from < CONTEXT ? from : CONTEXT), int(to < CONTEXT ? to : CONTEXT)};
}

// The addresses of 32 tokens' keys or values of a KV head; past the last token that of the last.
INLINE void token_rows(const void* pages, const AttentionShape& s, const int32_t* table, int kv_head, int64_t first, int64_t last, const void** rows) {
    const int size = s.is_float32 ? 4 : 2;
    for (int i = 0; i < CONTEXT; i++) {
        const int64_t token = first + i < last ? first + i : last;
        const int64_t page = int64_t(table[token / s.block_size]) * s.num_kv_heads + kv_head;
        rows[i] = (const char*)pages + (page * s.page() + token % s.block_size * s.head_dim) * size;
    }
}

// Keys of 32 tokens, transposed: [head_dim, 32].
INLINE void load_keys(const void* const* rows, const AttentionShape& s, float* keys) {
    if (s.is_float32) {
        for (int t = 0; t < CONTEXT; t += W)
            for (int d = 0; d < s.head_dim; d += W) transpose(rows + t, 4 * d, (uint32_t*)keys + d * CONTEXT + t, CONTEXT);
        return;
    }
    uint32_t pairs[W * W];  // two neighbours of a head in each word
    for (int t = 0; t < CONTEXT; t += W)
        for (int d = 0; d < s.head_dim; d += 2 * W) {
            transpose(rows + t, 2 * d, pairs, W);
            for (int i = 0; i < W; i++) {
                const Ints both = load_ints(pairs + W * i);
                store(keys + (d + 2 * i) * CONTEXT + t, as_floats(left<16>(both)));
                store(keys + (d + 2 * i + 1) * CONTEXT + t, as_floats(high_half(both)));
            }
        }
}

INLINE void load_values(const void* const* rows, const AttentionShape& s, float* values) {
    for (int t = 0; t < CONTEXT; t++)
        for (int d = 0; d < s.head_dim; d += W) {
            const char* at = (const char*)rows[t] + d * (s.is_float32 ? 4 : 2);
            store(values + t * s.head_dim + d, s.is_float32 ? load((const float*)at) : from_bf16(at));
        }
}

// scores [COUNT, 32] of queries that lie head_dim apart.
template <int COUNT>
INLINE void score(const float* q, const float* keys, int head_dim, float* scores) {
    constexpr int PARTS = CONTEXT / W;
    Floats sums[COUNT][PARTS];
    UNROLL for (int r = 0; r < COUNT; r++)
        UNROLL for (int p = 0; p < PARTS; p++) sums[r][p] = zeros();
    for (int d = 0; d < head_dim; d++, keys += CONTEXT) {
        UNROLL for (int p = 0; p < PARTS; p++) {
            const Floats k = load(keys + W * p);
            UNROLL for (int r = 0; r < COUNT; r++) sums[r][p] = mul_add(all(q[r * head_dim + d]), k, sums[r][p]);
        }
    }
    UNROLL for (int r = 0; r < COUNT; r++)
        UNROLL for (int p = 0; p < PARTS; p++) store(scores + r * CONTEXT + W * p, sums[r][p]);
}

// Scores to weights; what was summed before is scaled down to the new maximum.
INLINE void weigh(float* scores, int seen_from, int seen_to, float* peak, float* total, float* out, int head_dim) {
    for (int t = 0; t < seen_from; t++) scores[t] = -INFINITY;
    for (int t = seen_to; t < CONTEXT; t++) scores[t] = -INFINITY;
    Floats top = all(*peak);
    UNROLL for (int i = 0; i < CONTEXT / W; i++) top = max(top, load(scores + W * i));
    const float now = greatest(top);
    Floats sums = zeros();
    UNROLL for (int i = 0; i < CONTEXT / W; i++) {
        const Floats weights = exp(sub(load(scores + W * i), all(now)));
        store(scores + W * i, weights);
        sums = add(sums, weights);
    }
    if (now == *peak) {
        *total += sum(sums);
        return;
    }
    float factors[W];
    store(factors, exp(all(*peak - now)));
    *total = *total * factors[0] + sum(sums);
    for (int d = 0; d < head_dim; d += W) store(out + d, mul(load(out + d), all(factors[0])));
    *peak = now;
}

// out [COUNT, head_dim] += weights [COUNT, 32] * values [32, head_dim]
template <int COUNT>
INLINE void add_values(const float* weights, const float* values, int head_dim, float* out) {
    for (int d = 0; d < head_dim; d += 2 * W) {
        Floats sums[COUNT][2];
        UNROLL for (int r = 0; r < COUNT; r++)
            UNROLL for (int p = 0; p < 2; p++) sums[r][p] = load(out + r * head_dim + d + W * p);
        for (int t = 0; t < CONTEXT; t++) {
            const Floats v[2] = {load(values + t * head_dim + d), load(values + t * head_dim + d + W)};
            UNROLL for (int r = 0; r < COUNT; r++)
                UNROLL for (int p = 0; p < 2; p++) sums[r][p] = mul_add(all(weights[r * CONTEXT + t]), v[p], sums[r][p]);
        }
        UNROLL for (int r = 0; r < COUNT; r++)
            UNROLL for (int p = 0; p < 2; p++) store(out + r * head_dim + d + W * p, sums[r][p]);
    }
}

// Calls `each` for rows first to last, ROWS at a time, then for those that are left.
template <class Each>
INLINE void some_rows(int first, int last, Each&& each) {
    for (; first + ROWS <= last; first += ROWS) each(Index<ROWS>{}, first);
    repeat<ROWS>([&](auto count) {
        if (count.value > 0 && last - first == count.value) each(Index<count.value ? count.value : 1>{}, first);
    });
}

// Attention of a tile with one KV head, over positions from `first_seen` on. q [M, num_heads, head_dim], scaled,
// `q_stride` apart; the same for out.
inline void attend_tile(const float* q, int64_t q_stride, const void* keys, const void* values, const AttentionShape& s, const int32_t* table, int64_t first_seen, const Tile& tile, int kv_head, float* scratch, float* out) {
    const int dim = s.head_dim, group = s.group(), rows = tile.count * group;
    float* keys_T = scratch;
    float* values_f = keys_T + CONTEXT * dim;
    float* queries = values_f + CONTEXT * dim;
    float* scores = queries + rows * dim;
    float* sums = scores + rows * CONTEXT;
    float* peaks = sums + rows * dim;
    float* totals = peaks + rows;
    const int64_t row_width = int64_t(s.num_heads) * dim, at_head = int64_t(kv_head) * group * dim;
    for (int i = 0; i < tile.count; i++)
        memcpy(queries + i * group * dim, q + (tile.row + i) * q_stride + at_head, group * dim * sizeof(float));
    for (int r = 0; r < rows; r++) peaks[r] = HIDDEN, totals[r] = 0.0f;
    for (int i = 0; i < rows * dim; i++) sums[i] = 0.0f;
    const int64_t last = tile.position + tile.count - 1, oldest = oldest_seen(s, first_seen, tile.position);
    for (int64_t first = oldest / CONTEXT * CONTEXT; first <= last; first += CONTEXT) {
        const void* tokens[CONTEXT];
        token_rows(keys, s, table, kv_head, first, last, tokens);
        load_keys(tokens, s, keys_T);
        token_rows(values, s, table, kv_head, first, last, tokens);
        load_values(tokens, s, values_f);
        const int begin = first > tile.position ? int(first - tile.position) * group : 0;  // of rows that see any of it
        some_rows(begin, rows, [&](auto count, int r) {
            score<decltype(count)::value>(queries + r * dim, keys_T, dim, scores + r * CONTEXT);
        });
        for (int r = begin; r < rows; r++) {
            const Span seen = seen_of(s, first_seen, tile.position + r / group, first);
            weigh(scores + r * CONTEXT, seen.from, seen.to, peaks + r, totals + r, sums + r * dim, dim);
        }
        some_rows(begin, rows, [&](auto count, int r) {
            add_values<decltype(count)::value>(scores + r * CONTEXT, values_f, dim, sums + r * dim);
        });
    }
    for (int i = 0; i < tile.count; i++)
        for (int r = 0; r < group; r++) {
            const float share = 1.0f / totals[i * group + r];
            float* to = out + (tile.row + i) * row_width + at_head + r * dim;
            for (int d = 0; d < dim; d++) to[d] = sums[(i * group + r) * dim + d] * share;
        }
}

}  // namespace TANDEM_SET
