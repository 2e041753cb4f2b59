// Row passes over dense data: epilogue, activation gradient, gather, scatter, and the sums of columns.
// finish           out[v, :] = epilogue(in[v, :]); in == out works in place.                    moves 2 V D
// activation_grad  h = out_scale * d with d = (h != 0) * keep_scale * h_scale * g; adds the columns of d, the unscaled
//                  gradient, to partials.                                                       moves 3 V D
// gather_rows      out[i, :] = in[index[i], :]
// scatter_rows     out[index[i], :] = in[i, :];  scatter_add_rows  out[index[i], :] += in[i, :]; index without repeats.
// sum_partials     out[d] = sum over chunks, in order, of partials[chunk, d]. No atomics: bitwise repeatable.
#include "common.h"
#include "epilogue.h"

namespace {

template <class T>
void finish(const T* in, int64_t ld_in, T* out, int64_t ld_out, int64_t rows, int64_t cols, int64_t first_row,
            const Epilogue<T>* epilogue, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t v = 0; v < rows; ++v) {
    T* z = out + v * ld_out;
    if (in != out) memcpy(z, in + v * ld_in, cols * sizeof(T));
    finish_row(z, cols, first_row + v, *epilogue);
  }
}

template <class T>
void activation_grad(const T* g, int64_t ld_g, T* h, int64_t ld_h, int64_t rows, int64_t cols, int64_t first_row,
                     int32_t masked, double keep_scale, const T* h_scale, const T* out_scale, double* partials,
                     int32_t threads) {
  const T keep = (T)(float)keep_scale;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t c = 0; c < kPartials; ++c) {
    double* sums = partials ? partials + c * cols : nullptr;
    for (int64_t v = chunk_start(rows, c); v < chunk_start(rows, c + 1); ++v) {
      const T* in = g + v * ld_g;
      T* out = h + v * ld_h;
      const T scale = h_scale ? keep * h_scale[first_row + v] : keep;
      if (masked)
        for (int64_t d = 0; d < cols; ++d) out[d] = out[d] != (T)0 ? in[d] * scale : (T)0;
      else
        for (int64_t d = 0; d < cols; ++d) out[d] = in[d] * scale;
      if (sums)
        for (int64_t d = 0; d < cols; ++d) sums[d] += out[d];
      if (out_scale) {
        const T s = out_scale[first_row + v];
        for (int64_t d = 0; d < cols; ++d) out[d] *= s;
      }
    }
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

template <class T>
void gather_rows(const T* in, int64_t ld_in, const int32_t* index, T* out, int64_t ld_out, int64_t rows, int64_t cols,
                 int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) memcpy(out + i * ld_out, in + (int64_t)index[i] * ld_in, cols * sizeof(T));
}

template <class T>
void scatter_rows(const T* in, int64_t ld_in, const int32_t* index, T* out, int64_t ld_out, int64_t rows, int64_t cols,
                  int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) memcpy(out + (int64_t)index[i] * ld_out, in + i * ld_in, cols * sizeof(T));
}

template <class T>
void scatter_add_rows(const T* in, int64_t ld_in, const int32_t* index, T* out, int64_t ld_out, int64_t rows,
                      int64_t cols, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    T* z = out + (int64_t)index[i] * ld_out;
    for (int64_t d = 0; d < cols; ++d) z[d] += in[i * ld_in + d];
  }
}

// Input dropout on the nonzeros of sparse features: the same mask as drop_row gives the dense row.
template <class T>
void dropout_values(const int64_t* indptr, const int32_t* indices, const T* values, T* out, int64_t rows,
                    const int64_t* row_ids, const Dropout* dropout, int32_t threads) {
  const T scale = (T)(float)dropout->keep_scale;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t v = 0; v < rows; ++v) {
    uint16_t words[64];
    int64_t ready = -1;
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
      const int64_t block = indices[e] / 64;
      if (block != ready) philox_words(*dropout, row_ids[v], (uint32_t)(8 * block), words);
      ready = block;
      out[e] = words[indices[e] % 64] >= dropout->threshold ? values[e] * scale : (T)0;
    }
  }
}

}  // namespace

#define MGGCN_ROWS(suffix, T)                                                                                     \
  MGGCN_EXPORT(mggcn_finish_##suffix)                                                                             \
  (const T* in, int64_t ld_in, T* out, int64_t ld_out, int64_t rows, int64_t cols, int64_t first_row,             \
   const Epilogue<T>* epilogue, int32_t threads) {                                                                \
    finish<T>(in, ld_in, out, ld_out, rows, cols, first_row, epilogue, threads);                                  \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_activation_grad_##suffix)                                                                    \
  (const T* g, int64_t ld_g, T* h, int64_t ld_h, int64_t rows, int64_t cols, int64_t first_row, int32_t masked,   \
   double keep_scale, const T* h_scale, const T* out_scale, double* partials, int32_t threads) {                  \
    activation_grad<T>(g, ld_g, h, ld_h, rows, cols, first_row, masked, keep_scale, h_scale, out_scale, partials, \
                       threads);                                                                                  \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_sum_partials_##suffix)(const double* partials, T* out, int64_t cols) {                       \
    sum_partials<T>(partials, out, cols);                                                                         \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_gather_rows_##suffix)                                                                        \
  (const T* in, int64_t ld_in, const int32_t* index, T* out, int64_t ld_out, int64_t rows, int64_t cols,          \
   int32_t threads) {                                                                                             \
    gather_rows<T>(in, ld_in, index, out, ld_out, rows, cols, threads);                                           \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_scatter_rows_##suffix)                                                                       \
  (const T* in, int64_t ld_in, const int32_t* index, T* out, int64_t ld_out, int64_t rows, int64_t cols,          \
   int32_t threads) {                                                                                             \
    scatter_rows<T>(in, ld_in, index, out, ld_out, rows, cols, threads);                                          \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_scatter_add_rows_##suffix)                                                                   \
  (const T* in, int64_t ld_in, const int32_t* index, T* out, int64_t ld_out, int64_t rows, int64_t cols,          \
   int32_t threads) {                                                                                             \
    scatter_add_rows<T>(in, ld_in, index, out, ld_out, rows, cols, threads);                                      \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_dropout_values_##suffix)                                                                     \
  (const int64_t* indptr, const int32_t* indices, const T* values, T* out, int64_t rows, const int64_t* row_ids,  \
   const Dropout* dropout, int32_t threads) {                                                                     \
    dropout_values<T>(indptr, indices, values, out, rows, row_ids, dropout, threads);                             \
  }
MGGCN_ROWS(f32, float)
MGGCN_ROWS(f64, double)
