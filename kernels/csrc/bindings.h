// From Python's arrays to plain pointers. Each `bind_*` adds one instruction set's functions to its module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "kernels.h"

namespace rolemesh {

namespace nb = nanobind;

template <typename T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void bind_log_prob(nb::module_& module, const Kernels& kernels);
void bind_advantages(nb::module_& module, const Kernels& kernels);

}  // namespace rolemesh
