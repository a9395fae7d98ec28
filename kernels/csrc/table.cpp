// The functions of the instruction set that this file is compiled for.
#include "gae.h"

namespace rolemesh::ROLEMESH_ISA {

const Kernels kernels = {
    .gae_f32 = gae<float>,
    .gae_f64 = gae<double>,
};

}  // namespace rolemesh::ROLEMESH_ISA
