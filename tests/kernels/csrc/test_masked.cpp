#include "check.h"

namespace rolemesh {

template <typename T>
static void check_masked(MaskedMoments<T>* moments, MaskedNormalize<T>* normalize, int64_t n, double share,
                         int threads, std::mt19937& random) {
    const std::vector<uint8_t> mask = random_mask(n, random, share);
    std::vector<T> values = normal<T>(n, random);
    for (T& value : values) value += T(100);
    spoil_outside(values, mask);
    double count = 0, mean = 0, squares = 0, out[3] = {7, 7, 7};
    for (int64_t i = 0; i < n; ++i)
        if (mask[i]) count += 1, mean += values[i];
    if (count > 0) mean /= count;
    for (int64_t i = 0; i < n; ++i)
        if (mask[i]) squares += (values[i] - mean) * (values[i] - mean);
    moments(values.data(), mask.data(), n, out, threads);
    CHECK(out[0] == count, "%g != %g", out[0], count);
    CHECK(near(out[1], mean, 1e-11), "%.17g != %.17g", out[1], mean);
    CHECK(near(out[2], squares, 1e-9 * (1 + squares)), "%.17g != %.17g", out[2], squares);

    std::vector<T> result(n, T(7));
    normalize(values.data(), mask.data(), n, 100.0, 0.5, 0.25, result.data(), threads);
    for (int64_t i = 0; i < n; ++i) {
        const double expected = mask[i] ? (values[i] - 100.0) * 0.5 + 0.25 : 0;
        CHECK(near(result[i], expected, sizeof(T) == 8 ? 1e-13 : 1e-6), "%g != %g", double(result[i]),
            expected);
    }
}

void test_masked(const Kernels& kernels) {
    std::mt19937 random(3);
    for (int64_t n : {0, 1, 3, 4, 5, 15, 16, 17, 1000, 4095, 4097, 70001})
        for (double share : {0.0, 0.6, 1.0})
            for (int threads : {1, 2, 3}) {
                check_masked<float>(kernels.masked_moments_f32, kernels.masked_normalize_f32, n, share,
                    threads, random);
                check_masked<double>(kernels.masked_moments_f64, kernels.masked_normalize_f64, n, share,
                                     threads, random);
            }
}

}  // namespace rolemesh
