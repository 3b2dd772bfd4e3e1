// What crosses the border to Python, field by field as kernels/cpu/native/structures.py has it.
#pragma once

#include <stdint.h>

extern "C" {

// GGUF's numbers of its formats.
enum Kind : int32_t {
    KIND_F32 = 0,
    KIND_F16 = 1,
    KIND_Q4_0 = 2,
    KIND_Q4_1 = 3,
    KIND_Q5_0 = 6,
    KIND_Q5_1 = 7,
    KIND_Q8_0 = 8,
    KIND_Q4_K = 12,
    KIND_Q5_K = 13,
    KIND_Q6_K = 14,
    KIND_IQ4_NL = 20,
    KIND_BF16 = 30,
    KIND_MXFP4 = 39,
};

// A packed matrix [n, k]: strips of 16 rows, see formats.h. `bias` [n] or null.
struct Matrix {
    int32_t kind;
    int32_t n;
    int32_t k;
    int32_t reserved;
    const uint8_t* codes;
    const uint8_t* scales;
    const float* bias;
};

// One layer. Gains are null where there is no norm. `window`: the newest tokens that are seen, 0 for all.
struct Layer {
    Matrix q, k, v, output, gate, up, down;
    const float* attention_gain;
    const float* mlp_gain;
    const float* q_gain;
    const float* k_gain;
    void* keys;    // pages [num_blocks, kv_heads, block_size, head_dim]
    void* values;  // the same
    int32_t window;
    int32_t reserved;
};

struct Model {
    int32_t hidden_size, num_heads, num_kv_heads, head_dim, inner_size, num_layers, block_size;
    int32_t is_kv_float32;  // else bfloat16
    int32_t embedding_kind;
    float norm_eps;
    int64_t embedding_row_nbytes;
    const uint8_t* embedding;  // rows as the file has them
    const float* rope;         // [positions, head_dim]: cosine and sine of each pair of neighbours
    const Layer* layers;
    const float* final_gain;
    Matrix head;
    // Of a draft head, whose first layer takes embedding and feature side by side: q, k and v of that have twice the
    // columns. `adds_normed`: what the layer adds to is the normalised feature.
    const float* feature_gain;
    int32_t adds_normed, reserved;
};

// M rows, the tokens of one sequence side by side in order. `wanted`: rows that go past the last attention, ascending.
// What may be null: `aux_layers`, whose inputs are told; `features` of a draft head's rows; `seen_from`, the first
// positions that are seen; `ends`.
struct Batch {
    int32_t num_rows, num_wanted, table_stride, num_aux;
    const int32_t* tokens;     // [M]
    const int32_t* positions;  // [M]
    const int32_t* sequences;  // [M] rows of tables
    const int32_t* tables;     // [sequences, table_stride] blocks
    const int32_t* wanted;     // [num_wanted]
    float* hidden;             // out: [num_wanted, hidden_size], after the final norm
    const int32_t* aux_layers; // [num_aux]
    float* aux;                // out: [M, num_aux, hidden_size]
    const float* features;     // [M, hidden_size]
    const int32_t* seen_from;  // [sequences]
    float* ends;               // out: [num_wanted, hidden_size], before the final norm
};

}  // extern "C"
