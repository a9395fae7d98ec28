// The functions of the instruction set that this file is compiled for.
#include "gae.h"
#include "log_prob.h"

namespace rolemesh::ROLEMESH_ISA {

const Kernels kernels = {
    .log_prob_stats = log_prob_stats,
    .log_prob_backward = log_prob_backward,
    .gae_f32 = gae<float>,
    .gae_f64 = gae<double>,
};

}  // namespace rolemesh::ROLEMESH_ISA
