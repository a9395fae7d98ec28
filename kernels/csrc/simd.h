// Vectors of the instruction set that this file is compiled for: 32 bytes with AVX2, else 16.
//
// `Vec<A>` holds numbers of type A, in which sums are formed; `read_two` and `write_two` turn memory's types
// into it.
#pragma once

#include <cstdint>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace rolemesh::ROLEMESH_ISA {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

#ifdef __AVX2__
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#define ROLEMESH_VECTOR(T, name) typedef T name __attribute__((vector_size(kVectorBytes)))

// The constants of 2^y. y + kMagic is y rounded to a whole number n, with n + bias in its lowest bits:
// shifted left by the mantissa's width those are the bits of the number 2^n.
template <typename A>
struct Vector;

template <>
struct Vector<float> {
    ROLEMESH_VECTOR(float, V);
    ROLEMESH_VECTOR(uint32_t, Bits);
    static constexpr int kLanes = kVectorBytes / 4, kMantissa = 23;
    static constexpr float kMagic = 0x1.8p23f + 127, kLowest = -127;
    // Minimax of relative error 2e-9 on [-1/2, 1/2] (Remez); rounding makes it at most 1 ulp.
    static constexpr float kPolynomial[] = {0x1p0f,         0x1.62e43p-1f,  0x1.ebfbdap-3f, 0x1.c6aed4p-5f,
                                            0x1.3b2dbcp-7f, 0x1.5f456ap-10f, 0x1.41d334p-13f};
};

template <>
struct Vector<double> {
    ROLEMESH_VECTOR(double, V);
    ROLEMESH_VECTOR(uint64_t, Bits);
    static constexpr int kLanes = kVectorBytes / 8, kMantissa = 52;
    static constexpr double kMagic = 0x1.8p52 + 1023, kLowest = -1023;
    // ln(2)^k / k!, Taylor: the first term left out is below 1e-17.
    static constexpr double kPolynomial[] = {1.0,
                                             0.6931471805599453,
                                             0.2402265069591007,
                                             0.055504108664821576,
                                             0.009618129107628477,
                                             0.0013333558146428441,
                                             0.00015403530393381606,
                                             1.5252733804059838e-05,
                                             1.3215486790144305e-06,
                                             1.0178086009239696e-07,
                                             7.054911620801121e-09,
                                             4.44553827187081e-10,
                                             2.5678435993488196e-11,
                                             1.3691488853904124e-12};
};

template <typename A>
using Vec = typename Vector<A>::V;
template <typename A>
using Bits = typename Vector<A>::Bits;

#ifdef __AVX2__
// The larger of each pair; b where either is NaN.
static inline Vec<float> max_or_second(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
static inline Vec<double> max_or_second(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }

// a * b + c, with one rounding where the processor can.
static inline Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
    return _mm256_fmadd_ps(a, b, c);
}
static inline Vec<double> multiply_add(Vec<double> a, Vec<double> b, Vec<double> c) {
    return _mm256_fmadd_pd(a, b, c);
}
#else
template <typename V>
static inline V max_or_second(V a, V b) {
    return a > b ? a : b;
}

template <typename V>
static inline V multiply_add(V a, V b, V c) {
    return a * b + c;
}
#endif

// 2^y for y in [kLowest, 127]; exactly 0 at kLowest, NaN for NaN.
template <typename A>
static inline Vec<A> exp2_of(Vec<A> y) {
    using Type = Vector<A>;
    const Vec<A> rounded = y + Type::kMagic;
    const Vec<A> fraction = y - (rounded - Type::kMagic);
    constexpr int n = sizeof(Type::kPolynomial) / sizeof(A);
    Vec<A> power = Type::kPolynomial[n - 1] + Vec<A>{};
#pragma GCC unroll 16
    for (int k = n - 2; k >= 0; --k) power = multiply_add(power, fraction, Type::kPolynomial[k] + Vec<A>{});
    return power * Vec<A>(Bits<A>(rounded) << Type::kMantissa);
}

// The sum of the lanes, in double.
template <typename V>
static inline double sum_of(V v) {
    double sum = 0;
    for (unsigned k = 0; k < sizeof(V) / sizeof(v[0]); ++k) sum += double(v[k]);
    return sum;
}

template <typename V>
static inline auto max_of(V v) {
    auto most = v[0];
    for (unsigned k = 1; k < sizeof(V) / sizeof(v[0]); ++k) most = v[k] > most ? v[k] : most;
    return most;
}

