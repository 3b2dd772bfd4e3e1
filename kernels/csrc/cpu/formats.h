// GGUF's formats (ggml-org/ggml, src/ggml-common.h and ggml-quants.c), and the strips that the products read.
//
// A weight is scale * code + least, with codes of 4 to 8 bits without a sign. A strip is 16 rows of a matrix. For each
// 32 columns it holds the codes of eight vectors of 64 bytes: lane r of vector j has columns 4 j to 4 j + 3 of row r.
// Vectors 2 i and 2 i + 1 share the halves of bytes; fifth and sixth bits lie in vectors of their own behind them.
// Scales lie in a second array. Strips hold the bits of the file, no more and no less, only in another order.
#pragma once

#include "api.h"
#include "simd.h"

namespace TANDEM_SET {

enum class Scales {
    HALF,      // float16 a group of 32
    HALF_MIN,  // the same, and the least value
    EXPONENT,  // a power of two a group of 32
    K_MIN,     // float16 scale and least value of 256 columns, each times a whole number for each 32
    K_16,      // float16 of 256 columns, times a signed number for each 16
};

// `ZERO_BITS`: 2 to it is taken from each code. `TABLE`: codes are 4 bits and stand for its entries.
template <int BITS_, Scales SCALES_, int ZERO_BITS_, int TABLE_ = 0>
struct Format {
    static constexpr int BITS = BITS_, ZERO_BITS = ZERO_BITS_, TABLE = TABLE_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool HAS_MIN = SCALES == Scales::HALF_MIN || SCALES == Scales::K_MIN;
    static constexpr int GREATEST = TABLE == 2 ? 28 : ZERO_BITS == 7 ? 255 : (1 << BITS) - 1;  // of the codes
    static constexpr int BLOCK = SCALES == Scales::K_MIN || SCALES == Scales::K_16 ? 256 : 32;  // columns
    static constexpr int GROUP_NBYTES = 64 * BITS;  // codes of 16 rows and 32 columns
    static constexpr int SCALE_NBYTES =             // of 16 rows and a block
        SCALES == Scales::HALF       ? 32
        : SCALES == Scales::HALF_MIN ? 64
        : SCALES == Scales::EXPONENT ? 16
        : SCALES == Scales::K_MIN    ? 64 + 8 * 32
                                     : 32 + 16 * 16;
};

constexpr int NL = 1, FP4 = 2;
// 128 and 16 more than they stand for.
constexpr uint8_t NL_TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4_TABLE[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

using Q4_0 = Format<4, Scales::HALF, 3>;
using Q4_1 = Format<4, Scales::HALF_MIN, 0>;
using Q5_0 = Format<5, Scales::HALF, 4>;
using Q5_1 = Format<5, Scales::HALF_MIN, 0>;
using Q8_0 = Format<8, Scales::HALF, 7>;
using Q4_K = Format<4, Scales::K_MIN, 0>;
using Q5_K = Format<5, Scales::K_MIN, 0>;
using Q6_K = Format<6, Scales::K_16, 5>;
using IQ4_NL = Format<4, Scales::HALF, 7, NL>;
using MXFP4 = Format<4, Scales::EXPONENT, 4, FP4>;

// A block of a row, taken apart. Codes as the file has them, those of tables not looked up.
struct Block {
    uint8_t codes[256];
    uint16_t scale, least;     // float16
    uint8_t scales[16];        // of each 32 columns, or of each 16 with a sign
    uint8_t leasts[8];
};

INLINE uint16_t word(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

INLINE void halves(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 16; i++) codes[i] = p[i] & 15, codes[16 + i] = p[i] >> 4;
}

INLINE void fifth_bits(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (p[i / 8] >> (i % 8) & 1) << 4;
}

// Twelve bytes with 6 bits for the scale and 6 for the least value of each 32 columns.
INLINE void k_scales(const uint8_t* p, Block& b) {
    for (int i = 0; i < 4; i++) {
        b.scales[i] = p[i] & 63;
        b.leasts[i] = p[4 + i] & 63;
        b.scales[4 + i] = (p[8 + i] & 15) | (p[i] >> 6) << 4;
        b.leasts[4 + i] = p[8 + i] >> 4 | (p[4 + i] >> 6) << 4;
    }
}

template <class F>
struct Stored;  // NBYTES of a block in the file; read(): the block taken apart

template <>
struct Stored<Q4_0> {
    static constexpr int NBYTES = 18;
    static void read(const uint8_t* p, Block& b) { b.scale = word(p), halves(p + 2, b.codes); }
};
template <>
struct Stored<IQ4_NL> : Stored<Q4_0> {};
template <>
struct Stored<Q4_1> {
    static constexpr int NBYTES = 20;
    static void read(const uint8_t* p, Block& b) { b.scale = word(p), b.least = word(p + 2), halves(p + 4, b.codes); }
};
template <>
struct Stored<Q5_0> {
    static constexpr int NBYTES = 22;
    static void read(const uint8_t* p, Block& b) {
        b.scale = word(p), halves(p + 6, b.codes), fifth_bits(p + 2, b.codes);
    }
};
template <>
struct Stored<Q5_1> {
    static constexpr int NBYTES = 24;
    static void read(const uint8_t* p, Block& b) {
        b.scale = word(p), b.least = word(p + 2), halves(p + 8, b.codes), fifth_bits(p + 4, b.codes);
    }
};
template <>
struct Stored<Q8_0> {
    static constexpr int NBYTES = 34;
    static void read(const uint8_t* p, Block& b) {
        b.scale = word(p);
        for (int i = 0; i < 32; i++) b.codes[i] = p[2 + i] ^ 0x80;
    }
};
template <>
struct Stored<MXFP4> {
    static constexpr int NBYTES = 17;
    static void read(const uint8_t* p, Block& b) { b.scales[0] = p[0], halves(p + 1, b.codes); }
};
template <>
struct Stored<Q4_K> {
    static constexpr int NBYTES = 144;
    static void read(const uint8_t* p, Block& b) {
        b.scale = word(p), b.least = word(p + 2), k_scales(p + 4, b);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 32; j++) {
                b.codes[64 * i + j] = p[16 + 32 * i + j] & 15;
                b.codes[64 * i + 32 + j] = p[16 + 32 * i + j] >> 4;
            }
    }
};
template <>
struct Stored<Q5_K> {
    static constexpr int NBYTES = 176;
    static void read(const uint8_t* p, Block& b) {
        b.scale = word(p), b.least = word(p + 2), k_scales(p + 4, b);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 32; j++) {
                const uint8_t fifths = p[16 + j] >> 2 * i;
                b.codes[64 * i + j] = (p[48 + 32 * i + j] & 15) | (fifths & 1) << 4;
                b.codes[64 * i + 32 + j] = p[48 + 32 * i + j] >> 4 | (fifths >> 1 & 1) << 4;
            }
    }
};
template <>
struct Stored<Q6_K> {
    static constexpr int NBYTES = 210;
    static void read(const uint8_t* p, Block& b) {
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 32; j++) {
                const uint8_t a = p[64 * i + j], c = p[64 * i + 32 + j], tops = p[128 + 32 * i + j];
                uint8_t* codes = b.codes + 128 * i + j;
                codes[0] = (a & 15) | (tops & 3) << 4;
                codes[32] = (c & 15) | (tops >> 2 & 3) << 4;
                codes[64] = a >> 4 | (tops >> 4 & 3) << 4;
                codes[96] = c >> 4 | (tops >> 6) << 4;
            }
        memcpy(b.scales, p + 192, 16);
        b.scale = word(p + 208);
    }
};

