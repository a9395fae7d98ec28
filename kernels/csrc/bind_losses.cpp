#include <nanobind/stl/string.h>

#include "bindings.h"

namespace rolemesh {

static KlKind kl_kind(const std::string& name) {
    const char* names[] = {"k1", "abs", "k2", "k3"};
    for (int kind = 0; kind < 4; ++kind)
        if (name == names[kind]) return KlKind(kind);
    throw nb::value_error("the kind of KL must be k1, abs, k2 or k3");
}

template <typename T>
static void bind_kl(nb::module_& module, Kl<T>* kl, KlBackward<T>* kl_backward) {
    module.def("kl", [kl](In1<T> log_prob, In1<T> ref, const std::string& kind, Out1<T> out, int threads) {
        check_shapes(log_prob, ref, out);
        const KlKind which = kl_kind(kind);
        nb::gil_scoped_release release;
        kl(log_prob.data(), ref.data(), out.shape(0), which, out.data(), threads);
    });
    module.def("kl_backward", [kl_backward](In1<T> grad, In1<T> log_prob, In1<T> ref, const std::string& kind,
                                            Out1<T> out, int threads) {
        check_shapes(grad, log_prob, ref, out);
        const KlKind which = kl_kind(kind);
        nb::gil_scoped_release release;
        kl_backward(grad.data(), log_prob.data(), ref.data(), out.shape(0), which, out.data(), threads);
    });
}

template <typename T>
static void bind_losses_of(nb::module_& module, PolicyLoss<T>* policy_loss, ValueLoss<T>* value_loss) {
    module.def("policy_loss", [policy_loss](In2<T> old_log_prob, In2<T> log_prob, In2<T> advantages,
                                            In2<uint8_t> mask, double clip_low, double clip_high,
                                            double dual_clip, bool of_sequence_means, double loss_denominator,
                                            double token_denominator, Out1<double> totals, Out2<T> grad,
                                            int threads) {
        check_shapes(old_log_prob, log_prob, advantages, mask, grad);
        if (totals.shape(0) != 4) throw nb::value_error("totals must hold 4 numbers");
        nb::gil_scoped_release release;
        policy_loss(old_log_prob.data(), log_prob.data(), advantages.data(), mask.data(), mask.shape(0),
                    mask.shape(1), clip_low, clip_high, dual_clip,
                    {of_sequence_means, loss_denominator, token_denominator}, totals.data(), grad.data(),
                    threads);
    });
    module.def("value_loss", [value_loss](In2<T> values, In2<T> returns, In2<T> old_values, In2<uint8_t> mask,
                                          double clip, bool of_sequence_means, double loss_denominator,
                                          double token_denominator, Out1<double> totals, Out2<T> grad,
                                          int threads) {
        check_shapes(values, returns, old_values, mask, grad);
        if (totals.shape(0) != 3) throw nb::value_error("totals must hold 3 numbers");
        nb::gil_scoped_release release;
        value_loss(values.data(), returns.data(), old_values.data(), mask.data(), mask.shape(0), mask.shape(1),
                   clip, {of_sequence_means, loss_denominator, token_denominator}, totals.data(), grad.data(),
                   threads);
    });
}

void bind_losses(nb::module_& module, const Kernels& kernels) {
    bind_kl<float>(module, kernels.kl_f32, kernels.kl_backward_f32);
    bind_kl<double>(module, kernels.kl_f64, kernels.kl_backward_f64);
    bind_losses_of<float>(module, kernels.policy_loss_f32, kernels.value_loss_f32);
    bind_losses_of<double>(module, kernels.policy_loss_f64, kernels.value_loss_f64);
}

}  // namespace rolemesh