// Memory's numbers come and go by two vectors. Which lane holds which number is each type's own; writing
// undoes it.
template <typename A>
struct Two {
    Vec<A> first, second;
};

template <typename A>
static inline Two<A> read_two(const A* x) {
    Vec<A> first, second;
    __builtin_memcpy(&first, x, sizeof first);
    __builtin_memcpy(&second, x + Vector<A>::kLanes, sizeof second);
    return {first, second};
}

template <typename A>
static inline void write_two(A* x, const Two<A>& two) {
    __builtin_memcpy(x, &two.first, sizeof two.first);
    __builtin_memcpy(x + Vector<A>::kLanes, &two.second, sizeof two.second);
}

// Of each pair of neighbours one goes to `first`, the other to `second`: no lane moves.
static inline Two<float> read_two(const bf16* x) {
    Bits<float> pairs;
    __builtin_memcpy(&pairs, x, sizeof pairs);
    return {Vec<float>(pairs << 16), Vec<float>(pairs & 0xffff0000u)};
}

// The upper half is the number rounded to nearest, ties to even. A NaN stays one if it is quiet and its lower
// half is 0: those that come from bf16 and those that operations make are.
static inline Bits<float> round_up_half(Vec<float> v) {
    const Bits<float> bits = Bits<float>(v);
    return bits + 0x7fff + (bits >> 16 & 1);
}

static inline void write_two(bf16* x, const Two<float>& two) {
    const Bits<float> pairs = round_up_half(two.first) >> 16 | (round_up_half(two.second) & 0xffff0000u);
    __builtin_memcpy(x, &pairs, sizeof pairs);
}

#ifdef __F16C__
static inline Two<float> read_two(const f16* x) {
    __m128i halves[2];
    __builtin_memcpy(&halves, x, sizeof halves);
    return {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
}

static inline void write_two(f16* x, const Two<float>& two) {
    const __m128i halves[2] = {_mm256_cvtps_ph(two.first, _MM_FROUND_TO_NEAREST_INT),
                               _mm256_cvtps_ph(two.second, _MM_FROUND_TO_NEAREST_INT)};
    __builtin_memcpy(x, &halves, sizeof halves);
}
#else
// From the lowest 16 bits. Exponent and mantissa go to their float32 place; 2^112 moves the bias, and
// subnormal numbers come out right too.
static inline Vec<float> from_f16(Bits<float> bits) {
    const Bits<float> magnitude = (bits & 0x7fff) << 13;
    const Bits<float> finite = Bits<float>(Vec<float>(magnitude) * 0x1p112f);
    const Bits<float> special = magnitude | 0x7f800000;
    return Vec<float>((magnitude >= 0x0f800000 ? special : finite) | (bits & 0x8000) << 16);
}

// To the lowest 16 bits, rounded to nearest, ties to even.
static inline Bits<float> to_f16(Vec<float> v) {
    const Bits<float> sign = Bits<float>(v) & 0x80000000u, magnitude = Bits<float>(v) ^ sign;
    // Subnormal results: adding 1/2 leaves multiples of 2^-24 in the lowest bits, rounded by the addition.
    const Bits<float> small = Bits<float>(Vec<float>(magnitude) + 0.5f) - 0x3f000000;
    const Bits<float> normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    Bits<float> bits = magnitude < 0x38800000u ? small : normal;
    bits = magnitude >= 0x477ff000u ? 0x7c00 + Bits<float>{} : bits;
    bits = magnitude > 0x7f800000u ? 0x7e00 + Bits<float>{} : bits;
    return bits | sign >> 16;
}

static inline Two<float> read_two(const f16* x) {
    Bits<float> pairs;
    __builtin_memcpy(&pairs, x, sizeof pairs);
    return {from_f16(pairs & 0xffff), from_f16(pairs >> 16)};
}

static inline void write_two(f16* x, const Two<float>& two) {
    const Bits<float> pairs = to_f16(two.first) | to_f16(two.second) << 16;
    __builtin_memcpy(x, &pairs, sizeof pairs);
}
#endif

// What a type holds for minus infinity.
template <typename T>
static inline T minus_infinity();
template <>
inline float minus_infinity() {
    return -__builtin_inff();
}
template <>
inline double minus_infinity() {
    return -__builtin_inf();
}
template <>
inline bf16 minus_infinity() {
    return {0xff80};
}
template <>
inline f16 minus_infinity() {
    return {0xfc00};
}

}  // namespace rolemesh::ROLEMESH_ISA
