// Count, mean and squared deviations of the kept values, and the affine map that whitens them.
#pragma once

#include "doubles.h"

namespace rolemesh::ROLEMESH_ISA {

struct Moments {
    double count = 0.0, mean = 0.0, squares = 0.0;

    // Chan, Golub and LeVeque 1979, eq. 2.1.
    void merge(const Moments& other) {
        if (other.count == 0.0) return;
        const double total = count + other.count, delta = other.mean - mean;
        mean = count == 0.0 ? other.mean : mean + delta * (other.count / total);
        squares = count == 0.0 ? other.squares
                               : squares + other.squares + delta * delta * (count * other.count / total);
        count = total;
    }
};

// Calls step(accumulator, values, keep) on vectors, over four independent accumulators.
template <typename T, typename Step>
static inline Doubles accumulate(const T* values, const uint8_t* mask, int64_t n, Step step) {
    constexpr int kParts = 4;
    Doubles parts[kParts] = {};
    int64_t i = 0;
    for (; i + kParts * kLanes <= n; i += kParts * kLanes)
        for (int k = 0; k < kParts; ++k)
            step(parts[k], load_doubles(values + i + k * kLanes), load_mask(mask + i + k * kLanes));
    for (; i + kLanes <= n; i += kLanes) step(parts[0], load_doubles(values + i), load_mask(mask + i));
    if (i < n) step(parts[1], load_some(values + i, n - i), load_mask_some(mask + i, n - i));
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Two passes over a block that the cache holds.
template <typename T>
static Moments block_moments(const T* values, const uint8_t* mask, int64_t n) {
    Longs counts = {};
    const double total = sum_of(accumulate(values, mask, n, [&](Doubles& part, Doubles x, Longs keep) {
        counts -= keep;
        part += keep ? x : Doubles{};
    }));
    Moments block;
    for (int lane = 0; lane < kLanes; ++lane) block.count += double(counts[lane]);
    if (block.count == 0.0) return block;
    block.mean = total / block.count;
    block.squares = sum_of(accumulate(values, mask, n, [&](Doubles& part, Doubles x, Longs keep) {
        const Doubles deviation = keep ? x - block.mean : Doubles{};
        part += deviation * deviation;
    }));
    return block;
}

// out[3]: count, mean, sum of squared deviations from the mean. The cut into blocks and the order of merging
// do not depend on the number of threads, so neither does the result.
template <typename T>
void masked_moments(const T* values, const uint8_t* mask, int64_t n, double* out, int threads) {
    constexpr int64_t kBlock = 4096;
    Moments chunks[kChunks];
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    if (n < kSmall) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int c = 0; c < kChunks; ++c) {
        for (int64_t b = blocks * c / kChunks; b < blocks * (c + 1) / kChunks; ++b) {
            const int64_t start = b * kBlock, size = n - start < kBlock ? n - start : kBlock;
            chunks[c].merge(block_moments(values + start, mask + start, size));
        }
    }
    Moments all;
    for (const Moments& chunk : chunks) all.merge(chunk);
    out[0] = all.count, out[1] = all.mean, out[2] = all.squares;
}

// out = (value - shift) * scale + add where kept, else 0.
template <typename T>
void masked_normalize(const T* values, const uint8_t* mask, int64_t n, double shift, double scale, double add,
                      T* out, int threads) {
    const auto map = [=](Doubles x, Longs keep) { return keep ? (x - shift) * scale + add : Doubles{}; };
    const int64_t whole = n - n % kLanes;
    if (n < kSmall) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < whole; i += kLanes)
        store_doubles(out + i, map(load_doubles(values + i), load_mask(mask + i)));
    if (const int64_t rest = n - whole)
        store_some(out + whole, map(load_some(values + whole, rest), load_mask_some(mask + whole, rest)), rest);
}

}  // namespace rolemesh::ROLEMESH_ISA
