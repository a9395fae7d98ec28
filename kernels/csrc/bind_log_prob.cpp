#include "bindings.h"

namespace rolemesh {

using Logits = nb::ndarray<nb::ndim<2>, nb::device::cpu>;
using Labels = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

static Dtype dtype_of(nb::dlpack::dtype type) {
    if (type == nb::dtype<float>()) return Dtype::f32;
    if (type == nb::dtype<double>()) return Dtype::f64;
    if (type == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1}) return Dtype::bf16;
    if (type == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1}) return Dtype::f16;
    throw nb::type_error("logits must be float32, float64, bfloat16 or float16");
}

static Matrix matrix_of(const Logits& logits) {
    const int64_t rows = logits.shape(0), columns = logits.shape(1);
    if (columns > 1 && rows > 0 && logits.stride(1) != 1) throw nb::value_error("columns must be contiguous");
    return {logits.data(), dtype_of(logits.dtype()), rows, columns, logits.stride(0)};
}

// `numbers` is [n_rows, n], in double where the logits are, else in float; `labels` is [n].
static void check(const Matrix& logits, const Labels& labels, const Rows& numbers, size_t n_rows) {
    if (int64_t(labels.shape(0)) != logits.rows || int64_t(numbers.shape(1)) != logits.rows ||
        numbers.shape(0) != n_rows)
        throw nb::value_error("labels and numbers must have one column for each row of the logits");
    const auto wanted = logits.dtype == Dtype::f64 ? nb::dtype<double>() : nb::dtype<float>();
    if (numbers.dtype() != wanted)
        throw nb::type_error("numbers must be float64 for float64 logits, else float32");
}

void bind_log_prob(nb::module_& module, const Kernels& kernels) {
    module.def(
        "log_prob_stats",
        [run = kernels.log_prob_stats](Logits logits, Labels labels, Rows stats, double inv_temperature,
                                       bool entropy, int threads) {
            const Matrix x = matrix_of(logits);
            check(x, labels, stats, 4);
            nb::gil_scoped_release release;
            run(x, labels.data(), stats.data(), inv_temperature, entropy, threads);
        },
        nb::arg("logits").noconvert(), nb::arg("labels").noconvert(), nb::arg("stats").noconvert(),
        nb::arg("inv_temperature"), nb::arg("entropy"), nb::arg("threads"));
    module.def(
        "log_prob_backward",
        [run = kernels.log_prob_backward](Logits logits, Labels labels, Rows numbers, double inv_temperature,
                                          bool entropy, Logits out, int threads) {
            const Matrix x = matrix_of(logits), y = matrix_of(out);
            check(x, labels, numbers, 5);
            if (y.dtype != x.dtype || y.rows != x.rows || y.columns != x.columns)
                throw nb::value_error("out must have the shape and the type of the logits");
            nb::gil_scoped_release release;
            run(x, labels.data(), numbers.data(), inv_temperature, entropy, y, threads);
        },
        nb::arg("logits").noconvert(), nb::arg("labels").noconvert(), nb::arg("numbers").noconvert(),
        nb::arg("inv_temperature"), nb::arg("entropy"), nb::arg("out").noconvert(), nb::arg("threads"));
}

}  // namespace rolemesh
