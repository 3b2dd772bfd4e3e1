// Rows of activations times packed matrices.
//
// Activations are rounded to int8, 32 columns at a time; sums of codes are exact in int32, and one float32 product and
// sum a group follows them, in the order of the columns. What a row gives does therefore not depend, to the bit, on the
// rows beside it, nor on the instruction set as far as that has a fused multiply-add.
//
// A column that is much greater than the others of its group leaves them few of the 8 bits. So what the rounding of a
// row's coarsest group, one for each 2048 columns, left is rounded once more, and its products are added at the end.
#pragma once

#include "formats.h"

namespace TANDEM_SET {

// What goes with 32 codes of a row: their scale, it times their sum, and minus the sums of all and of each half.
struct Group {
    float scale, offset;
    int32_t minus, minus_low, minus_high;
};

// What was left of a group, its number in the row, and its codes.
struct Rest {
    int32_t number;
    Group group;
    int8_t codes[32];
};

// M rows of k columns. `codes` [M, k], `groups` [M, k / 32], `rests` [M, rests_of(k)]; `floats` [M, k] for matrices
// without groups.
struct Rows {
    const int8_t* codes;
    const Group* groups;
    const Rest* rests;
    const float* floats;
    int64_t k;
};

INLINE int64_t rests_of(int64_t k) { return (k + 2047) / 2048; }

// Rounds 32 columns to codes of -127 to 127.
INLINE Group round_group(const Floats* v, int8_t* codes) {
    Floats top = zeros();
    UNROLL for (int i = 0; i < 32 / W; i++) top = max(top, abs(v[i]));
    const float peak = greatest(top);
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
    int32_t sums[2] = {0, 0};
    UNROLL for (int i = 0; i < 32 / W; i++) {
        const Ints code = to_ints(mul(v[i], all(inverse)));
        to_i8(codes + W * i, code);
        sums[W * i / 16] += sum(code);
    }
    const int32_t both = sums[0] + sums[1];
    return Group{scale, scale * float(both), -both, -sums[0], -sums[1]};
}

// The group with the greatest scale of those that come after `last`, the coarser before the finer.
INLINE int64_t next_coarsest(const Group* groups, int64_t count, int64_t last) {
    int64_t found = -1;
    for (int64_t g = 0; g < count; g++) {
        const float scale = groups[g].scale;
        const bool is_after = last < 0 || scale < groups[last].scale || (scale == groups[last].scale && g > last);
        if (is_after && (found < 0 || scale > groups[found].scale)) found = g;
    }
    return found < 0 ? 0 : found;  // where there is no order: some are not numbers
}

// Rounds k columns, a multiple of 32.
INLINE void round_row(const float* x, int64_t k, int8_t* codes, Group* groups, Rest* rests) {
    Floats v[32 / W];
    for (int64_t g = 0; g < k / 32; g++) {
        UNROLL for (int i = 0; i < 32 / W; i++) v[i] = load(x + 32 * g + W * i);
        groups[g] = round_group(v, codes + 32 * g);
    }
    int64_t g = -1;
    for (int64_t r = 0; r < rests_of(k); r++) {
        g = next_coarsest(groups, k / 32, g);
        UNROLL for (int i = 0; i < 32 / W; i++)
            v[i] = fma(to_floats(from_i8(codes + 32 * g + W * i)), all(-groups[g].scale), load(x + 32 * g + W * i));
        rests[r].number = int32_t(g);
        rests[r].group = round_group(v, rests[r].codes);
    }
}

// The codes of 32 columns of W rows of a strip, eight vectors; `half`: which W rows.
template <class F>
INLINE void load_codes(const uint8_t* p, int half, Bytes* u) {
    p += 4 * W * half;
    if constexpr (F::BITS == 8) {
        UNROLL for (int j = 0; j < 8; j++) u[j] = load_bytes(p + 64 * j);
    } else {
        UNROLL for (int j = 0; j < 4; j++) {
            const Bytes pair = load_bytes(p + 64 * j);
            u[2 * j] = low_bits(pair);
            u[2 * j + 1] = high_bits(pair);
        }
    }
    if constexpr (F::BITS == 5) {
        const Bytes fifths = load_bytes(p + 256);
        repeat<8>([&](auto j) { u[j.value] = either(u[j.value], bits_at_4<j.value, 1>(fifths)); });
    }
    if constexpr (F::BITS == 6) {
        const Bytes tops[2] = {load_bytes(p + 256), load_bytes(p + 320)};
        repeat<8>([&](auto j) {
            u[j.value] = either(u[j.value], bits_at_4<2 * (j.value % 4), 2>(tops[j.value / 4]));
        });
    }
    if constexpr (F::TABLE != 0) {
        UNROLL for (int j = 0; j < 8; j++) u[j] = look_up(F::TABLE == NL ? NL_TABLE : FP4_TABLE, u[j]);
    }
}

// `Count` vectors of codes times the columns at `x`, less 2^ZERO_BITS times their sum.
template <class F, int COUNT>
INLINE Ints dots(const Bytes* u, const int8_t* x, int32_t minus) {
    Ints a = ints(0);
    if constexpr (F::ZERO_BITS != 0) a = from_zero<F::IS_WIDE>(left<F::ZERO_BITS>(ints(minus)));
    UNROLL for (int j = 0; j < COUNT; j++) a = dot<F::IS_WIDE>(a, u[j], quad(x + 4 * j));
    return a;
}

// The scales of W rows of a block.
template <class F>
struct BlockScales {
    Floats scale, least;
    const uint8_t* each;

