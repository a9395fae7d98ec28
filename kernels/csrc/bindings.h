// From Python's arrays to plain pointers. Each `bind_*` adds one instruction set's functions to its module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "kernels.h"

namespace rolemesh {

namespace nb = nanobind;

template <typename T>
using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// ValueError unless all arrays have the shape of the first.
template <typename First, typename... Rest>
void check_shapes(const First& first, const Rest&... rest) {
    const auto differs = [&](const auto& other) {
        for (size_t axis = 0; axis < first.ndim(); ++axis)
            if (other.shape(axis) != first.shape(axis)) return true;
        return false;
    };
    if ((differs(rest) || ...)) throw nb::value_error("the arrays' shapes differ");
}

void bind_log_prob(nb::module_& module, const Kernels& kernels);
void bind_advantages(nb::module_& module, const Kernels& kernels);
void bind_losses(nb::module_& module, const Kernels& kernels);

}  // namespace rolemesh
