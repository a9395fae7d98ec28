// The operations on plain pointers, compiled once for each instruction set. No Python here.
//
// Every header below is compiled by table.cpp, which is built with the flags of an instruction set. They must not
// use inline functions of the standard library: the linker keeps one copy of those, which a processor without AVX2 could then meet.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rolemesh {

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
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {  // defined where ROLEMESH_AVX2 is
extern const Kernels kernels;
}

}  // namespace rolemesh
