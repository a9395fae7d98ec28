// What the tests of the C++ kernels share. Arrays are vectors of exactly the size an operation may touch, so
// that AddressSanitizer sees a step beyond.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "kernels.h"

#define CHECK(condition, ...)                                                                  \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition);      \
            std::fprintf(stderr, __VA_ARGS__);                                                 \
            std::fprintf(stderr, "\n");                                                        \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (false)

namespace rolemesh {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void test_log_prob(const Kernels& kernels);
void test_advantages(const Kernels& kernels);
void test_masked(const Kernels& kernels);
void test_groups(const Kernels& kernels);
void test_losses(const Kernels& kernels);

// Both NaN, equal, or no further apart than the tolerance.
inline bool near(double value, double expected, double tolerance) {
    if (std::isnan(value) || std::isnan(expected)) return std::isnan(value) && std::isnan(expected);
    return value == expected || std::abs(value - expected) <= tolerance;
}

template <typename T>
std::vector<T> normal(int64_t n, std::mt19937& random, double scale = 1.0) {
    std::normal_distribution<double> distribution(0.0, scale);
    std::vector<T> numbers(n);
    for (T& number : numbers) number = T(distribution(random));
    return numbers;
}

inline std::vector<uint8_t> random_mask(int64_t n, std::mt19937& random, double share = 0.7) {
    std::bernoulli_distribution distribution(share);
    std::vector<uint8_t> mask(n);
    for (uint8_t& keep : mask) keep = distribution(random);
    return mask;
}

// What a mask leaves out, and an operation must not read.
template <typename T>
void spoil_outside(std::vector<T>& numbers, const std::vector<uint8_t>& mask) {
    for (size_t i = 0; i < mask.size(); ++i)
        if (!mask[i]) numbers[i] = T(kNan);
}

}  // namespace rolemesh
