// softmax_xent: masked cross-entropy of logits, its gradient written over them in one pass.
// in    z S [V, C] (float, double, or bfloat16, whose rows are computed in float and rounded once), labels int32 [V],
// mask uint8 [V] (bit 0: the row counts), inv_count = 1 / global number of those out   z = row_scale * (softmax(z) -
// onehot(label)) * inv_count on rows that count, 0 on the others
//       loss double [1] adds sum(logsumexp(z) - z[label]) * inv_count
//       partials (double [64, C] or null) gains the columns of the gradient before row_scale
// weights R [C] or null, smoothing e: the target is q_c = weights[c] ((c == label) (1 - e) + e / C) in place of onehot;
// the
//       row's loss is sum q_c (logsumexp(z) - z_c), its gradient (sum q) softmax(z) - q (Szegedy et al. 2016, 7)
// window_first, total, kept (double [64], zero at first): rows may be a window of those that the sums run over;
//       the loss is added with the last one, from what is kept of every chunk. All rows: 0, V, null.
// Stable for any finite logits: the maximum is subtracted. Bitwise repeatable.
// confusion: counts int64 [3, 3, C]: per split (bit of mask) right predictions, predictions and vertices of a class.
#include <cmath>
#include <vector>

#include "common.h"
#include "pieces.h"

namespace {

inline double exp_nonpositive(double x) { return std::exp(x); }

// exp for x <= 0 in float: Cody-Waite reduction and a polynomial of degree 6; relative error below 2e-7, 0 below -87.
inline float exp_nonpositive(float x) {
  const float y = x < -87.0f ? -87.0f : x;
  const float n = std::floor(y * 1.44269504f + 0.5f);
  const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return x < -87.0f ? 0.0f : p * scale;
}

template <class T>
double xent_row(T* z, int64_t cols, int32_t label, T inv_count) {
  T top = z[0];
  for (int64_t d = 1; d < cols; ++d) top = z[d] > top ? z[d] : top;
  const T chosen = z[label];
  for (int64_t d = 0; d < cols; ++d) z[d] = z[d] - top;
  double sum = 0;
  for (int64_t d = 0; d < cols; ++d) {
    // NaN and +inf - inf must reach the loss: the comparison inside exp would hide them.
    const T shifted = z[d];
    z[d] = shifted == shifted ? exp_nonpositive(shifted) : shifted;
  }
  for (int64_t d = 0; d < cols; ++d) sum += z[d];
  const T factor = (T)(inv_count / sum);
  for (int64_t d = 0; d < cols; ++d) z[d] *= factor;
  z[label] -= inv_count;
  return std::log(sum) + (double)top - (double)chosen;
}

// The same for a target that is spread over the classes; a class of no weight may have a logit of -infinity.
template <class T>
double spread_row(T* z, int64_t cols, int32_t label, T inv_count, const T* weights, double smoothing) {
  T top = z[0];
  for (int64_t d = 1; d < cols; ++d) top = z[d] > top ? z[d] : top;
  auto target = [&](int64_t d) {
    return (weights ? (double)weights[d] : 1.0) * ((d == label ? 1.0 - smoothing : 0.0) + smoothing / cols);
  };
  double sum = 0, total = 0, dot = 0;
  for (int64_t d = 0; d < cols; ++d) {
    const double q = target(d);
    const T shifted = z[d] - top;
    total += q;
    if (q) dot += q * shifted;
    z[d] = shifted == shifted ? exp_nonpositive(shifted) : shifted;
    sum += z[d];
  }
  const double factor = total * inv_count / sum;
  for (int64_t d = 0; d < cols; ++d) z[d] = (T)(z[d] * factor - target(d) * inv_count);
  return total * std::log(sum) - dot;
}

template <class S>
void softmax_xent(S* z, int64_t ld, int64_t rows, int64_t cols, const int32_t* labels, const uint8_t* mask,
                  double inv_count, const Real<S>* weights, double smoothing, const Real<S>* row_scale, double* loss,
                  double* partials, const Window& window, double* kept, int32_t threads) {
  typedef Real<S> R;
  constexpr bool in_place = std::is_same_v<S, R>;
  double own[kPartials] = {0};
  double* losses = kept ? kept : own;
#pragma omp parallel num_threads(threads)
  {
    std::vector<R> widened(in_place ? 0 : cols);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < kPartials; ++c) {
      double* sums = partials ? partials + c * cols : nullptr;
      const Span chunk = chunk_rows(window, rows, c);
      for (int64_t v = chunk.begin; v < chunk.end; ++v) {
        S* stored = z + v * ld;
        if (!(mask[v] & 1)) {
          memset(stored, 0, cols * sizeof(S));
          continue;
        }
        R* row;
        if constexpr (in_place)
          row = stored;
        else
          widen_row(stored, row = widened.data(), cols);
        losses[c] += weights || smoothing > 0 ? spread_row<R>(row, cols, labels[v], (R)inv_count, weights, smoothing)
                                              : xent_row<R>(row, cols, labels[v], (R)inv_count);
        if (sums)
          for (int64_t d = 0; d < cols; ++d) sums[d] += row[d];
        if (row_scale)
          for (int64_t d = 0; d < cols; ++d) row[d] *= row_scale[v];
        if constexpr (!in_place) narrow_row(row, stored, cols);
      }
    }
  }
  add_losses(window, rows, losses, inv_count, loss);
}

template <class S>
void confusion(const S* z, int64_t ld, int64_t rows, int64_t cols, const int32_t* labels, const uint8_t* mask,
               int64_t* counts, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<int64_t> mine(9 * cols, 0);
#pragma omp for schedule(static)
    for (int64_t v = 0; v < rows; ++v) {
      if (!(mask[v] & 7)) continue;
      const S* row = z + v * ld;
      int64_t best = 0;
      for (int64_t d = 1; d < cols; ++d) best = widen(row[d]) > widen(row[best]) ? d : best;
      for (int s = 0; s < 3; ++s) {
        if (!(mask[v] >> s & 1)) continue;
        mine[(3 * s) * cols + best] += best == labels[v];
        mine[(3 * s + 1) * cols + best] += 1;
        mine[(3 * s + 2) * cols + labels[v]] += 1;
      }
    }
#pragma omp critical
    for (int64_t i = 0; i < 9 * cols; ++i) counts[i] += mine[i];
  }
}

}  // namespace

#define MGGCN_LOSS(suffix, S)                                                                                       \
  MGGCN_EXPORT(mggcn_softmax_xent_##suffix)                                                                         \
  (S * z, int64_t ld, int64_t rows, int64_t cols, const int32_t* labels, const uint8_t* mask, double inv_count,     \
   const Real<S>* weights, double smoothing, const Real<S>* row_scale, double* loss, double* partials,              \
   int64_t window_first, int64_t total, double* kept, int32_t threads) {                                            \
    softmax_xent<S>(z, ld, rows, cols, labels, mask, inv_count, weights, smoothing, row_scale, loss, partials,      \
                    {window_first, total}, kept, threads);                                                          \
  }                                                                                                                 \
  MGGCN_EXPORT(mggcn_confusion_##suffix)                                                                            \
  (const S* z, int64_t ld, int64_t rows, int64_t cols, const int32_t* labels, const uint8_t* mask, int64_t* counts, \
   int32_t threads) {                                                                                               \
    confusion<S>(z, ld, rows, cols, labels, mask, counts, threads);                                                 \
  }
MGGCN_LOSS(f32, float)
MGGCN_LOSS(f64, double)
MGGCN_LOSS(bf16, bf16)
