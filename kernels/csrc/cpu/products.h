// Rows of activations times packed matrices, by vectors: any number of rows.
#pragma once

#include "formats.h"
#include "rows.h"

namespace TANDEM_SET {

template <class Each>
INLINE void row_tiles(int64_t first, int64_t last, Each&& each) {
    int64_t row = first;
    if constexpr (MOST_ROWS >= 8)
        for (; row + 8 <= last; row += 8) each(Index<8>{}, row);
    if constexpr (MOST_ROWS >= 4)
        for (; row + 4 <= last; row += 4) each(Index<4>{}, row);
    if constexpr (MOST_ROWS >= 2) {
        if (row + 3 == last) return each(Index<3>{}, row);
        if (row + 2 == last) return each(Index<2>{}, row);
    }
    for (; row < last; row++) each(Index<1>{}, row);
}

// Rows of activations side by side: their codes of a group, and what goes with these, each so many bytes apart.
struct GroupRows {
    const int8_t* codes;
    const Group* groups;
    int64_t codes_stride, groups_stride;

    INLINE const int8_t* codes_of(int m) const { return codes + m * codes_stride; }
    INLINE const Group& group_of(int m) const { return *(const Group*)((const uint8_t*)groups + m * groups_stride); }
};

// Vectors 2 I and 2 I + 1 of the codes of 32 columns of W rows of a strip.
template <class F, int I>
INLINE void load_pair(const uint8_t* p, Bytes* u) {
    if constexpr (F::BITS == 8) {
        u[0] = load_bytes(p + 128 * I), u[1] = load_bytes(p + 128 * I + 64);
        return;
    }
    const Bytes pair = load_bytes(p + 64 * I);
    u[0] = low_bits(pair), u[1] = high_bits(pair);
    if constexpr (F::BITS == 5) {
        const Bytes fifths = load_bytes(p + 256);
        u[0] = either(u[0], bits_at_4<2 * I, 1>(fifths)), u[1] = either(u[1], bits_at_4<2 * I + 1, 1>(fifths));
    }
    if constexpr (F::BITS == 6) {
        const Bytes tops = load_bytes(p + 256 + 64 * (I / 2));
        u[0] = either(u[0], bits_at_4<4 * (I % 2), 2>(tops)), u[1] = either(u[1], bits_at_4<4 * (I % 2) + 2, 2>(tops));
    }
    if constexpr (F::TABLE != 0) {
        UNROLL for (int j = 0; j < 2; j++) u[j] = look_up(F::TABLE == NL ? NL_TABLE : FP4_TABLE, u[j]);
    }
}

// The scales of W rows of a block.
template <class F>
struct BlockScales {
    Floats scale, least;
    const uint8_t* each;

