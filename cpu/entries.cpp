// entry_loss: the loss of every known entry of a matrix of targets, its gradient written over the scores in one pass.
// in    z S [V, T] (float, double, or bfloat16, whose rows are computed in float and rounded once), targets R [V, T],
// NaN
//       where unknown, mask uint8 [V] (bit 0: the row counts), inv_count = 1 / global number of known entries of those
//       kind 0: cross-entropy of sigmoid(z) and targets in [0, 1]; 1: (z - target)^2; 2: |z - target|
// out   z = row_scale * the gradient * inv_count where an entry counts, 0 elsewhere
//       loss double [1] adds the sum of the entries' losses, times inv_count
//       partials (double [64, T] or null) gains the columns of the gradient before row_scale
//       window_first, total, kept: as of softmax_xent (loss.cpp)
// Scores of any size have a finite loss; NaN reaches it. Bitwise repeatable. Twin: cuda/entries.cu.
// entry_counts: counts int64 [3, 3, T]: per split (bit of mask) and column, known entries that are right and positive
// (z > 0 and target > 0.5), predicted positive, and positive.
#include <cmath>
#include <vector>

#include "common.h"
#include "pieces.h"

namespace {

enum Loss : int32_t { kBce = 0, kMse = 1, kMae = 2 };

// Replaces a score by its gradient; returns its loss.
template <int kLoss, class T>
inline double entry(T& z, T target) {
  const T x = z;
  if constexpr (kLoss == kBce) {
    const T small = std::exp(-std::fabs(x)), share = 1 / (1 + small);
    z = (x >= 0 ? share : small * share) - target;
    return (double)((x > 0 ? x : (T)0) - x * target) + (double)std::log1p(small);
  } else if constexpr (kLoss == kMse) {
    const T off = x - target;
    z = 2 * off;
    return (double)off * off;
  } else {
    const T off = x - target;
    z = off == 0 ? (T)0 : std::copysign((T)1, off);
    return std::fabs(off);
  }
}

template <int kLoss, class T>
double entry_row(T* z, const T* targets, int64_t cols, T inv_count) {
  double loss = 0;
  for (int64_t d = 0; d < cols; ++d) {
    const bool known = targets[d] == targets[d];
    if (known) loss += entry<kLoss>(z[d], targets[d]);
    z[d] = known ? z[d] * inv_count : (T)0;
  }
  return loss;
}

template <class T>
double row_of(int32_t kind, T* z, const T* targets, int64_t cols, T inv_count) {
  if (kind == kBce) return entry_row<kBce>(z, targets, cols, inv_count);
  if (kind == kMse) return entry_row<kMse>(z, targets, cols, inv_count);
  return entry_row<kMae>(z, targets, cols, inv_count);
}

template <class S>
void entry_loss(S* z, int64_t ld, int64_t rows, int64_t cols, const Real<S>* targets, const uint8_t* mask,
                double inv_count, int32_t kind, const Real<S>* row_scale, double* loss, double* partials,
                const Window& window, double* kept, int32_t threads) {
  double own[kPartials] = {0};
  double* losses = kept ? kept : own;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t c = 0; c < kPartials; ++c) {
    double* sums = partials ? partials + c * cols : nullptr;
    const Span chunk = chunk_rows(window, rows, c);
    for (int64_t v = chunk.begin; v < chunk.end; ++v) {
      if (!(mask[v] & 1)) {
        memset(z + v * ld, 0, cols * sizeof(S));
        continue;
      }
      in_pieces(z + v * ld, cols, [&](Real<S>* piece, int64_t first, int64_t count) {
        losses[c] += row_of(kind, piece, targets + v * cols + first, count, (Real<S>)inv_count);
        if (sums)
          for (int64_t d = 0; d < count; ++d) sums[first + d] += piece[d];
        if (row_scale)
          for (int64_t d = 0; d < count; ++d) piece[d] *= row_scale[v];
      });
    }
  }
  add_losses(window, rows, losses, inv_count, loss);
}

template <class S>
void entry_counts(const S* z, int64_t ld, int64_t rows, int64_t cols, const Real<S>* targets, const uint8_t* mask,
                  int64_t* counts, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<int64_t> mine(9 * cols, 0);
#pragma omp for schedule(static)
    for (int64_t v = 0; v < rows; ++v)
      for (int s = 0; s < 3; ++s) {
        if (!(mask[v] >> s & 1)) continue;
        for (int64_t d = 0; d < cols; ++d) {
          const Real<S> target = targets[v * cols + d];
          const bool known = target == target;
          const bool predicted = known && widen(z[v * ld + d]) > 0, positive = known && target > (Real<S>)0.5;
          mine[(3 * s) * cols + d] += predicted && positive;
          mine[(3 * s + 1) * cols + d] += predicted;
          mine[(3 * s + 2) * cols + d] += positive;
        }
      }
#pragma omp critical
    for (int64_t i = 0; i < 9 * cols; ++i) counts[i] += mine[i];
  }
}

}  // namespace

#define MGGCN_ENTRIES(suffix, S)                                                                                       \
  MGGCN_EXPORT(mggcn_entry_loss_##suffix)                                                                              \
  (S * z, int64_t ld, int64_t rows, int64_t cols, const Real<S>* targets, const uint8_t* mask, double inv_count,       \
   int32_t kind, const Real<S>* row_scale, double* loss, double* partials, int64_t window_first, int64_t total,        \
   double* kept, int32_t threads) {                                                                                    \
    entry_loss<S>(z, ld, rows, cols, targets, mask, inv_count, kind, row_scale, loss, partials, {window_first, total}, \
                  kept, threads);                                                                                      \
  }                                                                                                                    \
  MGGCN_EXPORT(mggcn_entry_counts_##suffix)                                                                            \
  (const S* z, int64_t ld, int64_t rows, int64_t cols, const Real<S>* targets, const uint8_t* mask, int64_t* counts,   \
   int32_t threads) {                                                                                                  \
    entry_counts<S>(z, ld, rows, cols, targets, mask, counts, threads);                                                \
  }
MGGCN_ENTRIES(f32, float)
MGGCN_ENTRIES(f64, double)
MGGCN_ENTRIES(bf16, bf16)
