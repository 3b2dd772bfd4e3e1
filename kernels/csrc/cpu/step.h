// A step of a decoder: from tokens to the hidden rows whose logits are wanted, and from these to logits.
#pragma once

#include "elementwise.h"
#include "pool.h"
#include "scratch.h"
#include "strips.h"
#if defined(TANDEM_TILES)
#include "tile_attention.h"
#endif

namespace TANDEM_SET {

using tandem::parallel;
using tandem::scratch;
using tandem::Slot;

// A matrix and where its product goes; `gate`, if there is one, is another, whose product gates that of the first.
struct Target {
    const Matrix* matrix;
    float* y;
    int64_t stride;
    bool adds;
    const Matrix* gate = nullptr;
};

// Calls `body` for each row, in the caller alone where there are few.
template <class Body>
INLINE void each_row(int64_t num_rows, Body&& body) {
    const int64_t run = num_rows < 4 ? num_rows : num_rows < 64 ? 2 : 16;
    if (num_rows == 0) return;
    parallel((num_rows + run - 1) / run, [&](int64_t piece, int) {
        const int64_t last = (piece + 1) * run < num_rows ? (piece + 1) * run : num_rows;
        for (int64_t row = piece * run; row < last; row++) body(row);
    });
}

constexpr int64_t FEW_ROWS = 32, MOST_STRIPS = 16;

INLINE bool is_plain(const Matrix& w) { return element_nbytes(w.kind) != 0; }

// Rows as the products of `targets` take them; `x` [M, k] stays where it is.
inline Rows as_rows(const float* x, int64_t num_rows, int64_t k, const Target* targets, int count) {
    bool wants_codes = false;
    for (int i = 0; i < count; i++) {
        wants_codes |= !is_plain(*targets[i].matrix);
        if (targets[i].gate) wants_codes |= !is_plain(*targets[i].gate);
    }
    if (!wants_codes) return Rows{.floats = x, .k = k};
    const int64_t num_groups = k / 32, each = rests_of(k), blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t tiles = takes_tiles(num_rows) ? (num_rows + TILE - 1) / TILE : 0;
    int8_t* codes = scratch<int8_t>(Slot::CODES, num_rows * k);
    Group* groups = scratch<Group>(Slot::GROUPS, num_rows * num_groups);
    int32_t* numbers = scratch<int32_t>(Slot::NUMBERS, num_rows * each);
    Rest* rests = scratch<Rest>(Slot::RESTS, num_rows * each + (tiles ? TILE : 0));  // a tile reads 16
    int32_t* starts = scratch<int32_t>(Slot::STARTS, blocks * (num_groups + 2));
    TileGroup* tile_groups = tiles ? scratch<TileGroup>(Slot::TILE_GROUPS, tiles * num_groups) : nullptr;
    Run* runs = tiles ? scratch<Run>(Slot::RUNS, blocks * most_runs(k)) : nullptr;
    int32_t* num_runs = tiles ? scratch<int32_t>(Slot::NUM_RUNS, blocks) : nullptr;
    each_row(num_rows, [&](int64_t i) {
        round_row(x + i * k, k, codes + i * k, groups + i * num_groups, numbers + i * each);
    });
    parallel(blocks, [&](int64_t block, int) {
        const int64_t first = ROW_BLOCK * block, rows = num_rows - first < ROW_BLOCK ? num_rows - first : ROW_BLOCK;
        int32_t* own = starts + block * (num_groups + 2);
        round_rests(x + first * k, rows, k, codes + first * k, groups + first * num_groups, numbers + first * each, rests + first * each, own);
        if (!tiles) return;
        group_by_tiles(codes + first * k, groups + first * num_groups, rows, num_groups, tile_groups + first / TILE * num_groups);
        num_runs[block] = cut_runs(own, num_groups, runs + block * most_runs(k));
    });
    return Rows{codes, groups, rests, starts, tile_groups, runs, num_runs, x, k};
}

inline void multiply_target(const Target& target, int64_t strip, const Rows& rows, int64_t row0, int64_t row1, uint8_t* room) {
    alignas(64) float result[ROW_BLOCK * 16];
    const float* y = target.y + 16 * strip;
    multiply_strip(*target.matrix, strip, rows, row0, row1, room, result, y, target.stride);
    if (target.gate) {
        alignas(64) float gates[ROW_BLOCK * 16];
        multiply_strip(*target.gate, strip, rows, row0, row1, room, gates, nullptr, 0);
        gate(gates, result, 16 * (row1 - row0));
    }
    write_strip(result, strip, target.matrix->n, row0, row1, target.y, target.stride, target.adds);
}

// All products of the same rows, shared out by strips and blocks of rows.
inline void multiply_all(const float* x, int64_t num_rows, int64_t k, const Target* targets, int count) {
    if (num_rows == 0) return;
    const Rows rows = as_rows(x, num_rows, k, targets, count);
    int64_t num_strips = 0;
    for (int i = 0; i < count; i++) num_strips += (targets[i].matrix->n + 15) / 16;
    const int64_t block = num_rows <= FEW_ROWS ? num_rows : ROW_BLOCK, blocks = (num_rows + block - 1) / block;
    int64_t run = num_strips * blocks / (tandem::num_threads() * 8);
    run = run < 1 ? 1 : run > MOST_STRIPS && blocks > 1 ? MOST_STRIPS : run;
    const int64_t runs = (num_strips + run - 1) / run, room = room_nbytes(k);
    uint8_t* rooms = scratch<uint8_t>(Slot::STRIPS, room * tandem::num_threads());
    parallel(runs * blocks, [&](int64_t piece, int thread) {
        const int64_t row0 = piece / runs * block, row1 = row0 + block < num_rows ? row0 + block : num_rows;
        int64_t first = piece % runs * run, left = run;
        for (int i = 0; i < count && left > 0; i++) {
            const Target& target = targets[i];
            const int64_t own = (target.matrix->n + 15) / 16;
            for (; first < own && left > 0; first++, left--)
                multiply_target(target, first, rows, row0, row1, rooms + thread * room);
            first -= own;
        }
    });
}

INLINE AttentionShape shape_of(const Model& m, const Layer& layer) {
    return {m.num_heads, m.num_kv_heads, m.head_dim, m.block_size, m.is_kv_float32, layer.window};
}

// Cuts rows into tiles: of one sequence, at consecutive positions, between multiples of TILE_ROWS.
inline int64_t cut_tiles(const int32_t* positions, const int32_t* sequences, int64_t num_rows, Tile* tiles) {
    int64_t count = 0;
    for (int32_t i = 0; i < num_rows; i++) {
        Tile* last = count ? &tiles[count - 1] : nullptr;
        const bool follows = last && last->sequence == sequences[i] && last->position + last->count == positions[i];
        if (follows && positions[i] % TILE_ROWS)
            last->count++;
        else
            tiles[count++] = Tile{i, 1, positions[i], sequences[i]};
    }
    return count;
}

// What attends to pages of a kind.
INLINE auto attention_of(const AttentionShape& s) {
#if defined(TANDEM_TILES)
    if (!s.is_float32) return attend_tile_bf16;
#endif
    return attend_tile;
}

// q [M, heads, head_dim], scaled, `q_stride` apart; out [M, heads * head_dim].
inline void attend(const float* q, int64_t q_stride, const void* keys, const void* values, const AttentionShape& s, const Batch& batch, const int32_t* positions, const int32_t* sequences, int64_t num_rows, float* out) {
    Tile* tiles = scratch<Tile>(Slot::TILES, num_rows);
    const int64_t count = cut_tiles(positions, sequences, num_rows, tiles);
    const int64_t each = attention_scratch(s);
    float* room = scratch<float>(Slot::ATTENTION, each * tandem::num_threads());
    // The last tiles of a prompt see most: first, so that no thread is left alone with one.
    parallel(count * s.num_kv_heads, [&](int64_t piece, int thread) {
        const Tile& tile = tiles[count - 1 - piece / s.num_kv_heads];
        const int kv_head = int(piece % s.num_kv_heads);
        const int32_t* table = batch.tables + int64_t(tile.sequence) * batch.table_stride;
        const int64_t first_seen = batch.seen_from ? batch.seen_from[tile.sequence] : 0;
        attention_of(s)(q, q_stride, keys, values, s, table, first_seen, tile, kv_head, room + thread * each, out);
    });
}

inline void widen_row(int32_t kind, const uint8_t* row, int64_t k, float* out) {
    if (with_format(kind, [&](auto format) { widen<decltype(format)>(row, k, out); })) return;
    for (int64_t i = 0; i < k; i += W) {
        if (kind == KIND_F32) store(out + i, load((const float*)row + i));
        if (kind == KIND_F16) store(out + i, from_half(row + 2 * i));
        if (kind == KIND_BF16) store(out + i, from_bf16(row + 2 * i));
    }
}

// Biases, head norms, rotation and scale of a row's q and k; k and v go to the pages.
inline void finish_qkv(const Model& m, const Layer& layer, const Batch& batch, int64_t row, float* qkv) {
    const int dim = m.head_dim, position = batch.positions[row];
    const AttentionShape s = shape_of(m, layer);
    float* k = qkv + int64_t(m.num_heads) * dim;
    float* v = k + int64_t(m.num_kv_heads) * dim;
    const float* turns = m.rope + int64_t(position) * dim;
    for (int h = 0; h < m.num_heads; h++) {
        float* head = qkv + h * dim;
        if (layer.q_gain) normalise(head, layer.q_gain, dim, m.norm_eps, head);
        rotate(head, turns, dim, 1.0f / sqrtf(float(dim)));
    }
    for (int h = 0; h < m.num_kv_heads; h++) {
        float* head = k + h * dim;
        if (layer.k_gain) normalise(head, layer.k_gain, dim, m.norm_eps, head);
        rotate(head, turns, dim, 1.0f);
    }
    const int32_t* table = batch.tables + int64_t(batch.sequences[row]) * batch.table_stride;
    const int32_t block = table[position / m.block_size], offset = position % m.block_size;
    append(k, layer.keys, s, block, offset);
    append(v, layer.values, s, block, offset);
}

// x += MLP of the norm of x, [M, hidden].
inline void gated_mlp(const Model& m, const Layer& layer, float* x, int64_t num_rows) {
    const int64_t hidden = m.hidden_size, inner = m.inner_size;
    float* normed = scratch<float>(Slot::NORMED, num_rows * hidden);
    float* gated = scratch<float>(Slot::GATED, num_rows * inner);
    each_row(num_rows, [&](int64_t i) {
        normalise(x + i * hidden, layer.mlp_gain, hidden, m.norm_eps, normed + i * hidden);
    });
    const Target wide{&layer.up, gated, inner, false, &layer.gate};
    multiply_all(normed, num_rows, hidden, &wide, 1);
    const Target down{&layer.down, x, hidden, true};
    multiply_all(gated, num_rows, inner, &down, 1);
}

// What goes into a layer, for who reads it.
inline void tell_aux(const Batch& batch, int layer, const float* x, int64_t hidden) {
    for (int64_t a = 0; a < batch.num_aux; a++) {
        if (batch.aux_layers[a] != layer) continue;
        float* out = batch.aux + a * hidden;
        for (int64_t i = 0; i < batch.num_rows; i++)
            memcpy(out + i * batch.num_aux * hidden, x + i * hidden, hidden * sizeof(float));
    }
}

// The first layer of a draft head takes the norms of embedding and feature side by side: out [2 * hidden].
inline void join_feature(const Model& m, const float* embedding_gain, int32_t token, float* x, float* out) {
    const int64_t hidden = m.hidden_size;
    widen_row(m.embedding_kind, m.embedding + token * m.embedding_row_nbytes, hidden, out);
    normalise(out, embedding_gain, hidden, m.norm_eps, out);
    normalise(x, m.feature_gain, hidden, m.norm_eps, out + hidden);
    if (m.adds_normed) memcpy(x, out + hidden, hidden * sizeof(float));
}

// All layers for some rows of a batch, which see only what is in the pages or among themselves.
inline void forward_rows(const Model& m, const Batch& batch) {
    const int64_t hidden = m.hidden_size, dim = m.head_dim, num_rows = batch.num_rows;
    const int64_t q_width = m.num_heads * dim, kv_width = m.num_kv_heads * dim, width = q_width + 2 * kv_width;
    float* x = scratch<float>(Slot::HIDDEN, num_rows * hidden);
    float* qkv = scratch<float>(Slot::QKV, num_rows * width);
    float* mixed = scratch<float>(Slot::MIXED, num_rows * q_width);
    each_row(num_rows, [&](int64_t i) {
        if (batch.features)
            memcpy(x + i * hidden, batch.features + i * hidden, hidden * sizeof(float));
        else
            widen_row(m.embedding_kind, m.embedding + batch.tokens[i] * m.embedding_row_nbytes, hidden, x + i * hidden);
    });
    const int32_t *positions = batch.positions, *sequences = batch.sequences;
    int64_t kept = num_rows;
    for (int l = 0; l < m.num_layers; l++) {
        const Layer& layer = m.layers[l];
        tell_aux(batch, l, x, hidden);
        const bool joins = batch.features && l == 0;
        const int64_t columns = joins ? 2 * hidden : hidden;
        float* normed = scratch<float>(Slot::NORMED, num_rows * columns);
        each_row(num_rows, [&](int64_t i) {
            if (joins)
                join_feature(m, layer.attention_gain, batch.tokens[i], x + i * hidden, normed + i * columns);
            else
                normalise(x + i * hidden, layer.attention_gain, hidden, m.norm_eps, normed + i * hidden);
        });
        const Target parts[3] = {
            {&layer.q, qkv, width, false},
            {&layer.k, qkv + q_width, width, false},
            {&layer.v, qkv + q_width + kv_width, width, false},
        };
        multiply_all(normed, num_rows, columns, parts, 3);
        each_row(num_rows, [&](int64_t i) { finish_qkv(m, layer, batch, i, qkv + i * width); });
        if (l + 1 == m.num_layers && batch.num_wanted < num_rows) {
            // Nobody reads what the last layer makes of the other rows, once their K and V are written.
            kept = batch.num_wanted;
            int32_t* left = scratch<int32_t>(Slot::LEFT, 2 * num_rows);
            for (int64_t i = 0; i < kept; i++) {
                const int64_t row = batch.wanted[i];
                memmove(x + i * hidden, x + row * hidden, hidden * sizeof(float));
                memmove(qkv + i * width, qkv + row * width, width * sizeof(float));
                left[i] = positions[row], left[num_rows + i] = sequences[row];
            }
            positions = left, sequences = left + num_rows;
        }
        attend(qkv, width, layer.keys, layer.values, shape_of(m, layer), batch, positions, sequences, kept, mixed);
        const Target output{&layer.output, x, hidden, true};
        multiply_all(mixed, kept, q_width, &output, 1);
        gated_mlp(m, layer, x, kept);
    }
    for (int64_t i = 0; i < kept; i++)
        normalise(x + i * hidden, m.final_gain, hidden, m.norm_eps, batch.hidden + i * hidden);
    if (batch.ends) memcpy(batch.ends, x, kept * hidden * sizeof(float));
}

// How many rows go through the layers at a time: as many as the second-level caches hold, but enough for their weights
// to be worth reading.
INLINE int64_t rows_at_once(const Model& m) {
    const int64_t width = 2 * m.hidden_size + (m.num_heads + 2 * m.num_kv_heads) * m.head_dim + m.inner_size;
    const int64_t held = tandem::num_threads() * (int64_t(1) << 20) / (4 * width) / ROW_BLOCK * ROW_BLOCK;
    return held < 256 ? 256 : held;
}

// Rows `first` to `last` of a batch, of whose wanted rows `told` are those of rows before. `wanted`: room for as many.
INLINE Batch some_of(const Batch& batch, int64_t hidden, int64_t first, int64_t last, int64_t told, int32_t* wanted) {
    Batch some = batch;
    some.num_rows = int32_t(last - first), some.num_wanted = 0, some.wanted = wanted;
    for (int64_t i = told; i < batch.num_wanted && batch.wanted[i] < last; i++)
        wanted[some.num_wanted++] = int32_t(batch.wanted[i] - first);
    some.tokens += first, some.positions += first, some.sequences += first, some.hidden += told * hidden;
    if (some.aux) some.aux += first * batch.num_aux * hidden;
    if (some.features) some.features += first * hidden;
    if (some.ends) some.ends += told * hidden;
    return some;
}

inline void forward(const Model& m, const Batch& batch) {
    const tandem::Turn mine;
    const int64_t run = rows_at_once(m);
    int32_t* wanted = scratch<int32_t>(Slot::WANTED, run);
    for (int64_t first = 0, told = 0; first < batch.num_rows; first += run) {
        const int64_t last = first + run < batch.num_rows ? first + run : batch.num_rows;
        const Batch some = some_of(batch, m.hidden_size, first, last, told, wanted);
        forward_rows(m, some);
        told += some.num_wanted;
    }
}

// x [M, k] -> y [M, n]
inline void linear(const Matrix& matrix, const float* x, int64_t num_rows, float* y) {
    const tandem::Turn mine;
    const Target target{&matrix, y, matrix.n, false};
    multiply_all(x, num_rows, matrix.k, &target, 1);
}

inline void pack_matrix(const Matrix& matrix, const uint8_t* rows) {
    const tandem::Turn mine;
    const int64_t n = matrix.n, k = matrix.k, strips = (n + 15) / 16;
    uint8_t *codes = (uint8_t*)matrix.codes, *scales = (uint8_t*)matrix.scales;
    constexpr int64_t RUN = 8;
    parallel((strips + RUN - 1) / RUN, [&](int64_t piece, int) {
        const int64_t first = RUN * piece, last = first + RUN < strips ? first + RUN : strips;
        const bool has_groups = with_format(matrix.kind, [&](auto format) {
            pack<decltype(format)>(rows, n, k, first, last, codes, scales);
        });
        if (has_groups) return;
        if (element_nbytes(matrix.kind) == 4)
            pack_plain<4>(rows, n, k, first, last, codes);
        else
            pack_plain<2>(rows, n, k, first, last, codes);
    });
}

inline void packed_nbytes(int32_t kind, int64_t n, int64_t k, int64_t* codes, int64_t* scales) {
    const int64_t strips = (n + 15) / 16;
    *codes = strips * k * 16 * element_nbytes(kind);
    *scales = 0;
    with_format(kind, [&](auto format) {
        using F = decltype(format);
        *codes = strips * (k / 32) * F::GROUP_NBYTES;
        *scales = strips * (k / F::BLOCK) * F::SCALE_NBYTES;
    });
}

}  // namespace TANDEM_SET
