// Generalised advantage estimation (Schulman et al. 2016, eq. 11 and 16), one backward scan per row.
//
// A scan's steps depend on each other, so eight rows go side by side: a tile of them is transposed, and each
// step is a few instructions on vectors over rows.
#pragma once

#include "doubles.h"

namespace rolemesh::ROLEMESH_ISA {

constexpr int kTileRows = 8, kTileColumns = 16;  // 16 floats are a cache line

// Eight rows of an array, from one column on; past the last row, that one again.
template <typename T>
struct RowPointers {
    T* row[kTileRows];
    RowPointers(T* data, int64_t first, int64_t rows, int64_t steps) {
        for (int i = 0; i < kTileRows; ++i)
            row[i] = data + (first + i < rows ? first + i : rows - 1) * steps;
    }
};

typedef float Float4 __attribute__((vector_size(16)));
typedef uint8_t Byte16 __attribute__((vector_size(16)));

static inline void transpose4(Float4 (&v)[4]) {
    const Float4 a = __builtin_shufflevector(v[0], v[2], 0, 4, 1, 5);
    const Float4 b = __builtin_shufflevector(v[0], v[2], 2, 6, 3, 7);
    const Float4 c = __builtin_shufflevector(v[1], v[3], 0, 4, 1, 5);
    const Float4 d = __builtin_shufflevector(v[1], v[3], 2, 6, 3, 7);
    v[0] = __builtin_shufflevector(a, c, 0, 4, 1, 5);
    v[1] = __builtin_shufflevector(a, c, 2, 6, 3, 7);
    v[2] = __builtin_shufflevector(b, d, 0, 4, 1, 5);
    v[3] = __builtin_shufflevector(b, d, 2, 6, 3, 7);
}

// tile[column][row] = rows[row][column], and back.
template <typename T>
static inline void to_tile(const T* const (&rows)[kTileRows], T (&tile)[kTileColumns][kTileRows]) {
    for (int i = 0; i < kTileRows; ++i)
        for (int j = 0; j < kTileColumns; ++j) tile[j][i] = rows[i][j];
}

template <typename T>
static inline void from_tile(const T (&tile)[kTileColumns][kTileRows], T* const (&rows)[kTileRows]) {
    for (int i = 0; i < kTileRows; ++i)
        for (int j = 0; j < kTileColumns; ++j) rows[i][j] = tile[j][i];
}

static inline void to_tile(const float* const (&rows)[kTileRows], float (&tile)[kTileColumns][kTileRows]) {
    for (int i = 0; i < kTileRows; i += 4) {
        for (int j = 0; j < kTileColumns; j += 4) {
            Float4 v[4];
            for (int k = 0; k < 4; ++k) __builtin_memcpy(&v[k], rows[i + k] + j, sizeof v[k]);
            transpose4(v);
            for (int k = 0; k < 4; ++k) __builtin_memcpy(&tile[j + k][i], &v[k], sizeof v[k]);
        }
    }
}

static inline void from_tile(const float (&tile)[kTileColumns][kTileRows], float* const (&rows)[kTileRows]) {
    for (int i = 0; i < kTileRows; i += 4) {
        for (int j = 0; j < kTileColumns; j += 4) {
            Float4 v[4];
            for (int k = 0; k < 4; ++k) __builtin_memcpy(&v[k], &tile[j + k][i], sizeof v[k]);
            transpose4(v);
            for (int k = 0; k < 4; ++k) __builtin_memcpy(rows[i + k] + j, &v[k], sizeof v[k]);
        }
    }
}

// Three rounds of interleaving the first half of the rows with the second.
static inline void to_tile(const uint8_t* const (&rows)[kTileRows],
                           uint8_t (&tile)[kTileColumns][kTileRows]) {
    Byte16 v[kTileRows], w[kTileRows];
    for (int i = 0; i < kTileRows; ++i) __builtin_memcpy(&v[i], rows[i], sizeof v[i]);
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 4; ++i) {
            w[2 * i] = __builtin_shufflevector(v[i], v[i + 4],  //
                                               0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 4],  //
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < kTileRows; ++i) v[i] = w[i];
    }
    __builtin_memcpy(tile, v, sizeof v);
}

// The processor's own prefetching stops at a page's end, which is about a row's end.
template <typename T>
static inline void prefetch(const RowPointers<T>& rows, int64_t j) {
    for (T* row : rows.row) __builtin_prefetch(row + (j > 0 ? j : 0));
}

template <typename T>
struct Tile {
    T data[kTileColumns][kTileRows];