// Puts 32 codes of row `r` of a strip where the products look for them.
template <class F>
INLINE void put_codes(const uint8_t* codes, int r, uint8_t* out) {
    for (int column = 0; column < 32; column++) {
        const int j = column / 4, at = 4 * r + column % 4, code = codes[column];
        if constexpr (F::BITS == 8) {
            out[64 * j + at] = uint8_t(code);
        } else {
            out[64 * (j / 2) + at] |= (code & 15) << 4 * (j % 2);
            if constexpr (F::BITS == 5) out[256 + at] |= (code >> 4) << j;
            if constexpr (F::BITS == 6) out[256 + 64 * (j / 4) + at] |= (code >> 4) << 2 * (j % 4);
        }
    }
}

INLINE void put_word(uint8_t* p, uint16_t v) { memcpy(p, &v, 2); }

template <class F>
INLINE void put_scales(const Block& b, int r, uint8_t* out) {
    if constexpr (F::SCALES == Scales::EXPONENT) {
        out[r] = b.scales[0];
        return;
    }
    put_word(out + 2 * r, b.scale);
    if constexpr (F::SCALES == Scales::HALF_MIN) put_word(out + 32 + 2 * r, b.least);
    if constexpr (F::SCALES == Scales::K_MIN) {
        put_word(out + 32 + 2 * r, b.least ^ 0x8000);  // it is taken away: its sign is turned here
        for (int g = 0; g < 8; g++) out[64 + 32 * g + r] = b.scales[g], out[64 + 32 * g + 16 + r] = b.leasts[g];
    }
    if constexpr (F::SCALES == Scales::K_16)
        for (int g = 0; g < 16; g++) out[32 + 16 * g + r] = b.scales[g];
}

