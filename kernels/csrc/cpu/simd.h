// The vectors that all kernels are written in: W floats or W 32-bit integers, and 4 * W bytes.
//
// This file and tiles.h are the only ones with instructions. Each instruction set is compiled by itself, from the same kernels, into a
// namespace of its own (TANDEM_SET), so that no function of one is ever taken for that of another. No exceptions, no
// run-time types and no C++ library: what is built needs libc alone.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(TANDEM_AVX512) || defined(TANDEM_AVX2)
#include <immintrin.h>
#endif

#define INLINE [[gnu::always_inline]] inline
#if defined(TANDEM_AVX512) || defined(TANDEM_AVX2)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL  // the compiler knows best, and is done in a third of the time
#endif

#if defined(TANDEM_AVX512) || defined(TANDEM_AVX2) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
#define TANDEM_HAS_FMA
#endif

namespace TANDEM_SET {

template <int N>
struct Index {
    static constexpr int value = N;
};

// Calls `f` with Index<0> to Index<N - 1>: where an instruction wants its number at compile time.
template <int N, class F>
INLINE void repeat(F&& f) {
    if constexpr (N > 0) {
        repeat<N - 1>(f);
        f(Index<N - 1>{});
    }
}

#if defined(TANDEM_AVX512)

constexpr int W = 16;
constexpr int ROWS = 4;       // of attention at a time: with more, registers run out
constexpr int MOST_ROWS = 8;  // of a product at a time
using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;

INLINE Floats zeros() { return _mm512_setzero_ps(); }
INLINE Floats all(float v) { return _mm512_set1_ps(v); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats abs(Floats a) { return _mm512_abs_ps(a); }
INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a); }
INLINE float greatest(Floats a) { return _mm512_reduce_max_ps(a); }
INLINE Floats zero_below(Floats v, Floats x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_GE_OQ), v);
}

INLINE Ints ints(int32_t v) { return _mm512_set1_epi32(v); }
INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a); }
template <int N>
INLINE Ints left(Ints a) { return _mm512_slli_epi32(a, N); }
INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
INLINE Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
INLINE Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
INLINE Ints as_ints(Floats a) { return _mm512_castps_si512(a); }
INLINE Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
INLINE Ints high_half(Ints a) { return _mm512_and_si512(a, ints(int32_t(0xffff0000u))); }

INLINE Ints from_u8(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE Ints from_i8(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE Ints from_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void to_i8(void* p, Ints v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v)); }
INLINE void to_u16(void* p, Ints v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(v)); }
INLINE Ints right16(Ints a) { return _mm512_srli_epi32(a, 16); }
INLINE Ints lowest(Ints a) { return _mm512_and_si512(a, ints(1)); }
INLINE Floats from_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
INLINE Bytes quad(const int8_t* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}
INLINE Bytes low_bits(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE Bytes high_bits(Bytes v) { return low_bits(_mm512_srli_epi16(v, 4)); }
// Bits `From` to `From + Count - 1` of each byte, moved to bit 4.
template <int From, int Count>
INLINE Bytes bits_at_4(Bytes v) {
    Bytes moved = v;
    if constexpr (From < 4) moved = _mm512_slli_epi16(v, 4 - From);
    if constexpr (From > 4) moved = _mm512_srli_epi16(v, From - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(((1 << Count) - 1) << 4));
}
INLINE Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
INLINE Bytes less(Bytes v, uint8_t by) { return _mm512_sub_epi8(v, _mm512_set1_epi8(int8_t(by))); }
INLINE void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
INLINE Bytes look_up(const uint8_t* table, Bytes codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), codes);
}
// Each lane: the sum of products of codes by signed bytes of -127 to 127, four of a vector. A code is an unsigned byte
// up to `Greatest`, less 2^Zero (nothing if that is 0); `minus`: the negative sum of what they are multiplied by.
// `add` is called for vector 0, 1 and so on.
template <int Greatest, int Zero>
struct Sums {
    Ints total;

    INLINE void begin(int32_t minus) { total = Zero ? left<Zero>(ints(minus)) : ints(0); }
    template <int J>
    INLINE void add(Bytes u, Bytes x) { total = _mm512_dpbusd_epi32(total, u, x); }
};

