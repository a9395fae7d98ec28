#include "check.h"

namespace rolemesh {

template <typename T>
static void check_advantages(Gae<T>* gae, DiscountedReturns<T>* discounted_returns, int64_t rows,
                             int64_t steps, double gamma, double lam, int threads, std::mt19937& random) {
    const int64_t n = rows * steps;
    const double tolerance = sizeof(T) == 8 ? 1e-12 : 1e-5;
    const std::vector<uint8_t> mask = random_mask(n, random);
    std::vector<T> rewards = normal<T>(n, random), values = normal<T>(n, random);
    spoil_outside(rewards, mask);
    spoil_outside(values, mask);
    std::vector<T> advantages(n, T(7)), returns(n, T(7)), discounted(n, T(7));
    gae(rewards.data(), values.data(), mask.data(), rows, steps, gamma, lam, advantages.data(),
        returns.data(), threads);
    discounted_returns(rewards.data(), mask.data(), rows, steps, gamma, discounted.data(), threads);
    for (int64_t i = 0; i < rows; ++i) {
        double next = 0, advantage = 0, total = 0;
        for (int64_t k = (i + 1) * steps; k-- > i * steps;) {
            if (!mask[k]) {
                CHECK(advantages[k] == 0 && returns[k] == 0 && discounted[k] == 0, "element %ld of %ldx%ld",
                      long(k), long(rows), long(steps));
                continue;
            }
            advantage = rewards[k] + gamma * next - values[k] + gamma * lam * advantage;
            next = values[k];
            total = rewards[k] + gamma * total;
            const double scale = tolerance * (1 + std::abs(advantage) + std::abs(total));
            CHECK(near(advantages[k], advantage, scale), "%g != %g", double(advantages[k]), advantage);
            CHECK(near(returns[k], advantage + next, scale), "%g != %g", double(returns[k]),
                advantage + next);
            CHECK(near(discounted[k], total, scale), "%g != %g", double(discounted[k]), total);
        }
    }
}

void test_advantages(const Kernels& kernels) {
    std::mt19937 random(2);
    for (int64_t rows : {0, 1, 2, 3, 5, 8, 17})
        for (int64_t steps : {0, 1, 2, 7, 8, 33, 1000})
            for (int threads : {1, 2, 3}) {
                check_advantages<float>(kernels.gae_f32, kernels.discounted_returns_f32, rows, steps, 0.99,
                                        0.95, threads, random);
                check_advantages<double>(kernels.gae_f64, kernels.discounted_returns_f64, rows, steps, 1.0,
                                         1.0, threads, random);
            }
}

}  // namespace rolemesh
