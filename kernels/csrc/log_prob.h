// Log-probability of a label and entropy of softmax(logits / T) in one pass over the logits; their gradient.
//
// The sum of exponentials is the online softmax of Milakov and Gimelshein (2018), with a reference m that may
// lag behind the largest logit: only when a block exceeds it by more than kLag is it raised, the sums scaled.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rolemesh::ROLEMESH_ISA {

constexpr int64_t kBlock = 2048;      // columns whose sums stay in A; small enough for the first cache
constexpr int64_t kSplit = 16384;     // columns below which a row is not shared by threads
constexpr int kAhead = 2048;          // bytes between what is read and what is asked for
constexpr int kParts = 64;            // shares of rows, at most
constexpr double kLag = 8;            // exp(kLag) * kBlock is far from overflow and costs little precision
constexpr double kLog2E = 0x1.71547652b82fep0, kLn2 = 0x1.62e42fefa39efp-1;

template <typename A>
constexpr int64_t kChunk = 4 * Vector<A>::kLanes;  // columns of one step: two pairs of vectors

template <typename T>
struct Accumulator {
    using Type = float;
};
template <>
struct Accumulator<double> {
    using Type = double;
};

// sum = sum of e, weighted = sum of e * log(e), with e = exp((x - m) / T).
template <typename A>
struct Sums {
    A m;
    double sum, weighted;
};

// Refer to a larger m. -inf means that there was no finite logit: nothing to scale then, and NaN is kept.
template <typename A>
static inline void raise_to(Sums<A>& sums, A m, double inv_temperature) {
    if (sums.m > minus_infinity<A>()) {
        const double log_ratio = (double(sums.m) - double(m)) * inv_temperature;
        const double ratio = __builtin_exp(log_ratio);
        sums.weighted = ratio > 0 ? (sums.weighted + sums.sum * log_ratio) * ratio : sums.weighted * 0;
        sums.sum *= ratio;
    }
    sums.m = m;
}

template <typename A>
static inline void merge(Sums<A>& sums, Sums<A> other, double inv_temperature) {
    if (other.m > sums.m) raise_to(sums, other.m, inv_temperature);
    if (other.m < sums.m) raise_to(other, sums.m, inv_temperature);
    sums.sum += other.sum;
    sums.weighted += other.weighted;
}

// Four vectors of x.
template <typename A, typename T>
static inline void read_chunk(const T* x, Vec<A> (&vectors)[4]) {
    const Two<A> low = read_two(x), high = read_two(x + kChunk<A> / 2);
    vectors[0] = low.first, vectors[1] = low.second, vectors[2] = high.first, vectors[3] = high.second;
}

template <typename A>
static inline A largest_of(const Vec<A> (&v)[4]) {
    return max_of(max_or_second(max_or_second(v[0], v[1]), max_or_second(v[2], v[3])));
}

// The largest of n columns, a multiple of kChunk; NaN is left out.
template <typename A, typename T>
static inline A largest_of(const T* x, int64_t n) {
    Vec<A> most[4], logits[4];
    for (auto& vector : most) vector = minus_infinity<A>() + Vec<A>{};
    for (int64_t j = 0; j < n; j += kChunk<A>) {
        read_chunk<A>(x + j, logits);
        for (int k = 0; k < 4; ++k) most[k] = max_or_second(logits[k], most[k]);
    }
    return largest_of<A>(most);
}

// The sums of n columns, a multiple of kChunk, relative to m. Returns the largest of them; NaN is left out.
template <bool entropy, typename A, typename T>
static inline A sum_block(const T* x, int64_t n, A m, A scale, double& sum, double& weighted) {
    Vec<A> sums[4] = {}, weighteds[4] = {}, most[4], logits[4];
    for (auto& vector : most) vector = minus_infinity<A>() + Vec<A>{};
    for (int64_t j = 0; j < n; j += kChunk<A>) {
        // The processor's own prefetching stops at the end of a page.
        for (unsigned at = 0; at < kChunk<A> * sizeof(T); at += 64)
            __builtin_prefetch((const void*)(uintptr_t(x + j) + kAhead + at));
        read_chunk<A>(x + j, logits);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            most[k] = max_or_second(logits[k], most[k]);
            const Vec<A> log2 = max_or_second(Vector<A>::kLowest + Vec<A>{}, (logits[k] - m) * scale);
            const Vec<A> power = exp2_of<A>(log2);
            sums[k] += power;
            if constexpr (entropy) weighteds[k] = multiply_add(power, log2, weighteds[k]);
        }
    }
    sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    weighted = sum_of((weighteds[0] + weighteds[1]) + (weighteds[2] + weighteds[3])) * kLn2;
    return largest_of<A>(most);
}

