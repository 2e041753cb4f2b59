// Row passes over dense data: epilogue, gather, scatter, and the mask of sparse features.
// finish           out[v, :] = epilogue(in[v, :]); in == out works in place if they are of one type. moves 2 V D
// gather_rows      out[i, :] = in[index[i], :]
// gather_sparse    out[i, :] = row ids[i] of a CSR matrix, divided by the sum of its absolute values if normalised;
//                  *bad is an entry whose column is none, if there is one.
// scatter_rows     out[index[i], :] = in[i, :];  scatter_add_rows  out[index[i], :] += in[i, :]; index without repeats.
// dropout_values   out[e] = values[e] under the mask of the dense row that has it.
// Dense rows are stored as S = float, double or bfloat16, those of the result as S or the other one of float and
// bfloat16; scales, bias, values and what is computed between a load and a store are of the type of sums (common.h), so
// bfloat16 is rounded once. Twin: cuda/rows.cu.
#include <algorithm>
#include <cmath>

#include "common.h"
#include "epilogue.h"
#include "pieces.h"

namespace {

// A row as it is, or converted.
template <class S, class O>
inline void copy_row(const S* in, O* out, int64_t cols) {
  if constexpr (!std::is_same_v<S, O>) {
    for (int64_t d = 0; d < cols; ++d) out[d] = narrow<O>(widen(in[d]));
  } else if (cols > 0) {  // without columns there may be no memory either
    memcpy(out, in, cols * sizeof(S));
  }
}

template <class S, class O>
void finish(const S* in, int64_t ld_in, O* out, int64_t ld_out, int64_t rows, int64_t cols, int64_t first_row,
            const Epilogue<Real<S>>* epilogue, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t v = 0; v < rows; ++v) {
    O* row = out + v * ld_out;
    const auto finished = [&](Real<S>* z, int64_t first, int64_t count) {
      finish_row(z, first, count, first_row + v, *epilogue);
    };
    if constexpr (std::is_same_v<S, O>) {
      if (in != out) copy_row(in + v * ld_in, row, cols);
      in_pieces(row, cols, finished);
    } else {
      between(in + v * ld_in, row, cols, finished);
    }
  }
}

template <class S, class O>
void gather_rows(const S* in, int64_t ld_in, const int32_t* index, O* out, int64_t ld_out, int64_t rows, int64_t cols,
                 int32_t threads) {
  // A row that is converted fills the processor's window, which then does not reach the next one: rows ahead are asked
  // for.
  constexpr int64_t kAhead = std::is_same_v<S, O> ? 0 : 4, kMost = 512;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    if constexpr (kAhead > 0) {
      const char* next = reinterpret_cast<const char*>(in + (int64_t)index[std::min(i + kAhead, rows - 1)] * ld_in);
      for (int64_t byte = 0; byte < std::min<int64_t>(cols * sizeof(S), kMost); byte += 64)
        __builtin_prefetch(next + byte);
    }
    copy_row(in + (int64_t)index[i] * ld_in, out + i * ld_out, cols);
  }
}

template <class O>
void gather_sparse(const int64_t* indptr, const int32_t* indices, const float* values, const int64_t* ids, O* out,
                   int64_t ld_out, int64_t rows, int64_t cols, int32_t normalised, int64_t* bad) {
  for (int64_t i = 0; i < rows; ++i) {
    O* row = out + i * ld_out;
    memset(static_cast<void*>(row), 0, cols * sizeof(O));
    const int64_t first = indptr[ids[i]], last = indptr[ids[i] + 1];
    double sum = 0;
    if (normalised)
      for (int64_t e = first; e < last; ++e) sum += values ? std::abs(values[e]) : 1;
    for (int64_t e = first; e < last; ++e) {
      const double value = values ? values[e] : 1;
      if ((uint32_t)indices[e] < (uint64_t)cols) {
        row[indices[e]] = narrow<O>((Real<O>)(sum > 0 ? value / sum : value));
      } else {
        *bad = e;
      }
    }
  }
}

template <class S, class O>
void scatter_rows(const S* in, int64_t ld_in, const int32_t* index, O* out, int64_t ld_out, int64_t rows, int64_t cols,
                  int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) copy_row(in + i * ld_in, out + (int64_t)index[i] * ld_out, cols);
}

template <class S, class O>
void scatter_add_rows(const S* in, int64_t ld_in, const int32_t* index, O* out, int64_t ld_out, int64_t rows,
                      int64_t cols, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    O* z = out + (int64_t)index[i] * ld_out;
    const S* x = in + i * ld_in;
    for (int64_t d = 0; d < cols; ++d) z[d] = narrow<O>(widen(z[d]) + widen(x[d]));
  }
}