// Packs strips `first` to `last` of a matrix of the file, `rows` [n, k / block * NBYTES]. Rows past n are zero.
template <class F>
void pack(const uint8_t* rows, int64_t n, int64_t k, int64_t first, int64_t last, uint8_t* codes, uint8_t* scales) {
    const int64_t blocks = k / F::BLOCK, row_nbytes = blocks * Stored<F>::NBYTES;
    constexpr int GROUPS = F::BLOCK / 32;
    for (int64_t s = first; s < last; s++)
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t* to = codes + (s * blocks + b) * GROUPS * F::GROUP_NBYTES;
            uint8_t* scale = scales + (s * blocks + b) * F::SCALE_NBYTES;
            memset(to, 0, GROUPS * F::GROUP_NBYTES);
            memset(scale, 0, F::SCALE_NBYTES);
            for (int r = 0; r < 16 && 16 * s + r < n; r++) {
                Block block{};
                Stored<F>::read(rows + (16 * s + r) * row_nbytes + b * Stored<F>::NBYTES, block);
                for (int g = 0; g < GROUPS; g++) put_codes<F>(block.codes + 32 * g, r, to + g * F::GROUP_NBYTES);
                put_scales<F>(block, r, scale);
            }
        }
}

INLINE float one_half(uint16_t h) {
    uint16_t words[16] = {h};
    float out[16];
    store(out, from_half(words));
    return out[0];
}

// 2 to the e - 128: the tables hold twice the values. 0 for what float32 has no normal number for.
INLINE float power_of_two(uint8_t e) {
    const uint32_t bits = e < 2 ? 0 : uint32_t(e - 1) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Widens a row of the file.
template <class F>
void widen(const uint8_t* row, int64_t k, float* out) {
    for (int64_t i = 0; i < k; i += F::BLOCK, row += Stored<F>::NBYTES) {
        Block b{};
        Stored<F>::read(row, b);
        const float scale = F::SCALES == Scales::EXPONENT ? power_of_two(b.scales[0]) : one_half(b.scale);
        const float least = F::HAS_MIN ? one_half(b.least) : 0.0f;
        for (int j = 0; j < F::BLOCK; j++) {
            int code = b.codes[j];
            if constexpr (F::TABLE) code = (F::TABLE == NL ? NL_TABLE : FP4_TABLE)[code];
            if constexpr (F::ZERO_BITS) code -= 1 << F::ZERO_BITS;
            if constexpr (F::SCALES == Scales::K_MIN)
                out[i + j] = scale * b.scales[j / 32] * float(code) - least * b.leasts[j / 32];
            else if constexpr (F::SCALES == Scales::K_16)
                out[i + j] = scale * int8_t(b.scales[j / 16]) * float(code);
            else
                out[i + j] = scale * float(code) + least;
        }
    }
}

// Matrices without groups: strips of [k, 16] elements of `SIZE` bytes.
template <int SIZE>
void pack_plain(const uint8_t* rows, int64_t n, int64_t k, int64_t first, int64_t last, uint8_t* codes) {
    for (int64_t s = first; s < last; s++) {
        uint8_t* strip = codes + s * k * 16 * SIZE;
        memset(strip, 0, k * 16 * SIZE);
        for (int r = 0; r < 16 && 16 * s + r < n; r++)
            for (int64_t i = 0; i < k; i++) memcpy(strip + (16 * i + r) * SIZE, rows + ((16 * s + r) * k + i) * SIZE, SIZE);
    }
}

// Calls `f` with the format of a kind; false for one that has no groups, or is unknown.
template <class Call>
INLINE bool with_format(int32_t kind, Call&& f) {
    switch (kind) {
        case KIND_Q4_0: f(Q4_0{}); return true;
        case KIND_Q4_1: f(Q4_1{}); return true;
        case KIND_Q5_0: f(Q5_0{}); return true;
        case KIND_Q5_1: f(Q5_1{}); return true;
        case KIND_Q8_0: f(Q8_0{}); return true;
        case KIND_Q4_K: f(Q4_K{}); return true;
        case KIND_Q5_K: f(Q5_K{}); return true;
        case KIND_Q6_K: f(Q6_K{}); return true;
        case KIND_IQ4_NL: f(IQ4_NL{}); return true;
        case KIND_MXFP4: f(MXFP4{}); return true;
        default: return false;
    }
}

INLINE int element_nbytes(int32_t kind) { return kind == KIND_F32 ? 4 : kind == KIND_F16 || kind == KIND_BF16 ? 2 : 0; }

}  // namespace TANDEM_SET
