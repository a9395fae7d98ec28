#include "bindings.h"

namespace rolemesh {

template <typename T>
static void bind_gae(nb::module_& module, Gae<T>* run) {
    module.def("gae", [run](In2<T> rewards, In2<T> values, In2<uint8_t> mask, double gamma, double lam,
                            Out2<T> advantages, Out2<T> returns, int threads) {
        nb::gil_scoped_release release;
        run(rewards.data(), values.data(), mask.data(), rewards.shape(0), rewards.shape(1), gamma, lam,
            advantages.data(), returns.data(), threads);
    });
}

void bind_advantages(nb::module_& module, const Kernels& kernels) {
    bind_gae<float>(module, kernels.gae_f32);
    bind_gae<double>(module, kernels.gae_f64);
}

}  // namespace rolemesh
