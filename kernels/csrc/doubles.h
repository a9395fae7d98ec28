// Vectors of doubles, as wide as a register: advantages, statistics and losses are computed in double, as
// memory and not arithmetic decides their time.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rolemesh::ROLEMESH_ISA {

constexpr int kLanes = Vector<double>::kLanes;
constexpr int kChunks = 64;          // parts of a sum, merged in order: the number of threads changes nothing

using Doubles = Vec<double>;
typedef int64_t Longs __attribute__((vector_size(kVectorBytes)));  // a mask: -1 or 0 in each lane
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));

static inline Doubles broadcast(double value) { return value - Doubles{}; }

static inline Doubles load_doubles(const double* data) {
    Doubles vector;
    __builtin_memcpy(&vector, data, sizeof vector);
    return vector;
}

static inline Doubles load_doubles(const float* data) {
    HalfFloats vector;
    __builtin_memcpy(&vector, data, sizeof vector);
    return __builtin_convertvector(vector, Doubles);
}

static inline void store_doubles(double* data, Doubles vector) {
    __builtin_memcpy(data, &vector, sizeof vector);
}

static inline void store_doubles(float* data, Doubles vector) {
    const HalfFloats narrow = __builtin_convertvector(vector, HalfFloats);
    __builtin_memcpy(data, &narrow, sizeof narrow);
}

static inline Longs load_mask(const uint8_t* mask) {
#ifdef __AVX2__
    int32_t word;
    __builtin_memcpy(&word, mask, sizeof word);
    return (Longs)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(word)) != 0;
#else
    return Longs{mask[0], mask[1]} != 0;
#endif
}

// The last n < kLanes elements; the other lanes are 0, which is "not kept" in a mask.
template <typename T>
static inline Doubles load_some(const T* data, int64_t n) {
    T lanes[kLanes] = {};
    __builtin_memcpy(lanes, data, n * sizeof(T));
    return load_doubles(lanes);
}

template <typename T>
static inline void store_some(T* data, Doubles vector, int64_t n) {
    T lanes[kLanes];
    store_doubles(lanes, vector);
    __builtin_memcpy(data, lanes, n * sizeof(T));
}

static inline Longs load_mask_some(const uint8_t* mask, int64_t n) {
    uint8_t lanes[kLanes] = {};
    __builtin_memcpy(lanes, mask, n);
    return load_mask(lanes);
}

// e^x for |x| <= 700 (NaN stays) in parts that lose no digits near 0: e^x = scale * (1 + tail).
struct Exp {
    Doubles scale;   // 2^n, a power of two
    Doubles r;       // x - n log 2, at most log(2) / 2
    Doubles square;  // e^r - 1 - r
    Doubles value() const { return scale * (1.0 + (r + square)); }
};

static inline Exp exp_parts(Doubles x) {
    constexpr double magic = 0x1.8p52;  // adding it rounds to an integer, which its low bits then hold
    const Doubles shifted = x * 0x1.71547652b82fep0 + magic;
    const Doubles n = shifted - magic;
    const Doubles r = (x - n * 0x1.62e42fefa3800p-1) - n * 0x1.ef35793c76730p-45;
    constexpr double coefficients[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                       1.0 / 40320,     1.0 / 5040,     1.0 / 720,     1.0 / 120,
                                       1.0 / 24,        1.0 / 6,        1.0 / 2};
    Doubles p = broadcast(1.0 / 6227020800);  // Taylor up to r^13: the rest is below 1e-17
    for (double coefficient : coefficients) p = p * r + coefficient;
    return {(Doubles)(((Longs)shifted + 1023) << 52), r, p * r * r};
}

}  // namespace rolemesh::ROLEMESH_ISA
