// Generalised advantage estimation (Schulman et al. 2016, eq. 11 and 16), one backward scan per row.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

namespace nb = nanobind;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A column outside the mask is skipped as if it were not there: what lies in it (NaN, inf) is never read.
template <typename T>
void gae(In<T> rewards, In<T> values, Mask mask, double gamma, double lam, Out<T> advantages) {
    const size_t rows = rewards.shape(0), steps = rewards.shape(1);
    const T* r = rewards.data();
    const T* v = values.data();
    const uint8_t* m = mask.data();
    T* a = advantages.data();
    nb::gil_scoped_release release;
    for (size_t i = 0; i < rows; ++i) {
        double next_value = 0.0, running = 0.0;
        for (size_t j = steps; j-- > 0;) {
            const size_t k = i * steps + j;
            if (m[k]) {
                const double delta = double(r[k]) + gamma * next_value - double(v[k]);
                running = delta + gamma * lam * running;
                next_value = double(v[k]);
            }
            a[k] = T(m[k] ? running : 0.0);
        }
    }
}

NB_MODULE(_cpu, module) {
    module.def("gae", &gae<float>);
    module.def("gae", &gae<double>);
}
