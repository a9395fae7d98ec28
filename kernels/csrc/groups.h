// Moments of the scores of each group.
#pragma once

#include "kernels.h"

namespace rolemesh::ROLEMESH_ISA {

// out[3][groups]: count, mean, sum of squared deviations. Rows are added in their order. Every row's group
// lies in [0, groups): the caller has looked.
static void group_moments(const double* scores, const int64_t* group, int64_t n, int64_t groups,
                          double* out) {
    double *count = out, *mean = out + groups, *squares = out + 2 * groups;
    for (int64_t i = 0; i < 3 * groups; ++i) out[i] = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        count[group[i]] += 1.0;
        mean[group[i]] += scores[i];
    }
    for (int64_t g = 0; g < groups; ++g)
        if (count[g] > 0.0) mean[g] /= count[g];
    for (int64_t i = 0; i < n; ++i) {
        const double deviation = scores[i] - mean[group[i]];
        squares[group[i]] += deviation * deviation;
    }
}

}  // namespace rolemesh::ROLEMESH_ISA
