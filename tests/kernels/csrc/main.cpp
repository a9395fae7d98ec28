// Every function of each instruction set that this processor has, against plain loops in double.
#include "check.h"

using namespace rolemesh;

static void test(const char* isa, const Kernels& kernels) {
    test_log_prob(kernels);
    test_advantages(kernels);
    test_masked(kernels);
    test_groups(kernels);
    test_losses(kernels);
    std::printf("%s: passed\n", isa);
}

int main() {
    test("portable", portable::kernels);
#ifdef ROLEMESH_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        test("avx2", avx2::kernels);
    else
        std::printf("avx2: left out, this processor has none\n");
#endif
}
