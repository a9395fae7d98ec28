#include "bindings.h"

namespace rolemesh {

template <typename T>
static void bind_scans(nb::module_& module, Gae<T>* gae, DiscountedReturns<T>* discounted_returns) {
    module.def("gae", [gae](In2<T> rewards, In2<T> values, In2<uint8_t> mask, double gamma, double lam,
                            Out2<T> advantages, Out2<T> returns, int threads) {
        check_shapes(rewards, values, mask, advantages, returns);
        nb::gil_scoped_release release;
        gae(rewards.data(), values.data(), mask.data(), rewards.shape(0), rewards.shape(1), gamma, lam,
            advantages.data(), returns.data(), threads);
    });
    module.def("discounted_returns", [discounted_returns](In2<T> rewards, In2<uint8_t> mask, double gamma,
                                                          Out2<T> returns, int threads) {
        check_shapes(rewards, mask, returns);
        nb::gil_scoped_release release;
        discounted_returns(rewards.data(), mask.data(), rewards.shape(0), rewards.shape(1), gamma,
                           returns.data(), threads);
    });
}

template <typename T>
static void bind_masked(nb::module_& module, MaskedMoments<T>* moments, MaskedNormalize<T>* normalize) {
    module.def("masked_moments", [moments](In1<T> values, In1<uint8_t> mask, Out1<double> out, int threads) {
        check_shapes(values, mask);
        if (out.shape(0) != 3) throw nb::value_error("out must hold 3 numbers");
        nb::gil_scoped_release release;
        moments(values.data(), mask.data(), values.shape(0), out.data(), threads);
    });
    module.def("masked_normalize", [normalize](In1<T> values, In1<uint8_t> mask, double shift, double scale,
                                               double add, Out1<T> out, int threads) {
        check_shapes(values, mask, out);
        nb::gil_scoped_release release;
        normalize(values.data(), mask.data(), values.shape(0), shift, scale, add, out.data(), threads);
    });
}

void bind_advantages(nb::module_& module, const Kernels& kernels) {
    bind_scans<float>(module, kernels.gae_f32, kernels.discounted_returns_f32);
    bind_scans<double>(module, kernels.gae_f64, kernels.discounted_returns_f64);
    bind_masked<float>(module, kernels.masked_moments_f32, kernels.masked_normalize_f32);
    bind_masked<double>(module, kernels.masked_moments_f64, kernels.masked_normalize_f64);
    module.def("group_moments", [run = kernels.group_moments](In1<double> scores, In1<int64_t> group,
                                                              Out2<double> out) {
        check_shapes(scores, group);
        const int64_t n = scores.shape(0), groups = out.shape(1);
        if (out.shape(0) != 3) throw nb::value_error("out must hold 3 numbers for each group");
        for (int64_t i = 0; i < n; ++i)
            if (group.data()[i] < 0 || group.data()[i] >= groups)
                throw nb::index_error("a row's group is not in [0, number of groups)");
        nb::gil_scoped_release release;
        run(scores.data(), group.data(), n, groups, out.data());
    });
}

}  // namespace rolemesh
