// The operations on plain pointers, compiled once for each instruction set. No Python here.
//
// Every header below is compiled by table.cpp, which is built with the flags of an instruction set. They must
// not use inline functions of the standard library: the linker keeps one copy of those, which a processor
// without AVX2 could then meet.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rolemesh {

constexpr int64_t kSmall = 1 << 15;  // elements below which one thread is quicker than waking the others

enum class Dtype { f32, f64, bf16, f16 };

// [rows, columns], columns contiguous; consecutive rows are `stride` elements apart.
struct Matrix {
    void* data;
    Dtype dtype;
    int64_t rows, columns, stride;
};

template <typename T>
using Gae = void(const T* rewards, const T* values, const uint8_t* mask, int64_t rows, int64_t steps,
                 double gamma, double lam, T* advantages, T* returns, int threads);

template <typename T>
using DiscountedReturns = void(const T* rewards, const uint8_t* mask, int64_t rows, int64_t steps, double gamma,
                               T* returns, int threads);

template <typename T>
using MaskedMoments = void(const T* values, const uint8_t* mask, int64_t n, double* out, int threads);
template <typename T>
using MaskedNormalize = void(const T* values, const uint8_t* mask, int64_t n, double shift, double scale, double add,
                             T* out, int threads);
using GroupMoments = void(const double* scores, const int64_t* group, int64_t n, int64_t groups, double* out);

enum class KlKind { k1, abs, k2, k3 };
template <typename T>
using Kl = void(const T* log_prob, const T* ref, int64_t n, KlKind kind, T* out, int threads);
template <typename T>
using KlBackward = void(const T* grad, const T* log_prob, const T* ref, int64_t n, KlKind kind, T* out, int threads);

// What a sum over tokens is divided by: a loss also by its sequence's tokens where it is a mean of means.
struct LossMean {
    bool of_sequence_means;
    double loss, tokens;
};
template <typename T>
using PolicyLoss = void(const T* old_log_prob, const T* log_prob, const T* advantages, const uint8_t* mask,
                        int64_t rows, int64_t columns, double clip_low, double clip_high, double dual_clip,
                        const LossMean& mean, double* totals, T* grad, int threads);
template <typename T>
using ValueLoss = void(const T* values, const T* returns, const T* old_values, const uint8_t* mask, int64_t rows,
                       int64_t columns, double clip, const LossMean& mean, double* totals, T* grad, int threads);

// stats [4, rows] and numbers [5, rows] are double for f64 logits, else float; log_prob.py says what they hold.
using LogProbStats = void(Matrix logits, const int64_t* labels, void* stats, double inv_temperature, bool entropy,
                          int threads);
using LogProbBackward = void(Matrix logits, const int64_t* labels, const void* numbers, double inv_temperature,
                             bool entropy, Matrix out, int threads);

// One instruction set's functions, as pointers.
struct Kernels {
    LogProbStats* log_prob_stats;
    LogProbBackward* log_prob_backward;
    Gae<float>* gae_f32;
    Gae<double>* gae_f64;
    DiscountedReturns<float>* discounted_returns_f32;
    DiscountedReturns<double>* discounted_returns_f64;
    MaskedMoments<float>* masked_moments_f32;
    MaskedMoments<double>* masked_moments_f64;
    MaskedNormalize<float>* masked_normalize_f32;
    MaskedNormalize<double>* masked_normalize_f64;
    Kl<float>* kl_f32;
    Kl<double>* kl_f64;
    KlBackward<float>* kl_backward_f32;
    KlBackward<double>* kl_backward_f64;
    PolicyLoss<float>* policy_loss_f32;
    PolicyLoss<double>* policy_loss_f64;
    ValueLoss<float>* value_loss_f32;
    ValueLoss<double>* value_loss_f64;
    GroupMoments* group_moments;
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {  // defined where ROLEMESH_AVX2 is
extern const Kernels kernels;
}

}  // namespace rolemesh
