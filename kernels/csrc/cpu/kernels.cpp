// All kernels for one instruction set: compiled once for each, with TANDEM_SET and TANDEM_<SET> defined.
#include "kernel_table.h"
#include "step.h"

namespace TANDEM_SET {

extern const KernelTable table;
const KernelTable table = {
    [](int32_t kind, int64_t n, int64_t k, int64_t* codes, int64_t* scales) { packed_nbytes(kind, n, k, codes, scales); },
    [](const Matrix* matrix, const uint8_t* rows) { pack_matrix(*matrix, rows); },
    [](int32_t kind, const uint8_t* row, int64_t k, float* out) { widen_row(kind, row, k, out); },
    [](const Matrix* matrix, const float* x, int64_t num_rows, float* y) { linear(*matrix, x, num_rows, y); },
    [](const Model* model, const Batch* batch) { forward(*model, *batch); },
};

}  // namespace TANDEM_SET
