// What the library exports, and the choice of the instruction set.
#include <stdio.h>
#include <stdlib.h>

#include "kernel_table.h"
#include "board.h"
#include "pool.h"
#include "scratch.h"
#include "tile_probe.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace plain {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace amx {
extern const KernelTable table;
}
#endif

namespace tandem {

void* scratch_bytes(Slot slot, size_t nbytes) {
    static struct {
        void* start;
        size_t nbytes;
    } slots[int(Slot::COUNT)];
    auto& own = slots[int(slot)];
    if (own.nbytes < nbytes) {
        free(own.start);
        own.nbytes = (nbytes + nbytes / 4 + 4095) & ~size_t(4095);
        own.start = aligned_alloc(64, own.nbytes);
        if (!own.start) {
            fprintf(stderr, "tandem: no memory for %zu bytes of a step\n", own.nbytes);
            abort();
        }
    }
    return own.start;
}

namespace {

enum Level { PLAIN, AVX2, AVX512, AMX };

// Read by CPUID, and by XGETBV whether the system keeps the registers: __builtin_cpu_supports knows nothing where the
// library is linked by another than gcc.
int detect() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return PLAIN;
    const bool has_fma = c >> 12 & 1, has_xsave = c >> 27 & 1, has_half = c >> 29 & 1;
    if (!has_fma || !has_xsave || !has_half) return PLAIN;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PLAIN;
    const bool has_avx2 = (low & 6) == 6 && (b >> 5 & 1);
    if (!has_avx2) return PLAIN;
    const bool has_avx512 = (low & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);
    if (!has_avx512 || !(c >> 11 & 1)) return AVX2;
#if defined(TANDEM_NO_TILES)  // the compiler knows no AMX
    return AVX512;
#else
    const bool has_amx = (low & 0x60000) == 0x60000 && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
    return has_amx && amx::has_tiles() ? AMX : AVX512;
#endif
#else
    return PLAIN;
#endif
}

const int best = detect();
int level = best;

const KernelTable& kernels() {
#if defined(__x86_64__)
#if !defined(TANDEM_NO_TILES)
    if (level == AMX) return amx::table;
#endif
    if (level == AVX512) return avx512::table;
    if (level == AVX2) return avx2::table;
#endif
    return plain::table;
}

}  // namespace
}  // namespace tandem

using tandem::kernels;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// 0 plain, 1 AVX2, 2 AVX-512 with VNNI, 3 these and AMX: the best that the CPU has.
EXPORT int tandem_best_level() { return tandem::best; }

// Takes a lower one; what the CPU lacks is never taken. Returns the one that is.
EXPORT int tandem_set_level(int level) {
    return tandem::level = level < 0 ? 0 : level < tandem::best ? level : tandem::best;
}

EXPORT void tandem_set_threads(int count) { tandem::set_threads(count); }

// `board`: a page that processes share, zeros at first; `seat`: this process's own on it, below 63.
EXPORT void tandem_join_board(void* board, int seat, int num_cores) {
    tandem::join_board((tandem::Board*)board, seat, num_cores);
}

EXPORT void tandem_packed_nbytes(int32_t kind, int64_t n, int64_t k, int64_t* codes, int64_t* scales) {
    kernels().packed_nbytes(kind, n, k, codes, scales);
}

EXPORT void tandem_pack(const Matrix* matrix, const uint8_t* rows) { kernels().pack(matrix, rows); }

EXPORT void tandem_widen(int32_t kind, const uint8_t* row, int64_t k, float* out) { kernels().widen(kind, row, k, out); }

EXPORT void tandem_linear(const Matrix* matrix, const float* x, int64_t num_rows, float* y) {
    kernels().linear(matrix, x, num_rows, y);
}

EXPORT void tandem_forward(const Model* model, const Batch* batch) { kernels().forward(model, batch); }

}  // extern "C"