    INLINE void read(const uint8_t* p, int half) {
        least = zeros(), each = p;
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

    // Of group `i` of the block; `other`: its least values, or the scales of its second half.
    INLINE void of_group(int i, Floats& group_scale, Floats& other) const {
        group_scale = scale, other = least;
        if constexpr (F::SCALES == Scales::K_MIN) {
            group_scale = mul(scale, to_floats(from_u8(each + 32 * i)));
            other = mul(least, to_floats(from_u8(each + 32 * i + 16)));
        }
        if constexpr (F::SCALES == Scales::K_16) {
            group_scale = mul(scale, to_floats(from_i8(each + 32 * i)));
            other = mul(scale, to_floats(from_i8(each + 32 * i + 16)));
        }
    }
};

// What COUNT rows have of a strip, W of its 16 rows after the other.
template <int COUNT>
using Totals = Floats[COUNT][16 / W];

// Adds VECTORS of the eight vectors of a group from FIRST on, unpacked once, times COUNT rows. `scales`: of each W rows.
template <class F, int FIRST, int VECTORS, int COUNT>
INLINE void add_vectors(const uint8_t* codes, const Floats* scales, const GroupRows& x, Totals<COUNT>& totals) {
    using Sum = Sums<F::GREATEST, F::ZERO_BITS>;
    constexpr int HALVES = 16 / W;
    Sum sums[COUNT][HALVES];
    UNROLL for (int m = 0; m < COUNT; m++) {
        const Group& group = x.group_of(m);
        const int32_t minus = VECTORS == 8 ? group.minus : FIRST == 0 ? group.minus_low : group.minus_high;
        UNROLL for (int half = 0; half < HALVES; half++) sums[m][half].begin(minus);
    }
    repeat<VECTORS / 2>([&](auto pair) {
        constexpr int I = FIRST / 2 + decltype(pair)::value, J = 2 * decltype(pair)::value;
        Bytes u[HALVES][2];
        UNROLL for (int half = 0; half < HALVES; half++) load_pair<F, I>(codes + 4 * W * half, u[half]);
        UNROLL for (int m = 0; m < COUNT; m++) {
            const Bytes even = quad(x.codes_of(m) + 8 * I), odd = quad(x.codes_of(m) + 8 * I + 4);
            UNROLL for (int half = 0; half < HALVES; half++) {
                sums[m][half].template add<J>(u[half][0], even);
                sums[m][half].template add<J + 1>(u[half][1], odd);
            }
        }
    });
    UNROLL for (int m = 0; m < COUNT; m++) {
        const Floats by = all(x.group_of(m).scale);
        UNROLL for (int half = 0; half < HALVES; half++)
            totals[m][half] = fma(to_floats(sums[m][half].total), mul(scales[half], by), totals[m][half]);
    }
}

// Adds COUNT rows of a group; `i`: its number in the block.
template <class F, int COUNT>
INLINE void add_group(const uint8_t* codes, const BlockScales<F>* of_block, int i, const GroupRows& x, Totals<COUNT>& totals) {
    constexpr int HALVES = 16 / W;
    Floats scales[HALVES], others[HALVES];
    UNROLL for (int half = 0; half < HALVES; half++) of_block[half].of_group(i, scales[half], others[half]);
    if constexpr (F::SCALES == Scales::K_16) {
        add_vectors<F, 0, 4, COUNT>(codes, scales, x, totals);
        add_vectors<F, 4, 4, COUNT>(codes, others, x, totals);
    } else {
        add_vectors<F, 0, 8, COUNT>(codes, scales, x, totals);
    }
    if constexpr (F::HAS_MIN) {
        UNROLL for (int m = 0; m < COUNT; m++) {
            const Floats offset = all(x.group_of(m).offset);
            UNROLL for (int half = 0; half < HALVES; half++) totals[m][half] = fma(others[half], offset, totals[m][half]);
        }
    }
}

template <int COUNT>
INLINE void load_totals(const float* const* from, Totals<COUNT>& totals) {
    UNROLL for (int m = 0; m < COUNT; m++)
        UNROLL for (int half = 0; half < 16 / W; half++) totals[m][half] = load(from[m] + W * half);
}

template <int COUNT>
INLINE void store_totals(const Totals<COUNT>& totals, float* const* to) {
    UNROLL for (int m = 0; m < COUNT; m++)
        UNROLL for (int half = 0; half < 16 / W; half++) store(to[m] + W * half, totals[m][half]);
}

// COUNT rows from `row` on times a strip, without what their rounding left: result [COUNT, 16].
template <class F, int COUNT>
INLINE void multiply(const uint8_t* codes, const uint8_t* scales, const Rows& x, int64_t row, float* result) {
    constexpr int GROUPS = F::BLOCK / 32, HALVES = 16 / W;
    Totals<COUNT> totals;  // here, so that the compiler keeps them in registers
    UNROLL for (int m = 0; m < COUNT; m++)
        UNROLL for (int half = 0; half < HALVES; half++) totals[m][half] = zeros();
    const int64_t num_groups = x.k / 32;
    GroupRows rows{x.codes + row * x.k, x.groups + row * num_groups, x.k, num_groups * int64_t(sizeof(Group))};
    for (int64_t block = 0; block < num_groups / GROUPS; block++, scales += F::SCALE_NBYTES) {
        BlockScales<F> of_block[HALVES];
        UNROLL for (int half = 0; half < HALVES; half++) of_block[half].read(scales, half);
        for (int i = 0; i < GROUPS; i++, codes += F::GROUP_NBYTES, rows.codes += 32, rows.groups++)
            add_group<F, COUNT>(codes, of_block, i, rows, totals);
    }
    UNROLL for (int m = 0; m < COUNT; m++)
        UNROLL for (int half = 0; half < HALVES; half++) store(result + 16 * m + W * half, totals[m][half]);
}

// Adds what the rounding of a block of rows left to `result` [rows, 16]. A group is read once for all rows that have
// more of it.
template <class F>
void add_rests(const uint8_t* codes, const uint8_t* scales, const Rows& x, int64_t row0, int64_t row1, float* result) {
    constexpr int GROUPS = F::BLOCK / 32, HALVES = 16 / W;
    const int64_t num_groups = x.k / 32;
    const int32_t* starts = x.starts + row0 / ROW_BLOCK * (num_groups + 2);
    const Rest* rests = x.rests + row0 * rests_of(x.k);
    for (int64_t g = 0; g < num_groups; g++) {
        if (starts[g] == starts[g + 1]) continue;
        BlockScales<F> of_block[HALVES];
        UNROLL for (int half = 0; half < HALVES; half++) of_block[half].read(scales + g / GROUPS * F::SCALE_NBYTES, half);
        row_tiles(starts[g], starts[g + 1], [&](auto count, int64_t first) {
            constexpr int COUNT = decltype(count)::value;
            const Rest* own = rests + first;
            float* to[COUNT];
            UNROLL for (int m = 0; m < COUNT; m++) to[m] = result + 16 * own[m].row;
            Totals<COUNT> totals;
            load_totals<COUNT>(to, totals);
            const GroupRows rows{own->codes, &own->group, sizeof(Rest), sizeof(Rest)};
            add_group<F, COUNT>(codes + g * F::GROUP_NBYTES, of_block, int(g % GROUPS), rows, totals);
            store_totals<COUNT>(totals, to);
        });
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
INLINE void multiply_plain(const uint8_t* codes, const Rows& x, int64_t row, float* result) {
    const float* columns = x.floats + row * x.k;
    for (int half = 0; half < 16 / W; half++) {
        const uint8_t* p = codes + E::NBYTES * W * half;
        Floats total[COUNT], odd[COUNT];
        UNROLL for (int m = 0; m < COUNT; m++) total[m] = odd[m] = zeros();
        for (int64_t i = 0; i + 1 < x.k; i += 2, p += 32 * E::NBYTES) {
            const Floats a = E::at(p), b = E::at(p + 16 * E::NBYTES);
            UNROLL for (int m = 0; m < COUNT; m++) {
                total[m] = mul_add(a, all(columns[m * x.k + i]), total[m]);
                odd[m] = mul_add(b, all(columns[m * x.k + i + 1]), odd[m]);
            }
        }
        if (x.k % 2) {
            UNROLL for (int m = 0; m < COUNT; m++) total[m] = mul_add(E::at(p), all(columns[m * x.k + x.k - 1]), total[m]);
        }
        UNROLL for (int m = 0; m < COUNT; m++) store(result + 16 * m + W * half, add(total[m], odd[m]));
    }
}

template <class E>
void strip_plain(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, float* result) {
    const uint8_t* codes = w.codes + strip * w.k * 16 * E::NBYTES;
    row_tiles(row0, row1, [&](auto count, int64_t row) {
        multiply_plain<E, decltype(count)::value>(codes, x, row, result + 16 * (row - row0));
    });
}

template <class F>
void vector_strip(const uint8_t* codes, const uint8_t* scales, const Rows& x, int64_t row0, int64_t row1, float* result) {
    row_tiles(row0, row1, [&](auto count, int64_t row) {
        multiply<F, decltype(count)::value>(codes, scales, x, row, result + 16 * (row - row0));
    });
    add_rests<F>(codes, scales, x, row0, row1, result);
}

}  // namespace TANDEM_SET
