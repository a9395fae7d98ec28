#include <cstring>

#include "check.h"

namespace rolemesh {

static size_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

static int mantissa_bits(Dtype dtype) {
    return dtype == Dtype::f64 ? 52 : dtype == Dtype::f32 ? 23 : dtype == Dtype::bf16 ? 7 : 10;
}

static int smallest_exponent(Dtype dtype) {
    return dtype == Dtype::f64 ? -1022 : dtype == Dtype::f16 ? -14 : -126;
}

// To the nearest number that the type holds, ties to even.
static double rounded(double value, Dtype dtype) {
    if (dtype == Dtype::f64 || value == 0 || !std::isfinite(value)) return value;
    const int exponent = std::max(std::ilogb(value), smallest_exponent(dtype));
    const double unit = std::ldexp(1.0, exponent - mantissa_bits(dtype));
    const double result = std::nearbyint(value / unit) * unit;
    const double limit = std::ldexp(2.0, dtype == Dtype::f16 ? 15 : 127);
    return std::abs(result) >= limit ? std::copysign(kInfinity, value) : result;
}

// Numbers of any type in memory of exactly their size.
struct Array {
    Dtype dtype;
    std::vector<uint8_t> bytes;

    Array(Dtype dtype, int64_t n) : dtype(dtype), bytes(n * size_of(dtype)) {}

    double get(int64_t i) const {
        const uint8_t* at = bytes.data() + i * size_of(dtype);
        if (dtype == Dtype::f64) return read<double>(at);
        if (dtype == Dtype::f32) return read<float>(at);
        const int bits = read<uint16_t>(at), fraction_bits = mantissa_bits(dtype);
        const int fraction = bits & ((1 << fraction_bits) - 1), exponent_bits = 15 - fraction_bits;
        const int exponent = (bits & 0x7fff) >> fraction_bits, top = (1 << exponent_bits) - 1, bias = top / 2;
        double value;
        if (exponent == top)
            value = fraction ? kNan : kInfinity;
        else if (exponent == 0)
            value = std::ldexp(double(fraction), 1 - bias - fraction_bits);
        else
            value = std::ldexp(double(fraction + (1 << fraction_bits)), exponent - bias - fraction_bits);
        return bits & 0x8000 ? -value : value;
    }

    void set(int64_t i, double value) {
        uint8_t* at = bytes.data() + i * size_of(dtype);
        if (dtype == Dtype::f64) return write(at, value);
        if (dtype == Dtype::f32) return write(at, float(value));
        value = rounded(value, dtype);
        const int fraction_bits = mantissa_bits(dtype), smallest = smallest_exponent(dtype);
        const int infinity = ((1 << (15 - fraction_bits)) - 1) << fraction_bits;
        int bits;
        if (std::isnan(value))
            bits = infinity | 1 << (fraction_bits - 1);
        else if (std::isinf(value))
            bits = infinity;
        else {
            const int exponent = value == 0 ? smallest : std::max(std::ilogb(value), smallest);
            const int fraction = int(std::ldexp(std::abs(value), fraction_bits - exponent));
            bits = ((exponent - smallest) << fraction_bits) + fraction;
        }
        write(at, uint16_t(bits | (std::signbit(value) ? 0x8000 : 0)));
    }

    template <typename T>
    static T read(const uint8_t* at) {
        T value;
        std::memcpy(&value, at, sizeof value);
        return value;
    }

    template <typename T>
    static void write(uint8_t* at, T value) {
        std::memcpy(at, &value, sizeof value);
    }
};

struct Case {
    Dtype dtype;
    int64_t rows, columns, stride;
    double inv_temperature;
    bool entropy;
    int threads;