// Transposes W x W words of 32 bits: `rows[i]` is row i, and column i goes to `out + i * stride`.
INLINE void transpose(const void* const* rows, size_t offset, uint32_t* out, size_t stride) {
    __m512i r[16], t[16];
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512((const char*)rows[i] + offset);
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
        _mm512_storeu_si512(out + (4 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
        _mm512_storeu_si512(out + (8 + i) * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
        _mm512_storeu_si512(out + (12 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
    }
}

#elif defined(TANDEM_AVX2)

constexpr int W = 8;
constexpr int ROWS = 2;
constexpr int MOST_ROWS = 4;
using Floats = __m256;
using Ints = __m256i;
using Bytes = __m256i;

INLINE Floats zeros() { return _mm256_setzero_ps(); }
INLINE Floats all(float v) { return _mm256_set1_ps(v); }
INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats abs(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE float sum(Floats a) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
INLINE float greatest(Floats a) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
INLINE Floats zero_below(Floats v, Floats x, float least) {
    return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_GE_OQ), v);
}

INLINE Ints ints(int32_t v) { return _mm256_set1_epi32(v); }
INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE int32_t sum(Ints a) {
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
template <int N>
INLINE Ints left(Ints a) { return _mm256_slli_epi32(a, N); }
INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
INLINE Ints to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
INLINE Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
INLINE Ints as_ints(Floats a) { return _mm256_castps_si256(a); }
INLINE Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store_ints(void* p, Ints v) { _mm256_storeu_si256((__m256i*)p, v); }
INLINE Ints high_half(Ints a) { return _mm256_and_si256(a, ints(int32_t(0xffff0000u))); }

INLINE Ints from_u8(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE Ints from_i8(const void* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE Ints from_u16(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void to_i8(void* p, Ints v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
INLINE void to_u16(void* p, Ints v) {
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
INLINE Ints right16(Ints a) { return _mm256_srli_epi32(a, 16); }
INLINE Ints lowest(Ints a) { return _mm256_and_si256(a, ints(1)); }
INLINE Floats from_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

INLINE Bytes load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Bytes quad(const int8_t* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}
INLINE Bytes low_bits(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE Bytes high_bits(Bytes v) { return low_bits(_mm256_srli_epi16(v, 4)); }
template <int From, int Count>
INLINE Bytes bits_at_4(Bytes v) {
    Bytes moved = v;
    if constexpr (From < 4) moved = _mm256_slli_epi16(v, 4 - From);
    if constexpr (From > 4) moved = _mm256_srli_epi16(v, From - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(((1 << Count) - 1) << 4));
}
INLINE Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
INLINE Bytes look_up(const uint8_t* table, Bytes codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), codes);
}
// Pairs of products are summed in 16 bits, of as many vectors as can't overflow. Codes of 8 bits are made signed for
// that, and their sign given to the other side.
template <int Greatest, int Zero>
struct Sums {
    static constexpr bool IS_WIDE = Greatest > 127;
    static_assert(!IS_WIDE || Zero == 7);
    static constexpr int MOST = IS_WIDE ? 1 : 32767 / (2 * 127 * Greatest);
    static constexpr int STEP = MOST >= 8 ? 8 : MOST >= 4 ? 4 : MOST;
    Ints total, pairs;

    INLINE void begin(int32_t minus) { total = Zero && !IS_WIDE ? left<Zero>(ints(minus)) : ints(0); }
    template <int J>
    INLINE void add(Bytes u, Bytes x) {
        if constexpr (IS_WIDE) {
            const Bytes signed_u = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
            x = _mm256_sign_epi8(x, signed_u);
            u = _mm256_abs_epi8(signed_u);
        }
        const Ints products = _mm256_maddubs_epi16(u, x);
        pairs = J % STEP == 0 ? products : _mm256_add_epi16(pairs, products);
        // GCC would put sums off and add them as a tree, for which there are no registers.
        if constexpr (STEP > 2) __asm__("" : "+x"(pairs));
        if constexpr (J % STEP == STEP - 1) total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

INLINE void transpose(const void* const* rows, size_t offset, uint32_t* out, size_t stride) {
    __m256i r[8], t[8];
    UNROLL for (int i = 0; i < 8; i++) r[i] = load_ints((const char*)rows[i] + offset);
    UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        store_ints(out + i * stride, _mm256_permute2x128_si256(r[i], r[4 + i], 0x20));
        store_ints(out + (4 + i) * stride, _mm256_permute2x128_si256(r[i], r[4 + i], 0x31));
    }
}

#else  // No instructions that are asked for by name: what the compiler makes of loops over 16 lanes.

constexpr int W = 16;
constexpr int ROWS = 1;
constexpr int MOST_ROWS = 1;
struct Floats {
    float v[W];
};
struct Ints {
    int32_t v[W];
};
struct Bytes {
    uint8_t v[4 * W];
};

#define LANES(type, expression)                   \
    type r;                                       \
    for (int i = 0; i < W; i++) r.v[i] = expression; \
    return r

INLINE float half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 0) {
        const float tiny = float(mantissa) * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// a * b + c with one rounding. Where the compiler has no instruction for that, in double, in which the product is exact
// and the sum is rounded to odd: to float32 it then rounds as the exact sum would (Boldo and Melquiond 2008).
INLINE float fused(float a, float b, float c) {
#if defined(TANDEM_HAS_FMA)
    return __builtin_fmaf(a, b, c);
#else
    const double product = double(a) * double(b);
    double total = product + double(c);
    const double added = total - product, error = (product - (total - added)) + (double(c) - added);  // Knuth's TwoSum
    int64_t bits;
    memcpy(&bits, &total, 8);
    const bool is_inexact = (error > 0) | (error < 0);
    const int64_t step = (error > 0) == (total > 0) ? 1 : -1;
    bits += is_inexact & !(bits & 1) ? step : 0;
    memcpy(&total, &bits, 8);
    return float(total);
#endif
}

INLINE Floats zeros() { LANES(Floats, 0.0f); }
INLINE Floats all(float a) { LANES(Floats, a); }
INLINE Floats load(const float* p) { LANES(Floats, p[i]); }
INLINE void store(float* p, Floats a) { memcpy(p, a.v, sizeof a.v); }
INLINE Floats add(Floats a, Floats b) { LANES(Floats, a.v[i] + b.v[i]); }
INLINE Floats sub(Floats a, Floats b) { LANES(Floats, a.v[i] - b.v[i]); }
INLINE Floats mul(Floats a, Floats b) { LANES(Floats, a.v[i] * b.v[i]); }
INLINE Floats div(Floats a, Floats b) { LANES(Floats, a.v[i] / b.v[i]); }
INLINE Floats fma(Floats a, Floats b, Floats c) { LANES(Floats, fused(a.v[i], b.v[i], c.v[i])); }
INLINE Floats max(Floats a, Floats b) { LANES(Floats, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE Floats min(Floats a, Floats b) { LANES(Floats, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE Floats abs(Floats a) { LANES(Floats, fabsf(a.v[i])); }
INLINE float sum(Floats a) {
    float s = 0;
    for (int i = 0; i < W; i++) s += a.v[i];
    return s;
}
INLINE float greatest(Floats a) {
    float s = a.v[0];
    for (int i = 1; i < W; i++) s = a.v[i] > s ? a.v[i] : s;
    return s;
}
INLINE Floats zero_below(Floats a, Floats x, float least) { LANES(Floats, x.v[i] >= least ? a.v[i] : 0.0f); }

INLINE Ints ints(int32_t a) { LANES(Ints, a); }
INLINE Ints add(Ints a, Ints b) { LANES(Ints, int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
INLINE int32_t sum(Ints a) {
    int32_t s = 0;
    for (int i = 0; i < W; i++) s += a.v[i];
    return s;
}
template <int N>
INLINE Ints left(Ints a) { LANES(Ints, int32_t(uint32_t(a.v[i]) << N)); }
INLINE Floats to_floats(Ints a) { LANES(Floats, float(a.v[i])); }
INLINE Ints to_ints(Floats a) { LANES(Ints, int32_t(lrintf(a.v[i]))); }
INLINE Floats as_floats(Ints a) {
    Floats r;
    memcpy(&r, &a, sizeof r);
    return r;
}
INLINE Ints as_ints(Floats a) {
    Ints r;
    memcpy(&r, &a, sizeof r);
    return r;
}
INLINE Ints load_ints(const void* p) {
    Ints r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void store_ints(void* p, Ints a) { memcpy(p, &a, sizeof a); }
INLINE Ints high_half(Ints a) { LANES(Ints, int32_t(uint32_t(a.v[i]) & 0xffff0000u)); }

INLINE uint16_t word_at(const void* p, int i) {
    uint16_t word;
    memcpy(&word, (const char*)p + 2 * i, 2);
    return word;
}
INLINE Ints from_u8(const void* p) { LANES(Ints, ((const uint8_t*)p)[i]); }
INLINE Ints from_i8(const void* p) { LANES(Ints, ((const int8_t*)p)[i]); }
INLINE Ints from_u16(const void* p) { LANES(Ints, word_at(p, i)); }
INLINE void to_i8(void* p, Ints a) {
    for (int i = 0; i < W; i++) ((int8_t*)p)[i] = int8_t(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}
INLINE void to_u16(void* p, Ints a) {
    for (int i = 0; i < W; i++) {
        const uint16_t word = uint16_t(a.v[i]);
        memcpy((char*)p + 2 * i, &word, 2);
    }
}
INLINE Ints right16(Ints a) { LANES(Ints, int32_t(uint32_t(a.v[i]) >> 16)); }
INLINE Ints lowest(Ints a) { LANES(Ints, a.v[i] & 1); }
INLINE Floats from_half(const void* p) { LANES(Floats, half(word_at(p, i))); }

#define EACH_BYTE(expression)                         \
    Bytes r;                                          \
    for (int i = 0; i < 4 * W; i++) r.v[i] = uint8_t(expression); \
    return r

INLINE Bytes load_bytes(const void* p) { EACH_BYTE(((const uint8_t*)p)[i]); }
INLINE Bytes quad(const int8_t* p) { EACH_BYTE(p[i & 3]); }
INLINE Bytes low_bits(Bytes a) { EACH_BYTE(a.v[i] & 15); }
INLINE Bytes high_bits(Bytes a) { EACH_BYTE(a.v[i] >> 4); }
template <int From, int Count>
INLINE Bytes bits_at_4(Bytes a) { EACH_BYTE((a.v[i] >> From & ((1 << Count) - 1)) << 4); }
INLINE Bytes either(Bytes a, Bytes b) { EACH_BYTE(a.v[i] | b.v[i]); }
INLINE Bytes look_up(const uint8_t* table, Bytes a) { EACH_BYTE(table[a.v[i] & 15]); }
template <int Greatest, int Zero>
struct Sums {
    Ints total;

    INLINE void begin(int32_t minus) { total = Zero ? left<Zero>(ints(minus)) : ints(0); }
    template <int J>
    INLINE void add(Bytes u, Bytes x) {
        for (int i = 0; i < W; i++)
            for (int j = 4 * i; j < 4 * i + 4; j++) total.v[i] += int32_t(u.v[j]) * int8_t(x.v[j]);
    }
};

INLINE void transpose(const void* const* rows, size_t offset, uint32_t* out, size_t stride) {
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) memcpy(out + j * stride + i, (const char*)rows[i] + offset + 4 * j, 4);
}

#undef LANES
#undef EACH_BYTE
#endif

// a * b + c with one rounding or two, whichever is fast here: for long sums of floats. `fma` has the same bits
// everywhere.
INLINE Floats mul_add(Floats a, Floats b, Floats c) {
#if defined(TANDEM_HAS_FMA)
    return fma(a, b, c);
#else
    return add(mul(a, b), c);
#endif
}

INLINE Floats from_bf16(const void* p) { return as_floats(left<16>(from_u16(p))); }
// Rounds to nearest, ties to even; NaN is not kept.
INLINE void to_bf16(void* p, Floats v) {
    const Ints bits = as_ints(v);
    to_u16(p, right16(add(bits, add(ints(0x7fff), lowest(right16(bits))))));
}

// e to the x within 2 units in the last place; 0 below -87, the greatest it gives at 88.
INLINE Floats exp(Floats x) {
    const Floats clamped = min(max(x, all(-87.0f)), all(88.0f));
    const Ints n = to_ints(mul(clamped, all(1.44269504088896341f)));
    const Floats turns = to_floats(n);
    // ln 2 in two parts, the first of which times n is exact (Cody and Waite 1980).
    Floats r = mul_add(turns, all(-0.693359375f), clamped);
    r = mul_add(turns, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);  // the polynomial of Cephes' expf
    p = mul_add(p, r, all(1.3981999507e-3f));
    p = mul_add(p, r, all(8.3334519073e-3f));
    p = mul_add(p, r, all(4.1665795894e-2f));
    p = mul_add(p, r, all(1.6666665459e-1f));
    p = mul_add(p, r, all(5.0000001201e-1f));
    p = add(mul_add(p, mul(r, r), r), all(1.0f));
    const Floats power = as_floats(left<23>(add(n, ints(127))));
    return zero_below(mul(p, power), x, -87.0f);
}

}  // namespace TANDEM_SET
