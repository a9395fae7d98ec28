// KL estimates per token, and the losses of PPO with their gradients in one pass over the inputs.
#pragma once

#include "doubles.h"

namespace rolemesh::ROLEMESH_ISA {

// NaN stays, as in torch.clamp.
static inline Doubles clamp(Doubles x, Doubles low, Doubles high) {
    const Doubles raised = x < low ? low : x;
    return raised > high ? high : raised;
}

static inline Doubles clamp(Doubles x, double low, double high) {
    return clamp(x, broadcast(low), broadcast(high));
}

static inline Doubles ones(Longs mask) { return mask ? broadcast(1.0) : Doubles{}; }

// Value and derivative in log_prob of a KL estimate, of x = log_prob - ref_log_prob.
template <KlKind kKind>
static inline void kl_of(Doubles x, Doubles& value, Doubles& slope) {
    if constexpr (kKind == KlKind::k1) {
        value = x;
        slope = broadcast(1.0);
    } else if constexpr (kKind == KlKind::abs) {
        value = x < 0.0 ? -x : x;
        slope = x < 0.0 ? broadcast(-1.0) : x > 0.0 ? broadcast(1.0) : x;  // 0 at 0, NaN at NaN
    } else if constexpr (kKind == KlKind::k2) {
        value = 0.5 * x * x;
        slope = x;
    } else {  // k3 = e^r - r - 1 of r = -x: of e^r's parts near 0, where the difference would lose all digits
        const Doubles r = clamp(-x, -20.0, 20.0);
        const Exp e = exp_parts(r);
        const Longs near = e.scale == 1.0;
        const Doubles k3 = near ? e.square : e.value() - r - 1.0;
        value = clamp(k3, -__builtin_inf(), 10.0);
        slope = near ? -(e.r + e.square) : 1.0 - e.value();
        slope = (x < -20.0) | (x > 20.0) | (k3 > 10.0) ? Doubles{} : slope;
    }
}

template <typename T, typename Map>
static inline void map_triples(const T* a, const T* b, const T* g, int64_t n, T* out, int threads, Map map) {
    const int64_t whole = n - n % kLanes, rest = n - whole;
    if (n < kSmall) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < whole; i += kLanes)
        store_doubles(out + i, map(load_doubles(a + i), load_doubles(b + i), load_doubles(g + i)));
    if (rest) {
        a += whole, b += whole, g += whole;
        store_some(out + whole, map(load_some(a, rest), load_some(b, rest), load_some(g, rest)), rest);
    }
}

template <KlKind kKind, typename T>
static void kl_kind(const T* log_prob, const T* ref, int64_t n, T* out, int threads) {
    map_triples(log_prob, ref, ref, n, out, threads, [](Doubles a, Doubles b, Doubles) {
        Doubles value, slope;
        kl_of<kKind>(a - b, value, slope);
        return value;
    });
}

// grad times the derivative in log_prob; 0 where grad is 0, so that what a mask drops later stays dropped,
// also NaN.
template <KlKind kKind, typename T>
static void kl_backward_kind(const T* grad, const T* log_prob, const T* ref, int64_t n, T* out, int threads) {
    map_triples(log_prob, ref, grad, n, out, threads, [](Doubles a, Doubles b, Doubles g) {
        Doubles value, slope;
        kl_of<kKind>(a - b, value, slope);
        return g == 0.0 ? Doubles{} : g * slope;
    });
}

template <typename T>
void kl(const T* log_prob, const T* ref, int64_t n, KlKind kind, T* out, int threads) {
    switch (kind) {
        case KlKind::k1: return kl_kind<KlKind::k1>(log_prob, ref, n, out, threads);
        case KlKind::abs: return kl_kind<KlKind::abs>(log_prob, ref, n, out, threads);
        case KlKind::k2: return kl_kind<KlKind::k2>(log_prob, ref, n, out, threads);
        case KlKind::k3: return kl_kind<KlKind::k3>(log_prob, ref, n, out, threads);
    }
}

template <typename T>
void kl_backward(const T* grad, const T* log_prob, const T* ref, int64_t n, KlKind kind, T* out,
                 int threads) {
    switch (kind) {
        case KlKind::k1: return kl_backward_kind<KlKind::k1>(grad, log_prob, ref, n, out, threads);
        case KlKind::abs: return kl_backward_kind<KlKind::abs>(grad, log_prob, ref, n, out, threads);
        case KlKind::k2: return kl_backward_kind<KlKind::k2>(grad, log_prob, ref, n, out, threads);
        case KlKind::k3: return kl_backward_kind<KlKind::k3>(grad, log_prob, ref, n, out, threads);
    }
}

