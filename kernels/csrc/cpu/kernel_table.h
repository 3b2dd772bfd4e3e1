// What each instruction set offers.
#pragma once

#include "api.h"

struct KernelTable {
    void (*packed_nbytes)(int32_t kind, int64_t n, int64_t k, int64_t* codes, int64_t* scales);
    void (*pack)(const Matrix* matrix, const uint8_t* rows);
    void (*widen)(int32_t kind, const uint8_t* row, int64_t k, float* out);
    void (*linear)(const Matrix* matrix, const float* x, int64_t num_rows, float* y);
    void (*forward)(const Model* model, const Batch* batch);
};
