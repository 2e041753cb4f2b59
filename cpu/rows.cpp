// Row passes over dense data: epilogue, gather, scatter, and the mask of sparse features.
// finish           out[v, :] = epilogue(in[v, :]); in == out works in place.                    moves 2 V D
// gather_rows      out[i, :] = in[index[i], :]
// scatter_rows     out[index[i], :] = in[i, :];  scatter_add_rows  out[index[i], :] += in[i, :]; index without repeats.
// dropout_values   out[e] = values[e] under the mask of the dense row that has it.
// Dense rows are stored as S = float, double or bfloat16; scales, bias, values and what is computed between a load and
// a store are of the type of sums (common.h), so bfloat16 is rounded once. Twin: cuda/rows.cu.
#include "common.h"
#include "epilogue.h"
#include "pieces.h"

namespace {

template <class S>
void finish(const S* in, int64_t ld_in, S* out, int64_t ld_out, int64_t rows, int64_t cols, int64_t first_row,
            const Epilogue<Real<S>>* epilogue, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t v = 0; v < rows; ++v) {
    S* row = out + v * ld_out;
    if (in != out) memcpy(row, in + v * ld_in, cols * sizeof(S));
    in_pieces(row, cols,
              [&](Real<S>* z, int64_t first, int64_t count) { finish_row(z, first, count, first_row + v, *epilogue); });
  }
}

template <class S>
void gather_rows(const S* in, int64_t ld_in, const int32_t* index, S* out, int64_t ld_out, int64_t rows, int64_t cols,
                 int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) memcpy(out + i * ld_out, in + (int64_t)index[i] * ld_in, cols * sizeof(S));
}

template <class S>
void scatter_rows(const S* in, int64_t ld_in, const int32_t* index, S* out, int64_t ld_out, int64_t rows, int64_t cols,
                  int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) memcpy(out + (int64_t)index[i] * ld_out, in + i * ld_in, cols * sizeof(S));
}

template <class S>
void scatter_add_rows(const S* in, int64_t ld_in, const int32_t* index, S* out, int64_t ld_out, int64_t rows,
                      int64_t cols, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    S* z = out + (int64_t)index[i] * ld_out;
    const S* x = in + i * ld_in;
    for (int64_t d = 0; d < cols; ++d) z[d] = narrow<S>(widen(z[d]) + widen(x[d]));
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
      if (block != ready) philox_words<8>(*dropout, row_ids[v], (uint32_t)(8 * block), words);
      ready = block;
      out[e] = words[indices[e] % 64] >= dropout->threshold ? values[e] * scale : (T)0;
    }
  }
}

}  // namespace

#define MGGCN_ROWS(suffix, S)                                                                            \
  MGGCN_EXPORT(mggcn_finish_##suffix)                                                                    \
  (const S* in, int64_t ld_in, S* out, int64_t ld_out, int64_t rows, int64_t cols, int64_t first_row,    \
   const Epilogue<Real<S>>* epilogue, int32_t threads) {                                                 \
    finish<S>(in, ld_in, out, ld_out, rows, cols, first_row, epilogue, threads);                         \
  }                                                                                                      \
  MGGCN_EXPORT(mggcn_gather_rows_##suffix)                                                               \
  (const S* in, int64_t ld_in, const int32_t* index, S* out, int64_t ld_out, int64_t rows, int64_t cols, \
   int32_t threads) {                                                                                    \
    gather_rows<S>(in, ld_in, index, out, ld_out, rows, cols, threads);                                  \
  }                                                                                                      \
  MGGCN_EXPORT(mggcn_scatter_rows_##suffix)                                                              \
  (const S* in, int64_t ld_in, const int32_t* index, S* out, int64_t ld_out, int64_t rows, int64_t cols, \
   int32_t threads) {                                                                                    \
    scatter_rows<S>(in, ld_in, index, out, ld_out, rows, cols, threads);                                 \
  }                                                                                                      \
  MGGCN_EXPORT(mggcn_scatter_add_rows_##suffix)                                                          \
  (const S* in, int64_t ld_in, const int32_t* index, S* out, int64_t ld_out, int64_t rows, int64_t cols, \
   int32_t threads) {                                                                                    \
    scatter_add_rows<S>(in, ld_in, index, out, ld_out, rows, cols, threads);                             \
  }
MGGCN_ROWS(f32, float)
MGGCN_ROWS(f64, double)
MGGCN_ROWS(bf16, bf16)

#define MGGCN_VALUES(suffix, T)                                                                                  \
  MGGCN_EXPORT(mggcn_dropout_values_##suffix)                                                                    \
  (const int64_t* indptr, const int32_t* indices, const T* values, T* out, int64_t rows, const int64_t* row_ids, \
   const Dropout* dropout, int32_t threads) {                                                                    \
    dropout_values<T>(indptr, indices, values, out, rows, row_ids, dropout, threads);                            \
  }
MGGCN_VALUES(f32, float)
MGGCN_VALUES(f64, double)