// Input dropout on the nonzeros of sparse features: the same mask as drop_row gives the dense row.
template <class T>
void dropout_values(const int64_t* indptr, const int32_t* indices, const T* values, T* out, int64_t rows,
                    const int64_t* row_ids, const Dropout* dropout, int32_t threads) {
  const T scale = (T)(float)dropout->keep_scale;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t v = 0; v < rows; ++v) {
    const int64_t id = row_ids[v], end = indptr[v + 1];
    for (int64_t first = indptr[v]; first < end; first += kPhiloxLanes) {  // each in a lane of its own
      const int32_t* columns = indices + first;
      const int64_t count = std::min<int64_t>(kPhiloxLanes, end - first);
      PhiloxBlocks c;
      for (int64_t l = 0; l < kPhiloxLanes; ++l) set_counter(c, l, *dropout, id, columns[std::min(l, count - 1)] / 8);
      philox_blocks(*dropout, c);
      for (int64_t l = 0; l < count; ++l) {
        const uint32_t at = (uint32_t)columns[l] % 8;
        const uint16_t word = (uint16_t)(c[at / 2][l] >> 16 * (at % 2));
        out[first + l] = word >= dropout->threshold ? values[first + l] * scale : (T)0;
      }
    }
  }
}

}  // namespace

#define MGGCN_FINISH(suffix, S, O)                                                                    \
  MGGCN_EXPORT(mggcn_finish_##suffix)                                                                 \
  (const S* in, int64_t ld_in, O* out, int64_t ld_out, int64_t rows, int64_t cols, int64_t first_row, \
   const Epilogue<Real<S>>* epilogue, int32_t threads) {                                              \
    finish(in, ld_in, out, ld_out, rows, cols, first_row, epilogue, threads);                         \
  }
MGGCN_FINISH(f32, float, float)
MGGCN_FINISH(f64, double, double)
MGGCN_FINISH(bf16, bf16, bf16)
MGGCN_FINISH(f32_bf16, float, bf16)
MGGCN_FINISH(bf16_f32, bf16, float)

#define MGGCN_MOVE(move, suffix, S, O)                                                                   \
  MGGCN_EXPORT(mggcn_##move##_##suffix)                                                                  \
  (const S* in, int64_t ld_in, const int32_t* index, O* out, int64_t ld_out, int64_t rows, int64_t cols, \
   int32_t threads) {                                                                                    \
    move(in, ld_in, index, out, ld_out, rows, cols, threads);                                            \
  }
#define MGGCN_MOVES(suffix, S, O)        \
  MGGCN_MOVE(gather_rows, suffix, S, O)  \
  MGGCN_MOVE(scatter_rows, suffix, S, O) \
  MGGCN_MOVE(scatter_add_rows, suffix, S, O)
MGGCN_MOVES(f32, float, float)
MGGCN_MOVES(f64, double, double)
MGGCN_MOVES(bf16, bf16, bf16)
MGGCN_MOVES(f32_bf16, float, bf16)
MGGCN_MOVES(bf16_f32, bf16, float)

#define MGGCN_GATHER_SPARSE(suffix, O)                                                                             \
  MGGCN_EXPORT(mggcn_gather_sparse_##suffix)                                                                       \
  (const int64_t* indptr, const int32_t* indices, const float* values, const int64_t* ids, O* out, int64_t ld_out, \
   int64_t rows, int64_t cols, int32_t normalised, int64_t* bad) {                                                 \
    gather_sparse(indptr, indices, values, ids, out, ld_out, rows, cols, normalised, bad);                         \
  }
MGGCN_GATHER_SPARSE(f32, float)
MGGCN_GATHER_SPARSE(f64, double)
MGGCN_GATHER_SPARSE(bf16, bf16)

#define MGGCN_VALUES(suffix, T)                                                                                  \
  MGGCN_EXPORT(mggcn_dropout_values_##suffix)                                                                    \
  (const int64_t* indptr, const int32_t* indices, const T* values, T* out, int64_t rows, const int64_t* row_ids, \
   const Dropout* dropout, int32_t threads) {                                                                    \
    dropout_values<T>(indptr, indices, values, out, rows, row_ids, dropout, threads);                            \
  }
MGGCN_VALUES(f32, float)
MGGCN_VALUES(f64, double)
