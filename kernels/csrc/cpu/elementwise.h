// What lies between the products: norms, rotations, the append to the cache, the gate of the MLP.
#pragma once

#include "attention.h"
#include "simd.h"

namespace TANDEM_SET {

// RMSNorm of `width` floats, a multiple of 16.
INLINE void normalise(const float* x, const float* gain, int64_t width, float eps, float* out) {
    Floats squares = zeros();
    for (int64_t i = 0; i < width; i += W) squares = mul_add(load(x + i), load(x + i), squares);
    const Floats by = all(1.0f / sqrtf(sum(squares) / float(width) + eps));
    for (int64_t i = 0; i < width; i += W) {
        const Floats v = mul(load(x + i), by);
        store(out + i, gain ? mul(v, load(gain + i)) : v);
    }
}

// Turns pairs of neighbours by the cosines and sines beside each other in `turns` [head_dim].
INLINE void rotate(float* head, const float* turns, int dim, float scale) {
    for (int i = 0; i < dim; i += 2) {
        const float a = head[i] * scale, b = head[i + 1] * scale;
        head[i] = a * turns[i] - b * turns[i + 1];
        head[i + 1] = a * turns[i + 1] + b * turns[i];
    }
}

// Writes heads [kv_heads, head_dim] of one token to its place in the pages.
INLINE void append(const float* heads, void* pages, const AttentionShape& s, int32_t block, int32_t offset) {
    for (int h = 0; h < s.num_kv_heads; h++) {
        const int64_t at = (int64_t(block) * s.num_kv_heads + h) * s.page() + int64_t(offset) * s.head_dim;
        const float* head = heads + h * s.head_dim;
        if (s.is_float32)
            memcpy((float*)pages + at, head, s.head_dim * sizeof(float));
        else
            for (int d = 0; d < s.head_dim; d += W) to_bf16((uint16_t*)pages + at + d, load(head + d));
    }
}

// ups [width] *= gates * sigmoid(gates)
INLINE void gate(const float* gates, float* ups, int64_t width) {
    for (int64_t i = 0; i < width; i += W) {
        const Floats g = load(gates + i);
        const Floats s = div(g, add(all(1.0f), exp(sub(zeros(), g))));
        store(ups + i, mul(s, load(ups + i)));
    }
}

}  // namespace TANDEM_SET
