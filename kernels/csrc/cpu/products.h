// Rows of activations times packed matrices.
//
// Activations are rounded to int8, 32 columns at a time; sums of codes are exact in int32, and one float32 product and
// sum a group follows them, in the order of the columns. What a row gives does therefore not depend, to the bit, on the
// rows beside it, nor on the instruction set as far as that has a fused multiply-add.
//
// A column that is much greater than the others of its group leaves them few of the 8 bits. So what the rounding of the
// coarsest quarter of a row's groups left is rounded once more, and its products are added at the end.
//
// KV outlives a release, on disks and in stores. So whoever changes the bits that come out here, in attention.h or in
// elementwise.h raises NUMERICS in kernels/cpu/native.py.
#pragma once

#include "formats.h"

namespace TANDEM_SET {

// What goes with 32 codes of a row: their scale, it times their sum, and minus the sums of all and of each half.
struct Group {
    float scale, offset;
    int32_t minus, minus_low, minus_high;
};

// What was left of a group of a row, by its number in the block of rows.
struct Rest {
    int32_t row;
    Group group;
    int8_t codes[32];
};

constexpr int64_t ROW_BLOCK = 64;

// M rows of k columns, in blocks of ROW_BLOCK. `codes` [M, k], `groups` [M, k / 32]; `rests` [M, rests_of(k)]: those of
// a block in the order of the groups, of group g from `starts` [blocks, k / 32 + 2] of g on to that of g + 1.
// `floats` [M, k] for matrices without groups.
struct Rows {
    const int8_t* codes;
    const Group* groups;
    const Rest* rests;
    const int32_t* starts;
    const float* floats;
    int64_t k;
};

INLINE int64_t rests_of(int64_t k) { return (k / 32 + 3) / 4; }

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

// 127 over less is no float32: columns that are all smaller are taken as zero.
constexpr float LEAST_PEAK = 0x1p-120f;

// Rounds 32 columns to codes of -127 to 127.
INLINE Group round_group(const Floats* v, int8_t* codes) {
    Floats top = zeros();
    UNROLL for (int i = 0; i < 32 / W; i++) top = max(top, abs(v[i]));
    const float found = greatest(top), peak = found < LEAST_PEAK ? 0.0f : found;
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

// Of each 64 groups, writes the numbers of the quarter with the greatest scales, ascending; -1 where there are fewer.
INLINE void choose_coarsest(const Group* groups, int64_t num_groups, int32_t* numbers) {
    constexpr int64_t MOST = 64;
    for (int64_t first = 0; first < num_groups; first += MOST) {
        const int64_t count = num_groups - first < MOST ? num_groups - first : MOST;
        float scales[MOST] = {};
        for (int64_t g = 0; g < count; g++) scales[g] = groups[first + g].scale;
        int64_t left = rests_of(32 * count);
        float least = INFINITY;
        for (int64_t r = 0; r < left; r++) {
            Floats top = zeros();
            for (int64_t g = 0; g < count; g += W) {
                const Floats scale = load(scales + g);
                top = max(top, sub(scale, zero_below(scale, scale, least)));
            }
            const float next = greatest(top);
            if (!(next > 0)) break;
            least = next;
        }
        for (int64_t g = 0; g < count && left > 0; g++)
            if (scales[g] >= least) *numbers++ = int32_t(first + g), left--;
        for (; left > 0; left--) *numbers++ = -1;
    }
}

// Rounds k columns, a multiple of 32, and chooses what is to be rounded again.
INLINE void round_row(const float* x, int64_t k, int8_t* codes, Group* groups, int32_t* numbers) {
    for (int64_t g = 0; g < k / 32; g++) {
        Floats v[32 / W];
        UNROLL for (int i = 0; i < 32 / W; i++) v[i] = load(x + 32 * g + W * i);
        groups[g] = round_group(v, codes + 32 * g);
    }
    choose_coarsest(groups, k / 32, numbers);
}

// Rounds what was left of the chosen groups of a block of rows, and puts it in the order of the groups. `starts`
// [k / 32 + 2]: the last is for this function.
INLINE void round_rests(const float* x, int64_t num_rows, int64_t k, const int8_t* codes, const Group* groups, const int32_t* numbers, Rest* rests, int32_t* starts) {
    const int64_t num_groups = k / 32, each = rests_of(k);
    memset(starts, 0, (num_groups + 2) * sizeof *starts);
    for (int64_t i = 0; i < num_rows * each; i++)
        if (numbers[i] >= 0) starts[numbers[i] + 2]++;
    for (int64_t g = 0; g < num_groups; g++) starts[g + 2] += starts[g + 1];
    for (int64_t i = 0; i < num_rows * each; i++) {
        const int64_t row = i / each, g = numbers[i];
        if (g < 0) continue;
        const int64_t first = row * k + 32 * g;
        const float scale = groups[row * num_groups + g].scale;
        Rest& rest = rests[starts[g + 1]++];
        Floats v[32 / W];
        UNROLL for (int j = 0; j < 32 / W; j++)
            v[j] = fma(to_floats(from_i8(codes + first + W * j)), all(-scale), load(x + first + W * j));
        rest.row = int32_t(row);
        rest.group = round_group(v, rest.codes);
    }
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
    UNROLL for (int half = 0; half < HALVES; half++) {
        const BlockScales<F>& own = of_block[half];
        scales[half] = own.scale, others[half] = own.least;
        if constexpr (F::SCALES == Scales::K_MIN) {
            scales[half] = mul(own.scale, to_floats(from_u8(own.each + 32 * i)));
            others[half] = mul(own.least, to_floats(from_u8(own.each + 32 * i + 16)));
        }
        if constexpr (F::SCALES == Scales::K_16) {
            scales[half] = mul(own.scale, to_floats(from_i8(own.each + 32 * i)));
            others[half] = mul(own.scale, to_floats(from_i8(own.each + 32 * i + 16)));
        }
    }
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

// Bias, and what is there if `adds`, to the products `result` [rows, 16]; y [rows, n], `stride` apart.
INLINE void write_strip(const Matrix& w, int64_t strip, const float* result, int64_t row0, int64_t row1, float* y, int64_t stride, bool adds) {
    const int64_t column = 16 * strip;
    for (int64_t row = row0; row < row1; row++, result += 16) {
        float* to = y + row * stride + column;
        if (column + 16 > w.n) {
            for (int i = 0; column + i < w.n; i++)
                to[i] = result[i] + (w.bias ? w.bias[column + i] : 0.0f) + (adds ? to[i] : 0.0f);
            continue;
        }
        UNROLL for (int i = 0; i < 16; i += W) {
            Floats v = load(result + i);
            if (w.bias) v = add(v, load(w.bias + column + i));
            if (adds) v = add(v, load(to + i));
            store(to + i, v);
        }
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
void strip_of(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, float* result) {
    const uint8_t* codes = w.codes + strip * (w.k / 32) * F::GROUP_NBYTES;
    const uint8_t* scales = w.scales + strip * (w.k / F::BLOCK) * F::SCALE_NBYTES;
    row_tiles(row0, row1, [&](auto count, int64_t row) {
        multiply<F, decltype(count)::value>(codes, scales, x, row, result + 16 * (row - row0));
    });
    add_rests<F>(codes, scales, x, row0, row1, result);
}

// Rows `row0` to `row1`, a block or all of few, times a strip: y [rows, n], `stride` apart; added to what is there if
// `adds`.
inline void multiply_strip(const Matrix& w, int64_t strip, const Rows& x, int64_t row0, int64_t row1, float* y, int64_t stride, bool adds) {
    alignas(64) float result[ROW_BLOCK * 16];
    const bool has_groups = with_format(w.kind, [&](auto format) {
        strip_of<decltype(format)>(w, strip, x, row0, row1, result);
    });
    if (!has_groups) {
        if (w.kind == KIND_F32) strip_plain<AsF32>(w, strip, x, row0, row1, result);
        if (w.kind == KIND_F16) strip_plain<AsF16>(w, strip, x, row0, row1, result);
        if (w.kind == KIND_BF16) strip_plain<AsBF16>(w, strip, x, row0, row1, result);
    }
    write_strip(w, strip, result, row0, row1, y, stride, adds);
}

}  // namespace TANDEM_SET
