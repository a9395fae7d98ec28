// The Python module: one sub-module for each instruction set, with the same functions.
#include "bindings.h"

using namespace rolemesh;

static void bind(nb::module_ module, const Kernels& kernels) {
    bind_log_prob(module, kernels);
    bind_advantages(module, kernels);
    bind_losses(module, kernels);
}

static bool has_avx2() {
#ifdef ROLEMESH_AVX2
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

NB_MODULE(_cpu, module) {
    module.def("has_avx2", &has_avx2);
    bind(module.def_submodule("portable"), portable::kernels);
#ifdef ROLEMESH_AVX2
    bind(module.def_submodule("avx2"), avx2::kernels);
#endif
}