// Add n columns, a multiple of kChunk and at most kBlock.
template <bool entropy, typename A, typename T>
static inline void add_block(Sums<A>& sums, const T* x, int64_t n, double inv_temperature) {
    if (sums.m == minus_infinity<A>()) raise_to(sums, largest_of<A>(x, n), inv_temperature);
    while (true) {
        // Without a finite logit any reference does: what is there adds 0, or NaN.
        const A m = sums.m == minus_infinity<A>() ? A(0) : sums.m;
        double sum, weighted;
        const A most = sum_block<entropy>(x, n, m, A(inv_temperature * kLog2E), sum, weighted);
        if (!((most - m) * inv_temperature > kLag)) {
            sums.sum += sum;
            sums.weighted += weighted;
            return;
        }
        raise_to(sums, most, inv_temperature);
    }
}

template <bool entropy, typename A, typename T>
static void add_columns(Sums<A>& sums, const T* x, int64_t n, double inv_temperature) {
    const int64_t whole = n / kChunk<A> * kChunk<A>;
    for (int64_t j = 0; j < whole; j += kBlock)
        add_block<entropy>(sums, x + j, whole - j < kBlock ? whole - j : kBlock, inv_temperature);
    if (whole < n) {
        T rest[kChunk<A>];
        for (int64_t j = 0; j < kChunk<A>; ++j) rest[j] = whole + j < n ? x[whole + j] : minus_infinity<T>();
        add_block<entropy>(sums, rest, kChunk<A>, inv_temperature);
    }
}

static inline double number(float x) { return x; }
static inline double number(double x) { return x; }
static inline double number(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
static inline double number(f16 x) {
    f16 numbers[2 * Vector<float>::kLanes] = {x};
    return read_two(numbers).first[0];
}

template <bool entropy, typename T, typename A = typename Accumulator<T>::Type>
static void stats_of_rows(Matrix logits, const int64_t* labels, A* stats, double inv_temperature,
                          int threads) {
    const T* x = static_cast<const T*>(logits.data);
    const int64_t n = logits.rows, columns = logits.columns;
    const auto read = [=](int64_t i) {
        return Sums<A>{stats[i], double(stats[n + i]), entropy ? double(stats[2 * n + i]) : 0};
    };
    const auto write = [=](int64_t i, const Sums<A>& sums) {
        stats[i] = sums.m;
        stats[n + i] = A(sums.sum);
        if (entropy) stats[2 * n + i] = A(sums.weighted);
        if (labels[i] >= 0 && labels[i] < columns)
            stats[3 * n + i] += A(number(x[i * logits.stride + labels[i]]));
    };
    // With fewer rows than threads the threads share each row.
    const int64_t wanted = n > 0 && columns >= kSplit ? (threads < kParts ? threads : kParts) / n : 1;
    if (wanted < 2) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            Sums<A> sums = read(i);
            add_columns<entropy>(sums, x + i * logits.stride, columns, inv_temperature);
            write(i, sums);
        }
        return;
    }
    Sums<A> partial[kParts];
    const int64_t width = ((columns + wanted - 1) / wanted + kChunk<A> - 1) / kChunk<A> * kChunk<A>;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t k = 0; k < n * wanted; ++k) {
        const int64_t i = k / wanted, from = k % wanted * width, left = columns - from;
        partial[k] = {minus_infinity<A>(), 0, 0};
        if (left > 0)
            add_columns<entropy>(partial[k], x + i * logits.stride + from, left < width ? left : width,
                                 inv_temperature);
    }
    for (int64_t i = 0; i < n; ++i) {
        Sums<A> sums = read(i);
        for (int64_t k = 0; k < wanted; ++k) merge(sums, partial[i * wanted + k], inv_temperature);
        write(i, sums);
    }
}

template <bool entropy>
static void stats_of(Matrix logits, const int64_t* labels, void* stats, double inv_temperature, int threads) {
    float* single = static_cast<float*>(stats);
    switch (logits.dtype) {
        case Dtype::f32:
            return stats_of_rows<entropy, float>(logits, labels, single, inv_temperature, threads);
        case Dtype::bf16:
            return stats_of_rows<entropy, bf16>(logits, labels, single, inv_temperature, threads);
        case Dtype::f16:
            return stats_of_rows<entropy, f16>(logits, labels, single, inv_temperature, threads);
        case Dtype::f64:
            return stats_of_rows<entropy, double>(logits, labels, static_cast<double*>(stats),
                                                  inv_temperature, threads);
    }
}

void log_prob_stats(Matrix logits, const int64_t* labels, void* stats, double inv_temperature, bool entropy,
                    int threads) {
    if (logits.rows * logits.columns < kSmall) threads = 1;
    const auto run = entropy ? stats_of<true> : stats_of<false>;
    run(logits, labels, stats, inv_temperature, threads);
}