    int64_t extent() const { return rows > 0 ? (rows - 1) * stride + columns : 0; }
    Dtype accumulator() const { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }
    double tolerance() const { return dtype == Dtype::f64 ? 1e-12 : 1e-5; }
    Matrix matrix(Array& array, int64_t from = 0, int64_t width = -1) const {
        return {array.bytes.data() + from * size_of(dtype), dtype, rows, width < 0 ? columns : width, stride};
    }
    void print(FILE* file) const {
        std::fprintf(file, "dtype %d rows %ld columns %ld stride %ld 1/T %g entropy %d threads %d ",
                     int(dtype), long(rows), long(columns), long(stride), inv_temperature, entropy, threads);
    }
};

#define CHECK_CASE(condition, ...)          \
    do {                                    \
        if (!(condition)) c.print(stderr);  \
        CHECK(condition, __VA_ARGS__);      \
    } while (false)

struct Truth {
    double most = -kInfinity, log_sum, entropy;  // log_sum is relative to `most`
};

static Truth truth_of(const Case& c, const Array& x, int64_t row) {
    Truth truth;
    bool bad = false;
    for (int64_t j = 0; j < c.columns; ++j) {
        const double logit = x.get(row * c.stride + j);
        bad = bad || std::isnan(logit) || logit == kInfinity;
        if (logit > truth.most) truth.most = logit;
    }
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j < c.columns; ++j) {
        const double exponent = (x.get(row * c.stride + j) - truth.most) * c.inv_temperature;
        if (exponent > -700) sum += std::exp(exponent), weighted += std::exp(exponent) * exponent;
    }
    truth.log_sum = bad ? kNan : std::log(sum);
    truth.entropy = bad ? kNan : truth.log_sum - weighted / sum;
    return truth;
}

static Array stats_of(const Kernels& kernels, const Case& c, Array& x, const std::vector<int64_t>& labels,
                      const std::vector<int64_t>& tiles) {
    Array stats(c.accumulator(), 4 * c.rows);
    for (int64_t i = 0; i < c.rows; ++i) {
        stats.set(i, -kInfinity);
        stats.set(2 * c.rows + i, c.entropy ? 0 : 77);
    }
    int64_t from = 0;
    for (int64_t width : tiles) {
        std::vector<int64_t> local(labels);
        for (int64_t& label : local)
            if (label >= 0) label -= from;
        kernels.log_prob_stats(c.matrix(x, from, width), local.data(), stats.bytes.data(), c.inv_temperature,
                               c.entropy, c.threads);
        from += width;
    }
    return stats;
}

static void check_stats(const Case& c, const Array& x, const std::vector<int64_t>& labels,
    const Array& stats) {
    for (int64_t i = 0; i < c.rows; ++i) {
        const double m = stats.get(i), sum = stats.get(c.rows + i), weighted = stats.get(2 * c.rows + i);
        const Truth truth = truth_of(c, x, i);
        const bool labelled = labels[i] >= 0 && labels[i] < c.columns;
        const double at_label = labelled ? x.get(i * c.stride + labels[i]) : 0;
        CHECK_CASE(near(stats.get(3 * c.rows + i), at_label, 0), "row %ld: at label %g", long(i), at_label);
        CHECK_CASE(c.entropy || weighted == 77, "row %ld: %g was written", long(i), weighted);
        CHECK_CASE(m <= truth.most, "row %ld: %g > %g", long(i), m, truth.most);
        if (std::isnan(truth.log_sum)) {
            CHECK_CASE(std::isnan(sum), "row %ld: sum %g", long(i), sum);
            CHECK_CASE(!c.entropy || std::isnan(weighted), "row %ld: weighted %g", long(i), weighted);
        } else if (truth.most == -kInfinity) {
            CHECK_CASE(m == -kInfinity && sum == 0, "row %ld: %g %g", long(i), m, sum);
            CHECK_CASE(!c.entropy || weighted == 0, "row %ld: %g", long(i), weighted);
        } else {
            const double lag = (truth.most - m) * c.inv_temperature, log_sum = std::log(sum) - lag;
            CHECK_CASE(lag < 20, "row %ld: the reference lags by %g", long(i), lag);
            CHECK_CASE(near(log_sum, truth.log_sum, c.tolerance()), "row %ld: %g != %g", long(i), log_sum,
                       truth.log_sum);
            const double entropy = std::log(sum) - weighted / sum;
            CHECK_CASE(!c.entropy || near(entropy, truth.entropy, c.tolerance()),
                       "row %ld: entropy %g != %g", long(i), entropy, truth.entropy);
        }
    }
}