    INLINE BlockScales(const uint8_t* p, int half) : scale(zeros()), least(zeros()), each(p) {
        if constexpr (F::SCALES == Scales::EXPONENT) {
            float powers[W];
            for (int i = 0; i < W; i++) powers[i] = power_of_two(p[W * half + i]);
            scale = load(powers);
        } else {
            scale = from_half(p + 2 * W * half);
        }
        if constexpr (F::HAS_MIN) least = from_half(p + 32 + 2 * W * half);
        if constexpr (F::SCALES == Scales::K_MIN) each = p + 64 + W * half;
        if constexpr (F::SCALES == Scales::K_16) each = p + 32 + W * half;
    }
};

// Adds to `total` COUNT rows of a group, `k` codes apart, times W rows of a strip; `i`: its number in the block.
template <class F, int COUNT>
INLINE void add_group(const Bytes* u, const BlockScales<F>& of_block, int i, const int8_t* columns, int64_t k, const Group* groups, Floats* total) {
    const int64_t num_groups = k / 32;
    if constexpr (F::SCALES == Scales::K_16) {
        const Floats low = mul(of_block.scale, to_floats(from_i8(of_block.each + 32 * i)));
        const Floats high = mul(of_block.scale, to_floats(from_i8(of_block.each + 32 * i + 16)));
        UNROLL for (int m = 0; m < COUNT; m++) {
            const Group& group = groups[m * num_groups];
            const int8_t* at = columns + m * k;
            const Floats by = all(group.scale);
            total[m] = fma(to_floats(dots<F, 4>(u, at, group.minus_low)), mul(low, by), total[m]);
            total[m] = fma(to_floats(dots<F, 4>(u + 4, at + 16, group.minus_high)), mul(high, by), total[m]);
        }
    } else {
        Floats scale = of_block.scale, least = of_block.least;
        if constexpr (F::SCALES == Scales::K_MIN) {
            scale = mul(scale, to_floats(from_u8(of_block.each + 32 * i)));
            least = mul(least, to_floats(from_u8(of_block.each + 32 * i + 16)));
        }
        UNROLL for (int m = 0; m < COUNT; m++) {
            const Group& group = groups[m * num_groups];
            const Ints sums = dots<F, 8>(u, columns + m * k, group.minus);
            total[m] = fma(to_floats(sums), mul(scale, all(group.scale)), total[m]);
            if constexpr (F::HAS_MIN) total[m] = fma(least, all(group.offset), total[m]);
        }
    }
}

// COUNT rows from `row` on, times W rows of a strip, without what their rounding left.
template <class F, int COUNT>
INLINE void multiply(const uint8_t* codes, const uint8_t* scales, const Rows& x, int64_t row, int half, Floats* result) {
    Floats total[COUNT];  // here, so that the compiler keeps them in registers
    UNROLL for (int m = 0; m < COUNT; m++) total[m] = zeros();
    constexpr int GROUPS = F::BLOCK / 32;
    const int64_t num_groups = x.k / 32;
    const int8_t* columns = x.codes + row * x.k;
    const Group* groups = x.groups + row * num_groups;
    for (int64_t block = 0; block < num_groups / GROUPS; block++) {
        const BlockScales<F> of_block(scales + block * F::SCALE_NBYTES, half);
        for (int i = 0; i < GROUPS; i++, codes += F::GROUP_NBYTES, columns += 32, groups++) {
            Bytes u[8];
            load_codes<F>(codes, half, u);
            add_group<F, COUNT>(u, of_block, i, columns, x.k, groups, total);
        }
    }
    UNROLL for (int m = 0; m < COUNT; m++) result[m] = total[m];
}

// Adds what the rounding of `count` rows left. The coarsest group is often the same for all: its codes stay loaded.
template <class F>
[[gnu::noinline]] void add_rests(const uint8_t* codes, const uint8_t* scales, const Rows& x, int64_t row, int count, int half, Floats* total) {
    constexpr int GROUPS = F::BLOCK / 32;
    const int64_t num_rests = rests_of(x.k);
    Bytes u[8];
    BlockScales<F> of_block(scales, half);
    int loaded = -1;
    for (int64_t r = 0; r < num_rests; r++)
        for (int m = 0; m < count; m++) {
            const Rest& rest = x.rests[(row + m) * num_rests + r];
            if (rest.number != loaded) {
                loaded = rest.number;
                load_codes<F>(codes + loaded * F::GROUP_NBYTES, half, u);
                of_block = BlockScales<F>(scales + loaded / GROUPS * F::SCALE_NBYTES, half);
            }
            add_group<F, 1>(u, of_block, rest.number % GROUPS, rest.codes, x.k, &rest.group, total + m);
        }
}

struct AsF32 {
    static constexpr int NBYTES = 4;
    INLINE static Floats at(const uint8_t* p) { return load((const float*)p); }
};
struct AsF16 {
    static constexpr int NBYTES = 2;
    INLINE static Floats at(const uint8_t* p) { return from_half(p); }
};
struct AsBF16 {
    static constexpr int NBYTES = 2;
    INLINE static Floats at(const uint8_t* p) { return from_bf16(p); }
};

// The same for matrices without groups. Even and odd columns are summed apart, which hides the latency of sums.
template <class E, int COUNT>
INLINE void multiply_plain(const uint8_t* codes, const Rows& x, int64_t row, int half, Floats* result) {
    const float* columns = x.floats + row * x.k;
    const uint8_t* p = codes + E::NBYTES * W * half;
    Floats total[COUNT], odd[COUNT];
    UNROLL for (int m = 0; m < COUNT; m++) total[m] = odd[m] = zeros();
    for (int64_t i = 0; i + 1 < x.k; i += 2, p += 32 * E::NBYTES) {
        const Floats a = E::at(p), b = E::at(p + 16 * E::NBYTES);
        UNROLL for (int m = 0; m < COUNT; m++) {
            total[m] = fma(a, all(columns[m * x.k + i]), total[m]);
            odd[m] = fma(b, all(columns[m * x.k + i + 1]), odd[m]);
        }
    }
    if (x.k % 2) {
        UNROLL for (int m = 0; m < COUNT; m++) total[m] = fma(E::at(p), all(columns[m * x.k + x.k - 1]), total[m]);
    }
    UNROLL for (int m = 0; m < COUNT; m++) result[m] = add(total[m], odd[m]);
}

template <class Multiply, int COUNT>
INLINE void tile(const Matrix& w, int64_t strip, int64_t row, float* y, int64_t stride, bool adds, Multiply multiply) {
    const int64_t first = 16 * strip;
    const bool is_whole = first + 16 <= w.n;
    for (int half = 0; half < 16 / W; half++) {
        Floats total[COUNT];

        multiply(half, total);
        const int64_t column = first + W * half;
        UNROLL for (int m = 0; m < COUNT; m++) {
            float* to = y + (row + m) * stride + column;
            if (is_whole) {
                Floats v = total[m];
                if (w.bias) v = add(v, load(w.bias + column));
                if (adds) v = add(v, load(to));
                store(to, v);
            } else {
                float v[W];
                store(v, total[m]);
                for (int i = 0; i < W && column + i < w.n; i++)
                    to[i] = v[i] + (w.bias ? w.bias[column + i] : 0.0f) + (adds ? to[i] : 0.0f);
            }
        }
    }
}

template <class Each>
INLINE void row_tiles(int64_t first, int64_t last, Each&& each) {
    int64_t row = first;
    if constexpr (MOST_ROWS >= 8)
        for (; row + 8 <= last; row += 8) each(Index<8>{}, row);
    if constexpr (MOST_ROWS >= 4)
        for (; row + 4 <= last; row += 4) each(Index<4>{}, row);
    if constexpr (MOST_ROWS >= 2)
        for (; row + 2 <= last; row += 2) each(Index<2>{}, row);
    for (; row < last; row++) each(Index<1>{}, row);
}

template <class E>
void strips_plain(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, float* y, int64_t stride, bool adds) {
    const uint8_t* codes = w.codes + strip * w.k * 16 * E::NBYTES;
    row_tiles(row0, row1, [&](auto count, int64_t row) {
        constexpr int COUNT = decltype(count)::value;
        auto multiply = [&](int half, Floats* total) { multiply_plain<E, COUNT>(codes, x, row, half, total); };
        tile<decltype(multiply), COUNT>(w, strip, row, y, stride, adds, multiply);
    });
}

template <class F>
void strips_of(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, float* y, int64_t stride, bool adds) {
    const uint8_t* codes = w.codes + strip * (w.k / 32) * F::GROUP_NBYTES;
    const uint8_t* scales = w.scales + strip * (w.k / F::BLOCK) * F::SCALE_NBYTES;
    row_tiles(row0, row1, [&](auto count, int64_t row) {
        constexpr int COUNT = decltype(count)::value;
        auto product = [&](int half, Floats* total) {
            multiply<F, COUNT>(codes, scales, x, row, half, total);
            add_rests<F>(codes, scales, x, row, COUNT, half, total);
        };
        tile<decltype(product), COUNT>(w, strip, row, y, stride, adds, product);
    });
}

// Rows `row0` to `row1` times a strip: y [rows, n], `stride` apart; added to what is there if `adds`.
inline void multiply_strip(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, float* y, int64_t stride, bool adds) {
    const bool has_groups = with_format(w.kind, [&](auto format) {
        strips_of<decltype(format)>(w, strip, x, row0, row1, y, stride, adds);
    });
    if (has_groups) return;
    if (w.kind == KIND_F32) strips_plain<AsF32>(w, strip, x, row0, row1, y, stride, adds);
    if (w.kind == KIND_F16) strips_plain<AsF16>(w, strip, x, row0, row1, y, stride, adds);
    if (w.kind == KIND_BF16) strips_plain<AsBF16>(w, strip, x, row0, row1, y, stride, adds);
}

}  // namespace TANDEM_SET
