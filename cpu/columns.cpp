// Passes over dense rows that add up columns: no atomics, bitwise repeatable.
// activation_grad  out = out_scale * d with d = (h != 0) * keep_scale * h_scale * g; adds the columns of d, the
// unscaled
//                  gradient, to partials. out is h, or a matrix of another type.                moves 3 V D
// sum_partials     out[d] = sum over chunks, in order, of partials[chunk, d]
// Rows may be a window of those that partials are sums of (common.h).
// g and h are stored as S = float, double or bfloat16; d is of the type of sums, rounded when stored, to S or beside
// float to bfloat16, and not before it is added. Twin: cuda/columns.cu.
#include "activation.h"

namespace {

template <class S, class O>
void activation_grad(const S* g, int64_t ld_g, const S* h, int64_t ld_h, O* out, int64_t ld_out, int64_t rows,
                     int64_t cols, int64_t first_row, const Activation<Real<S>>& activation, double* partials,
                     const Window& window, int32_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t c = 0; c < kPartials; ++c) {
    const Span chunk = chunk_rows(window, rows, c);
    for (int64_t v = chunk.begin; v < chunk.end; ++v)
      gradient_row(g + v * ld_g, h + v * ld_h, out + v * ld_out, cols, first_row + v, activation,
                   partials ? partials + c * cols : nullptr);
  }
}

template <class T>
void sum_partials(const double* partials, T* out, int64_t cols) {
  for (int64_t d = 0; d < cols; ++d) {
    double sum = 0;
    for (int64_t c = 0; c < kPartials; ++c) sum += partials[c * cols + d];
    out[d] = (T)sum;
  }
}

}  // namespace

#define MGGCN_COLUMNS(suffix, S, O)                                                                            \
  MGGCN_EXPORT(mggcn_activation_grad_##suffix)                                                                 \
  (const S* g, int64_t ld_g, const S* h, int64_t ld_h, O* out, int64_t ld_out, int64_t rows, int64_t cols,     \
   int64_t first_row, int32_t masked, double keep_scale, const Real<S>* h_scale, const Real<S>* out_scale,     \
   double* partials, int64_t window_first, int64_t total, int32_t threads) {                                   \
    activation_grad<S, O>(g, ld_g, h, ld_h, out, ld_out, rows, cols, first_row,                                \
                          {h_scale, out_scale, keep_scale, masked}, partials, {window_first, total}, threads); \
  }
MGGCN_COLUMNS(f32, float, float)
MGGCN_COLUMNS(f64, double, double)
MGGCN_COLUMNS(bf16, bf16, bf16)
MGGCN_COLUMNS(f32_bf16, float, bf16)

#define MGGCN_SUMS(suffix, T)                                                               \
  MGGCN_EXPORT(mggcn_sum_partials_##suffix)(const double* partials, T* out, int64_t cols) { \
    sum_partials<T>(partials, out, cols);                                                   \
  }
MGGCN_SUMS(f32, float)
MGGCN_SUMS(f64, double)
