#include "check.h"

namespace rolemesh {

void test_groups(const Kernels& kernels) {
    std::mt19937 random(4);
    for (int64_t n : {0, 1, 5, 64, 1001})
        for (int64_t groups : {1, 2, 7, 300}) {
            const std::vector<double> scores = normal<double>(n, random);
            std::vector<int64_t> group(n);
            for (int64_t& g : group) g = int64_t(random() % groups);
            std::vector<double> out(3 * groups, 7);
            kernels.group_moments(scores.data(), group.data(), n, groups, out.data());
            for (int64_t g = 0; g < groups; ++g) {
                double count = 0, mean = 0, squares = 0;
                for (int64_t i = 0; i < n; ++i)
                    if (group[i] == g) count += 1, mean += scores[i];
                if (count > 0) mean /= count;
                for (int64_t i = 0; i < n; ++i)
                    if (group[i] == g) squares += (scores[i] - mean) * (scores[i] - mean);
                CHECK(out[g] == count, "%g != %g", out[g], count);
                CHECK(near(out[groups + g], mean, 1e-12), "%g != %g", out[groups + g], mean);
                CHECK(near(out[2 * groups + g], squares, 1e-9), "%g != %g", out[2 * groups + g], squares);
            }
        }
}

}  // namespace rolemesh
