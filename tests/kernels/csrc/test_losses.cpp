#include "check.h"

namespace rolemesh {

static double kl_of(KlKind kind, double x, double* slope) {
    switch (kind) {
        case KlKind::k1: *slope = 1; return x;
        case KlKind::abs: *slope = double(x > 0) - double(x < 0); return std::abs(x);
        case KlKind::k2: *slope = x; return 0.5 * x * x;
        case KlKind::k3: break;
    }
    const double r = std::min(std::max(-x, -20.0), 20.0), k3 = std::expm1(r) - r;
    *slope = std::abs(x) > 20 || k3 > 10 ? 0 : -std::expm1(r);
    return std::min(k3, 10.0);
}

template <typename T>
static void check_kl(Kl<T>* kl, KlBackward<T>* backward, KlKind kind, int64_t n, int threads,
    std::mt19937& random) {
    const double tolerance = sizeof(T) == 8 ? 1e-12 : 1e-6;
    const std::vector<T> now = normal<T>(n, random, 4.0), ref = normal<T>(n, random, 4.0);
    const std::vector<T> grad = normal<T>(n, random);
    std::vector<T> out(n, T(7)), slopes(n, T(7));
    kl(now.data(), ref.data(), n, kind, out.data(), threads);
    backward(grad.data(), now.data(), ref.data(), n, kind, slopes.data(), threads);
    for (int64_t i = 0; i < n; ++i) {
        double slope;
        const double value = kl_of(kind, double(now[i]) - double(ref[i]), &slope);
        CHECK(near(out[i], value, tolerance * (1 + std::abs(value))), "%g != %g", double(out[i]), value);
        CHECK(near(slopes[i], grad[i] * slope, tolerance * (1 + std::abs(grad[i] * slope))), "%g != %g",
              double(slopes[i]), grad[i] * slope);
    }
}

struct Terms {
    double sums[4] = {};
    double slope = 0;
};

static Terms policy_terms(double old, double now, double advantage, double low, double high, double dual) {
    const double ratio = std::exp(now - old), limited = std::min(std::max(ratio, 1 - low), 1 + high);
    const double unclipped = -advantage * ratio, clipped = -advantage * limited;
    const double worse = std::max(unclipped, clipped);
    const bool bounded = advantage < 0 && worse > -advantage * dual;
    Terms terms;
    terms.sums[0] = bounded ? -advantage * dual : worse;
    terms.sums[1] = clipped > unclipped;
    terms.sums[2] = bounded;
    terms.sums[3] = old - now;
    terms.slope = bounded || clipped > unclipped ? 0 : unclipped;
    return terms;
}

static Terms value_terms(double value, double target, double old, double clip) {
    const double limited = std::min(std::max(value, old - clip), old + clip);
    const double error = value - target, clipped = limited - target;
    Terms terms;
    terms.sums[0] = 0.5 * std::max(error * error, clipped * clipped);
    terms.sums[1] = clipped * clipped > error * error;
    terms.sums[2] = value;
    terms.slope = terms.sums[1] != 0 ? (value == limited ? clipped : 0) : error;
    return terms;
}

// run(a, b, c, mask, mean, totals, grad) against terms(a, b, c) of each kept element.
template <typename T, typename Run, typename Terms_>
static void check_loss(int n_totals, int64_t rows, int64_t columns, bool of_sequence_means,
                       std::mt19937& random, Run run, Terms_ terms) {
    const int64_t n = rows * columns;
    const double tolerance = sizeof(T) == 8 ? 1e-11 : 1e-6;
    const std::vector<uint8_t> mask = random_mask(n, random);
    std::vector<T> a = normal<T>(n, random), b = normal<T>(n, random), c = normal<T>(n, random),
        grad(n, T(7));
    for (auto* array : {&a, &b, &c}) spoil_outside(*array, mask);
    const LossMean mean{of_sequence_means, 3.0, 5.0};
    std::vector<double> totals(n_totals, 7.0), expected(n_totals, 0.0);
    run(a.data(), b.data(), c.data(), mask.data(), mean, totals.data(), grad.data());
    for (int64_t i = 0; i < rows; ++i) {
        double count = 0;
        for (int64_t k = i * columns; k < (i + 1) * columns; ++k) count += mask[k];
        const double divisor = of_sequence_means ? 3.0 * std::max(count, 1.0) : 3.0;
        for (int64_t k = i * columns; k < (i + 1) * columns; ++k) {
            if (!mask[k]) {
                CHECK(grad[k] == 0, "%g outside of the mask", double(grad[k]));
                continue;
            }
            const Terms term = terms(a[k], b[k], c[k]);
            for (int t = 0; t < n_totals; ++t) expected[t] += term.sums[t] / (t == 0 ? divisor : 5.0);
            const double slope = term.slope / divisor;
            CHECK(near(grad[k], slope, tolerance * (1 + std::abs(slope))), "%g != %g", double(grad[k]),
                slope);
        }
    }
    for (int t = 0; t < n_totals; ++t)
        CHECK(near(totals[t], expected[t], 1e-10 * (1 + std::abs(expected[t]))), "total %d: %.17g != %.17g",
              t, totals[t], expected[t]);
}

template <typename T>
static void check_losses(PolicyLoss<T>* policy, ValueLoss<T>* value, int64_t rows, int64_t columns,
                         bool means, int threads, std::mt19937& random) {
    for (double dual : {3.0, kInfinity})
        check_loss<T>(
            4, rows, columns, means, random,
            [=](auto a, auto b, auto c, auto mask, const LossMean& mean, double* totals, T* grad) {
                policy(a, b, c, mask, rows, columns, 0.2, 0.3, dual, mean, totals, grad, threads);
            },
            [=](double a, double b, double c) { return policy_terms(a, b, c, 0.2, 0.3, dual); });
    for (double clip : {0.5, kInfinity})
        check_loss<T>(
            3, rows, columns, means, random,
            [=](auto a, auto b, auto c, auto mask, const LossMean& mean, double* totals, T* grad) {
                value(a, b, c, mask, rows, columns, clip, mean, totals, grad, threads);
            },
            [=](double a, double b, double c) { return value_terms(a, b, c, clip); });
}

void test_losses(const Kernels& kernels) {
    std::mt19937 random(5);
    for (int64_t n : {0, 1, 3, 4, 7, 1001, 70001})
        for (KlKind kind : {KlKind::k1, KlKind::abs, KlKind::k2, KlKind::k3}) {
            check_kl<float>(kernels.kl_f32, kernels.kl_backward_f32, kind, n, 1 + n % 3, random);
            check_kl<double>(kernels.kl_f64, kernels.kl_backward_f64, kind, n, 1 + n % 3, random);
        }
    for (int64_t rows : {0, 1, 3, 33})
        for (int64_t columns : {0, 1, 4, 7, 1001})
            for (bool means : {false, true}) {
                check_losses<float>(kernels.policy_loss_f32, kernels.value_loss_f32, rows, columns, means, 2,
                    random);
                check_losses<double>(kernels.policy_loss_f64, kernels.value_loss_f64, rows, columns, means,
                    1, random);
            }
}

}  // namespace rolemesh