// Calls step(a, b, c, keep, totals) -> d loss / d input on vectors of each row. totals[0] is the loss, which
// with the gradient is divided as `mean` says; the others are divided by its tokens. Rows go in chunks that do
// not depend on the number of threads.
template <int kTotals, typename T, typename Step>
static void loss_rows(const T* a, const T* b, const T* c, const uint8_t* mask, int64_t rows, int64_t columns,
                      const LossMean& mean, double* totals, T* grad, int threads, Step step) {
    double chunks[kChunks][kTotals] = {};
    if (rows * columns < kSmall) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        for (int64_t i = rows * chunk / kChunks; i < rows * (chunk + 1) / kChunks; ++i) {
            const int64_t start = i * columns, end = start + columns;
            double divisor = mean.loss;
            if (mean.of_sequence_means) {
                int64_t count = 0;
                for (int64_t k = start; k < end; ++k) count += mask[k] != 0;
                divisor *= count > 1 ? double(count) : 1.0;
            }
            const double weight = 1.0 / divisor;
            Doubles row[kTotals] = {};
            int64_t k = start;
            for (; k + kLanes <= end; k += kLanes) {
                const Doubles x = load_doubles(a + k), y = load_doubles(b + k), z = load_doubles(c + k);
                store_doubles(grad + k, weight * step(x, y, z, load_mask(mask + k), row));
            }
            if (const int64_t n = end - k) {
                const Doubles x = load_some(a + k, n), y = load_some(b + k, n), z = load_some(c + k, n);
                store_some(grad + k, weight * step(x, y, z, load_mask_some(mask + k, n), row), n);
            }
            chunks[chunk][0] += sum_of(row[0]) / divisor;
            for (int t = 1; t < kTotals; ++t) chunks[chunk][t] += sum_of(row[t]);
        }
    }
    for (int t = 0; t < kTotals; ++t) {
        totals[t] = 0.0;
        for (int chunk = 0; chunk < kChunks; ++chunk) totals[t] += chunks[chunk][t];
        if (t > 0) totals[t] /= mean.tokens;
    }
}

// totals[4]: loss, share of clipped tokens, share of those the dual clip bounds, k1 of KL(old || new).
// Where two branches are equal the gradient is the mean of theirs, as torch has it.
template <typename T>
void policy_loss(const T* old_log_prob, const T* log_prob, const T* advantages, const uint8_t* mask,
                 int64_t rows, int64_t columns, double clip_low, double clip_high, double dual_clip,
                 const LossMean& mean, double* totals, T* grad, int threads) {
    const double low = 1.0 - clip_low, high = 1.0 + clip_high;
    const auto step = [=](Doubles old, Doubles now, Doubles a, Longs keep, Doubles* row) {
        const Doubles difference = keep ? now - old : Doubles{}, advantage = keep ? a : Doubles{};
        const Doubles log_ratio = clamp(difference, -20.0, 20.0), ratio = exp_parts(log_ratio).value();
        const Doubles limited = clamp(ratio, low, high);
        const Doubles unclipped = -advantage * ratio, clipped = -advantage * limited;
        const Doubles bound = -advantage * dual_clip;
        const Doubles worse = unclipped > clipped ? unclipped : clipped;
        const Doubles clipped_slope = ratio == limited ? -advantage : Doubles{};
        Doubles slope = unclipped > clipped   ? -advantage
                        : unclipped < clipped ? clipped_slope
                                              : 0.5 * (clipped_slope - advantage);
        const Longs negative = advantage < 0.0, bounded = negative & (worse > bound);
        slope = negative & (worse == bound) ? 0.5 * slope : slope;
        row[0] += bounded ? bound : worse;
        row[1] += ones(clipped > unclipped);
        row[2] += ones(bounded);
        row[3] -= log_ratio;
        return bounded | (difference < -20.0) | (difference > 20.0) ? Doubles{} : slope * ratio;
    };
    loss_rows<4>(old_log_prob, log_prob, advantages, mask, rows, columns, mean, totals, grad, threads, step);
}

// totals[3]: loss, share of tokens whose clipped error is the larger, mean value.
template <typename T>
void value_loss(const T* values, const T* returns, const T* old_values, const uint8_t* mask, int64_t rows,
                int64_t columns, double clip, const LossMean& mean, double* totals, T* grad, int threads) {
    const auto step = [=](Doubles value, Doubles target, Doubles old, Longs keep, Doubles* row) {
        const Doubles limited = clamp(value, old - clip, old + clip);
        const Doubles error = keep ? value - target : Doubles{};
        const Doubles clipped = keep ? limited - target : Doubles{};
        const Doubles square = error * error, clipped_square = clipped * clipped;
        const Doubles clipped_slope = value == limited ? clipped : Doubles{};
        row[0] += 0.5 * (square > clipped_square ? square : clipped_square);
        row[1] += ones(clipped_square > square);
        row[2] += keep ? value : Doubles{};
        return square > clipped_square   ? error
               : square < clipped_square ? clipped_slope
                                         : 0.5 * (error + clipped_slope);
    };
    loss_rows<3>(values, returns, old_values, mask, rows, columns, mean, totals, grad, threads, step);
}

}  // namespace rolemesh::ROLEMESH_ISA