    // Columns [j, j + n) of the rows, 0 to their right.
    void read(const RowPointers<const T>& from, int64_t j, int64_t n) {
        const T* rows[kTileRows];
        T copy[kTileRows][kTileColumns];
        for (int i = 0; i < kTileRows; ++i) rows[i] = from.row[i] + j;
        if (n < kTileColumns) {
            for (int i = 0; i < kTileRows; ++i) {
                __builtin_memset(copy[i], 0, sizeof copy[i]);
                __builtin_memcpy(copy[i], rows[i], n * sizeof(T));
                rows[i] = copy[i];
            }
        }
        to_tile(rows, data);
    }

    void write(const RowPointers<T>& to, int64_t j, int64_t n) const {
        T* rows[kTileRows];
        T copy[kTileRows][kTileColumns];
        for (int i = 0; i < kTileRows; ++i) rows[i] = n < kTileColumns ? copy[i] : to.row[i] + j;
        from_tile(data, rows);
        if (n < kTileColumns)
            for (int i = 0; i < kTileRows; ++i) __builtin_memcpy(to.row[i] + j, copy[i], n * sizeof(T));
    }
};

// Without values: only the discounted sums, into `advantages`.
template <typename T, bool kValues>
static void scan(const T* rewards, const T* values, const uint8_t* mask, int64_t first, int64_t rows,
                 int64_t steps, double gamma, double lam, T* advantages, T* returns) {
    constexpr int kVectors = kTileRows / kLanes;
    const RowPointers<const T> reward_rows(rewards, first, rows, steps);
    const RowPointers<const T> value_rows(kValues ? values : rewards, first, rows, steps);
    const RowPointers<const uint8_t> mask_rows(mask, first, rows, steps);
    const RowPointers<T> advantage_rows(advantages, first, rows, steps);
    const RowPointers<T> return_rows(kValues ? returns : advantages, first, rows, steps);
    Tile<T> reward, value, out, sum;
    Tile<uint8_t> kept;
    Doubles running[kVectors] = {}, next_value[kVectors] = {};
    const double decay = gamma * lam;
    for (int64_t end = steps; end > 0; end -= kTileColumns) {
        const int64_t n = end < kTileColumns ? end : kTileColumns, j = end - n;
        const int64_t ahead = j - 2 * kTileColumns;
        prefetch(reward_rows, ahead), prefetch(mask_rows, ahead), prefetch(advantage_rows, ahead);
        if constexpr (kValues) prefetch(value_rows, ahead), prefetch(return_rows, ahead);
        reward.read(reward_rows, j, n);
        kept.read(mask_rows, j, n);
        if constexpr (kValues) value.read(value_rows, j, n);
        for (int t = kTileColumns; t-- > 0;) {
            for (int i = 0; i < kVectors; ++i) {
                const Longs keep = load_mask(&kept.data[t][i * kLanes]);
                Doubles step = load_doubles(&reward.data[t][i * kLanes]);
                if constexpr (kValues) {
                    const Doubles v = load_doubles(&value.data[t][i * kLanes]);
                    step += gamma * next_value[i] - v;
                    next_value[i] = keep ? v : next_value[i];
                    running[i] = keep ? step + decay * running[i] : running[i];
                    store_doubles(&sum.data[t][i * kLanes], keep ? running[i] + v : Doubles{});
                } else {
                    running[i] = keep ? step + decay * running[i] : running[i];
                }
                store_doubles(&out.data[t][i * kLanes], keep ? running[i] : Doubles{});
            }
        }
        out.write(advantage_rows, j, n);
        if constexpr (kValues) sum.write(return_rows, j, n);
    }
}

// A column outside the mask is skipped as if it were not there: what lies in it (NaN, inf) is never read.
template <typename T>
void gae(const T* rewards, const T* values, const uint8_t* mask, int64_t rows, int64_t steps, double gamma,
         double lam, T* advantages, T* returns, int threads) {
    if (rows * steps < kSmall) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < rows; first += kTileRows)
        scan<T, true>(rewards, values, mask, first, rows, steps, gamma, lam, advantages, returns);
}

template <typename T>
void discounted_returns(const T* rewards, const uint8_t* mask, int64_t rows, int64_t steps, double gamma,
                        T* returns, int threads) {
    if (rows * steps < kSmall) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < rows; first += kTileRows)
        scan<T, false>(rewards, nullptr, mask, first, rows, steps, gamma, 1.0, returns, nullptr);
}

}  // namespace rolemesh::ROLEMESH_ISA
