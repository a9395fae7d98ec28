// The functions of the instruction set that this file is compiled for.
#include "gae.h"
#include "groups.h"
#include "log_prob.h"
#include "losses.h"
#include "masked.h"

namespace rolemesh::ROLEMESH_ISA {

const Kernels kernels = {
    .log_prob_stats = log_prob_stats,
    .log_prob_backward = log_prob_backward,
    .gae_f32 = gae<float>,
    .gae_f64 = gae<double>,
    .discounted_returns_f32 = discounted_returns<float>,
    .discounted_returns_f64 = discounted_returns<double>,
    .masked_moments_f32 = masked_moments<float>,
    .masked_moments_f64 = masked_moments<double>,
    .masked_normalize_f32 = masked_normalize<float>,
    .masked_normalize_f64 = masked_normalize<double>,
    .kl_f32 = kl<float>,
    .kl_f64 = kl<double>,
    .kl_backward_f32 = kl_backward<float>,
    .kl_backward_f64 = kl_backward<double>,
    .policy_loss_f32 = policy_loss<float>,
    .policy_loss_f64 = policy_loss<double>,
    .value_loss_f32 = value_loss<float>,
    .value_loss_f64 = value_loss<double>,
    .group_moments = group_moments,
};

}  // namespace rolemesh::ROLEMESH_ISA
