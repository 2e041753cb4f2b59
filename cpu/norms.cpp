// Layer norm and batch norm of dense rows, computed in double and rounded where they are stored; V rows, D columns.
// layer_norm       out = gain * y + bias, y = (z - mean) * scale, scale = 1 / sqrt(variance + eps), row by row; out may
//                  be z.                                                                       moves 2 V D
// layer_norm_grad  out = scale * (h - mean(h) - y mean(h y)), h = gain * g, means over a row; partials [2, chunks, D]
//                  receive the column sums of g, then those of g * y. out may be g.            moves 3 V D
// column_moments   partials [chunks, D] = the column sums of once * z, or with means of once * (z - mean)^2; V D
// batch_norm       out = factor * (z - mean) + shift, vectors over the columns; out may be z.  moves 2 V D
// column_products  partials [2, chunks, D] = the column sums of g, then those of g * (z - mean), mean 0 if null; moves
//                  2 V D
// batch_norm_grad  out = factor * (g - once * (slope * (z - mean) + shift)); out may be g.     moves 3 V D
// Rows are stored as S = float, double or bfloat16; gain and bias are Real<S>, all other vectors double: once [V], 0
// for rows that another rank counts. Every sum is added in an order that shapes alone fix: a row by RowSum, a column
// row after row of a chunk (common.h), of which a call may have a window. Twin: cuda/norms.cu.
#include <cmath>

#include "wide.h"

namespace {

template <class S>
struct Norm {
  const S* g;
  int64_t ld_g;
  const S* z;
  int64_t ld_z;
  S* out;
  int64_t ld_out;
  const Real<S>*gain, *bias;
  const double *mean, *factor, *slope, *shift, *once;
  double* partials;
  double eps;
  int64_t rows, cols;
  Window window;
  int32_t threads;
};

template <class S>
using Row = void (*)(const Norm<S>&, int64_t row, double* sums);

// All rows of a call, those of passes with sums by chunks; sums: of this chunk, the second ones kPartials rows behind,
// zero when the first window begins, or null.
template <class S, Row<S> row>
void over_rows(const Norm<S>& a, int sums_of_a_row) {
  if (!sums_of_a_row) {
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t v = 0; v < a.rows; ++v) row(a, v, nullptr);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t c = 0; c < kPartials; ++c) {
    double* sums = a.partials + c * a.cols;
    for (int s = 0; s < sums_of_a_row && a.window.first == 0; ++s)
      for (int64_t d = 0; d < a.cols; ++d) sums[s * kPartials * a.cols + d] = 0;
    const Span chunk = chunk_rows(a.window, a.rows, c);
    for (int64_t v = chunk.begin; v < chunk.end; ++v) row(a, v, sums);
  }
}

template <class L>
MGGCN_INLINE void add(double* sums, typename L::type x) {
  L::store(sums, L::load(sums) + x);
}

struct Moments {
  double mean, scale;
};

// In two passes over a row, which the cache holds, so that nothing cancels.
template <class S>
MGGCN_INLINE Moments moments(const S* z, int64_t cols, double eps) {
  RowSum sum, squares;
  over_columns(cols, [&](auto l, int64_t d) { sum.add<decltype(l)>(decltype(l)::load(z + d)); });
  const double mean = sum.total() / cols;
  over_columns(cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    const auto y = L::load(z + d) - mean;
    squares.add<L>(y * y);
  });
  return {mean, 1 / std::sqrt(squares.total() / cols + eps)};
}

template <class S>
void layer_norm_row(const Norm<S>& a, int64_t v, double*) {
  const S* z = a.z + v * a.ld_z;
  S* out = a.out + v * a.ld_out;
  const Moments m = moments(z, a.cols, a.eps);
  over_columns(a.cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    L::store(out + d, (L::load(z + d) - m.mean) * m.scale * L::load(a.gain + d) + L::load(a.bias + d));
  });
}

