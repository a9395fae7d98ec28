// Generalised advantage estimation (Schulman et al. 2016, eq. 11 and 16), one backward scan per row.
#pragma once

#include "kernels.h"

namespace rolemesh::ROLEMESH_ISA {

// A column outside the mask is skipped as if it were not there: what lies in it (NaN, inf) is never read.
template <typename T>
void gae(const T* rewards, const T* values, const uint8_t* mask, int64_t rows, int64_t steps, double gamma,
         double lam, T* advantages, T* returns, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; ++i) {
        double next_value = 0.0, running = 0.0;
        for (int64_t j = steps; j-- > 0;) {
            const int64_t k = i * steps + j;
            if (mask[k]) {
                const double delta = double(rewards[k]) + gamma * next_value - double(values[k]);
                running = delta + gamma * lam * running;
                next_value = double(values[k]);
            }
            advantages[k] = T(mask[k] ? running : 0.0);
            returns[k] = T(mask[k] ? running + double(values[k]) : 0.0);
        }
    }
}

}  // namespace rolemesh::ROLEMESH_ISA