static void check_backward(const Kernels& kernels, const Case& c, Array x, const std::vector<int64_t>& labels,
                           bool in_place) {
    const Array logits = x;
    Array numbers(c.accumulator(), 5 * c.rows), other(c.dtype, c.extent());
    for (size_t i = 0; i < other.bytes.size(); ++i) other.bytes[i] = 0x5a;
    const Array before = in_place ? x : other;
    for (int64_t i = 0; i < c.rows; ++i) {
        const Truth truth = truth_of(c, x, i);
        const double row[5] = {truth.most, truth.log_sum, truth.entropy, 0.75 - double(i),
            c.entropy ? 0.5 : kNan};
        for (int k = 0; k < 5; ++k) numbers.set(k * c.rows + i, row[k]);
    }
    Array& out = in_place ? x : other;
    kernels.log_prob_backward(c.matrix(x), labels.data(), numbers.bytes.data(), c.inv_temperature, c.entropy,
                              c.matrix(out), c.threads);
    for (int64_t i = 0; i < c.rows; ++i) {
        const double m = numbers.get(i), log_sum = numbers.get(c.rows + i), h = numbers.get(2 * c.rows + i);
        const double g = numbers.get(3 * c.rows + i), e = c.entropy ? numbers.get(4 * c.rows + i) : 0;
        const int64_t end = std::min(c.stride, c.extent() - i * c.stride);
        for (int64_t j = 0; j < c.columns; ++j) {
            const double log_p = (logits.get(i * c.stride + j) - m) * c.inv_temperature - log_sum;
            const double p = std::exp(log_p);
            const double change = e != 0 && p != 0 ? e * p * (log_p + h) : 0;
            const double expected = (g * (double(j == labels[i]) - p) - change) * c.inv_temperature;
            // p has the relative error of an exponent that was rounded, the result that of its own type.
            const double unit = std::ldexp(1.0, -mantissa_bits(c.accumulator()));
            const double size = p * (std::abs(g) + std::abs(e) * (1 + std::abs(log_p) + std::abs(h)));
            const double error = p == 0 ? 0 : size * c.inv_temperature * unit * (4 + 2 * std::abs(log_p));
            const double smallest = std::ldexp(1.0, smallest_exponent(c.dtype) - mantissa_bits(c.dtype));
            const double rounding = std::ldexp(std::abs(expected), -1 - mantissa_bits(c.dtype)) + smallest;
            CHECK_CASE(near(out.get(i * c.stride + j), expected, rounding + error + 1e-35),
                       "row %ld column %ld: %.9g != %.9g", long(i), long(j),
                       out.get(i * c.stride + j), expected);
        }
        const size_t size = size_of(c.dtype), from = (i * c.stride + c.columns) * size;
        const size_t length = (end - c.columns) * size;
        CHECK_CASE(length == 0 || std::memcmp(&out.bytes[from], &before.bytes[from], length) == 0,
                   "written between rows %ld and %ld", long(i), long(i + 1));
    }
}

// Kinds of logits, each hard for something else.
enum class Logits { normal, wide, far, holes, empty, bad, infinite, rising, n_kinds };

static Array logits_of(const Case& c, Logits kind, std::mt19937& random) {
    Array x(c.dtype, c.extent());
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < c.extent(); ++i) {
        const int64_t row = i / c.stride, column = i % c.stride;
        double value = normal(random);
        if (kind == Logits::wide) value *= 25;
        if (kind == Logits::far) value += 1e4;
        if (kind == Logits::holes && random() % 3 == 0) value = -kInfinity;
        if (kind == Logits::empty && (row == 1 || column < c.columns / 2)) value = -kInfinity;
        if (kind == Logits::bad && row != 1 && column == c.columns * 2 / 3) value = kNan;
        if (kind == Logits::infinite && row != 1 && column == c.columns / 3) value = kInfinity;
        if (kind == Logits::rising) value += double(column) * 200 / double(c.columns);
        x.set(i, column < c.columns ? value : kNan);  // what lies between rows is never read
    }
    return x;
}

static std::vector<int64_t> labels_of(const Case& c, std::mt19937& random) {
    const int64_t outside[] = {-1, -100, c.columns, c.columns + 1, INT64_MIN, INT64_MAX, -c.columns};
    std::vector<int64_t> labels(c.rows);
    for (int64_t& label : labels)
        label = c.columns == 0 || random() % 4 == 0 ? outside[random() % 7] : int64_t(random() % c.columns);
    return labels;
}