template <class S>
void layer_norm_grad_row(const Norm<S>& a, int64_t v, double* of_bias) {
  const S *g = a.g + v * a.ld_g, *z = a.z + v * a.ld_z;
  S* out = a.out + v * a.ld_out;
  double* of_gain = of_bias + kPartials * a.cols;
  const Moments m = moments(z, a.cols, a.eps);
  RowSum of_h, of_hy;
  over_columns(a.cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    const auto x = L::load(g + d), y = (L::load(z + d) - m.mean) * m.scale, h = x * L::load(a.gain + d);
    add<L>(of_bias + d, x);
    add<L>(of_gain + d, x * y);
    of_h.add<L>(h);
    of_hy.add<L>(h * y);
  });
  const double mean_h = of_h.total() / a.cols, mean_hy = of_hy.total() / a.cols;
  over_columns(a.cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    const auto y = (L::load(z + d) - m.mean) * m.scale, h = L::load(g + d) * L::load(a.gain + d);
    L::store(out + d, m.scale * (h - mean_h - y * mean_hy));
  });
}

template <class S>
void column_moments_row(const Norm<S>& a, int64_t v, double* sums) {
  const S* z = a.z + v * a.ld_z;
  if (a.once[v] == 0) return;
  if (a.mean)
    over_columns(a.cols, [&](auto l, int64_t d) {
      typedef decltype(l) L;
      const auto y = L::load(z + d) - L::load(a.mean + d);
      add<L>(sums + d, y * y);
    });
  else
    over_columns(a.cols, [&](auto l, int64_t d) { add<decltype(l)>(sums + d, decltype(l)::load(z + d)); });
}

template <class S>
void batch_norm_row(const Norm<S>& a, int64_t v, double*) {
  const S* z = a.z + v * a.ld_z;
  S* out = a.out + v * a.ld_out;
  over_columns(a.cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    L::store(out + d, (L::load(z + d) - L::load(a.mean + d)) * L::load(a.factor + d) + L::load(a.shift + d));
  });
}

template <class S>
void column_products_row(const Norm<S>& a, int64_t v, double* of_bias) {
  const S *g = a.g + v * a.ld_g, *z = a.z + v * a.ld_z;
  double* of_gain = of_bias + kPartials * a.cols;
  over_columns(a.cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    const auto x = L::load(g + d);
    auto y = L::load(z + d);
    if (a.mean) y -= L::load(a.mean + d);
    add<L>(of_bias + d, x);
    add<L>(of_gain + d, x * y);
  });
}

template <class S>
void batch_norm_grad_row(const Norm<S>& a, int64_t v, double*) {
  const S *g = a.g + v * a.ld_g, *z = a.z + v * a.ld_z;
  S* out = a.out + v * a.ld_out;
  const double once = a.once[v];
  over_columns(a.cols, [&](auto l, int64_t d) {
    typedef decltype(l) L;
    const auto y = (L::load(z + d) - L::load(a.mean + d)) * L::load(a.slope + d) + L::load(a.shift + d);
    L::store(out + d, (L::load(g + d) - y * once) * L::load(a.factor + d));
  });
}

}  // namespace

#define MGGCN_NORM(kernel, suffix, S, sums) \
  MGGCN_EXPORT(mggcn_##kernel##_##suffix)(const Norm<S>* a) { over_rows<S, kernel##_row<S>>(*a, sums); }
#define MGGCN_NORMS(suffix, S)              \
  MGGCN_NORM(layer_norm, suffix, S, 0)      \
  MGGCN_NORM(layer_norm_grad, suffix, S, 2) \
  MGGCN_NORM(column_moments, suffix, S, 1)  \
  MGGCN_NORM(batch_norm, suffix, S, 0)      \
  MGGCN_NORM(column_products, suffix, S, 2) \
  MGGCN_NORM(batch_norm_grad, suffix, S, 0)
MGGCN_NORMS(f32, float)
MGGCN_NORMS(f64, double)
MGGCN_NORMS(bf16, bf16)