// One row's numbers: d/dx_j = p * (slope + curve * log2(p)), plus at_label at the label.
template <typename A>
struct Slope {
    A m, scale, log2_sum, slope, curve;
};

// A NaN that was passed in might round to something else in bf16.
template <typename A>
static inline A plain_nan(double value) {
    return value == value ? A(value) : A(__builtin_nan(""));
}

template <bool entropy, typename A, typename T>
static inline void backward_chunk(const T* x, const Slope<A>& row, T* out) {
    Vec<A> v[4];
    read_chunk<A>(x, v);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const Vec<A> exponent = (v[k] - row.m) * row.scale - row.log2_sum;
        const Vec<A> log2 = max_or_second(Vector<A>::kLowest + Vec<A>{}, exponent);
        Vec<A> slope = row.slope + Vec<A>{};
        if constexpr (entropy) slope = multiply_add(log2, row.curve + Vec<A>{}, slope);
        v[k] = exp2_of<A>(log2) * slope;
    }
    write_two(out, Two<A>{v[0], v[1]});
    write_two(out + kChunk<A> / 2, Two<A>{v[2], v[3]});
}

template <bool entropy, typename T, typename A = typename Accumulator<T>::Type>
static void backward_of_rows(Matrix logits, const int64_t* labels, const A* numbers, double inv_temperature,
                             Matrix out, int threads) {
    const int64_t n = logits.rows, columns = logits.columns;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const T* x = static_cast<const T*>(logits.data) + i * logits.stride;
        T* y = static_cast<T*>(out.data) + i * out.stride;
        const double m = numbers[i], log_sum = numbers[n + i], h = numbers[2 * n + i], g = numbers[3 * n + i];
        const double e = entropy ? double(numbers[4 * n + i]) : 0;
        const Slope<A> row = {plain_nan<A>(m), A(inv_temperature * kLog2E), plain_nan<A>(log_sum * kLog2E),
                              plain_nan<A>((entropy ? g + e * h : g) * -inv_temperature),
                              plain_nan<A>(-e * inv_temperature * kLn2)};
        // Kept before y, which may be x, is written: the label's own value is rounded once.
        const int64_t label = labels[i];
        const bool here = label >= 0 && label < columns;
        const double at_label = here ? number(x[label]) : 0;
        const int64_t whole = columns / kChunk<A> * kChunk<A>;
        for (int64_t j = 0; j < whole; j += kChunk<A>) backward_chunk<entropy>(x + j, row, y + j);
        if (whole < columns) {
            T rest[kChunk<A>];
            for (int64_t j = 0; j < kChunk<A>; ++j)
                rest[j] = whole + j < columns ? x[whole + j] : minus_infinity<T>();
            backward_chunk<entropy>(rest, row, rest);
            for (int64_t j = 0; whole + j < columns; ++j) y[whole + j] = rest[j];
        }
        if (here) {
            const double log_p = (at_label - m) * inv_temperature - log_sum, p = __builtin_exp(log_p);
            const double change = entropy && p != 0 ? e * p * (log_p + h) : 0;
            const Vec<A> value = plain_nan<A>((g * (1 - p) - change) * inv_temperature) + Vec<A>{};
            T numbers[2 * Vector<A>::kLanes];
            write_two(numbers, Two<A>{value, value});
            y[label] = numbers[0];
        }
    }
}

template <bool entropy>
static void backward_of(Matrix logits, const int64_t* labels, const void* numbers, double inv_temperature,
                        Matrix out, int threads) {
    const float* single = static_cast<const float*>(numbers);
    switch (logits.dtype) {
        case Dtype::f32:
            return backward_of_rows<entropy, float>(logits, labels, single, inv_temperature, out, threads);
        case Dtype::bf16:
            return backward_of_rows<entropy, bf16>(logits, labels, single, inv_temperature, out, threads);
        case Dtype::f16:
            return backward_of_rows<entropy, f16>(logits, labels, single, inv_temperature, out, threads);
        case Dtype::f64:
            return backward_of_rows<entropy, double>(logits, labels, static_cast<const double*>(numbers),
                                                     inv_temperature, out, threads);
    }
}

void log_prob_backward(Matrix logits, const int64_t* labels, const void* numbers, double inv_temperature,
                       bool entropy, Matrix out, int threads) {
    if (logits.rows * logits.columns < kSmall) threads = 1;
    const auto run = entropy ? backward_of<true> : backward_of<false>;
    run(logits, labels, numbers, inv_temperature, out, threads);
}

}  // namespace rolemesh::ROLEMESH_ISA