static void check_case(const Kernels& kernels, const Case& c, Logits kind, std::mt19937& random) {
    Array x = logits_of(c, kind, random);
    const std::vector<int64_t> labels = labels_of(c, random);
    const Array stats = stats_of(kernels, c, x, labels, {c.columns});
    check_stats(c, x, labels, stats);
    CHECK_CASE(stats_of(kernels, c, x, labels, {c.columns}).bytes == stats.bytes, "a second run differs");
    const int64_t cut = c.columns / 3;
    const std::vector<int64_t> tiles = {cut, 0, c.columns / 2 - cut, c.columns - c.columns / 2};
    check_stats(c, x, labels, stats_of(kernels, c, x, labels, tiles));
    check_backward(kernels, c, x, labels, false);
    check_backward(kernels, c, x, labels, true);
}

// One row for each number of 16 bits, read; then numbers of 32 bits, of which `out` = -g is the rounded form.
static void check_every_half(const Kernels& kernels, Dtype dtype, std::mt19937& random) {
    Case c{dtype, 65536, 1, 1, 1.0, false, 1};
    Array x(dtype, c.rows), stats(Dtype::f32, 4 * c.rows), numbers(Dtype::f32, 5 * c.rows);
    const std::vector<int64_t> labels(c.rows, 0), none(c.rows, -1);
    for (int64_t i = 0; i < c.rows; ++i) Array::write(&x.bytes[2 * i], uint16_t(i));
    kernels.log_prob_stats(c.matrix(x), labels.data(), stats.bytes.data(), 1.0, false, 1);
    for (int64_t i = 0; i < c.rows; ++i)
        CHECK(near(stats.get(3 * c.rows + i), x.get(i), 0), "%04lx was read as %g", long(i),
            stats.get(3 * c.rows + i));
    for (int64_t i = 0; i < c.rows; ++i) {
        x.set(i, 0);
        uint32_t bits = random();
        if (dtype == Dtype::f16 && i % 4)
            bits = (bits & 0x87ffffff) + (102u << 23) + (i % 4 - 1) * 0x08000000;
        if (i % 8 == 5) bits &= ~0x1fffu;  // many of them ties
        if (i % 8 == 6) bits &= ~0x7fffu;
        Array::write(&numbers.bytes[4 * (3 * c.rows + i)], bits);
    }
    kernels.log_prob_backward(c.matrix(x), none.data(), numbers.bytes.data(), 1.0, false, c.matrix(x), 1);
    for (int64_t i = 0; i < c.rows; ++i) {
        const double g = numbers.get(3 * c.rows + i), expected = rounded(-g, dtype);
        CHECK(near(x.get(i), expected, 0), "%.9g was rounded to %.9g, not %.9g", -g, x.get(i), expected);
    }
}

void test_log_prob(const Kernels& kernels) {
    std::mt19937 random(1);
    for (Dtype dtype : {Dtype::f32, Dtype::f64, Dtype::bf16, Dtype::f16}) {
        for (int64_t columns : {0, 1, 7, 8, 9, 31, 32, 33, 1000, 2085})
            for (int kind = 0; kind < int(Logits::n_kinds); ++kind)
                for (bool entropy : {false, true}) {
                    const double inv_temperature = kind % 2 ? 1.0 : 1.6;
                    const int64_t stride = columns + kind % 3 * 5;
                    check_case(kernels, {dtype, 3, columns, stride, inv_temperature, entropy, 1 + kind % 2},
                               Logits(kind), random);
                }
        for (Logits kind : {Logits::holes, Logits::bad, Logits::rising}) {  // rows that threads share
            check_case(kernels, {dtype, 1, 32001, 32001, 1.0, true, 2}, kind, random);
            check_case(kernels, {dtype, 2, 16384, 16389, 0.5, false, 5}, kind, random);
        }
        check_case(kernels, {dtype, 0, 40, 40, 1.0, true, 2}, Logits::normal, random);
    }
    check_every_half(kernels, Dtype::bf16, random);
    check_every_half(kernels, Dtype::f16, random);
}

}  // namespace rolemesh
