// Rows of sparse features as the matrix of a batch, and transposes of it: on one thread, with the same bits in each
// run. gather_csr     in   indptr int64 [N + 1], indices int32 [stored], values float [stored] or null (all one); ids
// int64
//                     [rows]; scale T [rows] or null
//                out  indptr_out int64 [rows + 1], indices_out int32 [capacity], values_out T [capacity]: row ids[i],
//                     divided by the sum of its absolute values if normalised, times scale[i]
//                     status int64 [2]: how it ended (Status), and at which entry of the features, or which row
// transpose_csr  in   the first `rows` rows of that matrix
//                out  indptr_t int64 [cols + 1], indices_t int32 [nnz], values_t T [nnz], order int32 [nnz] or null:
//                     the entry of each in the matrix
// T is the type of sums. Nothing is written behind an end, nothing allocated. Moves 4 + 4 bytes an entry (4 without
// values) in rows that are found at random, and 4 + sizeof(T) written; a transpose as many, column by column.
#include <algorithm>
#include <cmath>

#include "common.h"
#include "transpose.h"

namespace {

enum Status : int64_t { kDone = 0, kFull = 1, kColumn = 2, kPointers = 3, kRepeated = 4 };

// A row is found in two steps: its pointers are asked for, and then its entries.
constexpr int64_t kPointersAhead = 16, kEntriesAhead = 4;

struct Features {
  const int64_t* indptr;
  const int32_t* indices;
  const float* values;
  int64_t cols, stored;

  void ask_for(const int64_t* ids, int64_t i, int64_t rows) const {
    __builtin_prefetch(indptr + ids[std::min(i + kPointersAhead, rows - 1)]);
    const int64_t start = indptr[ids[std::min(i + kEntriesAhead, rows - 1)]];
    if (start < 0 || start >= stored) return;
    __builtin_prefetch(indices + start);
    if (values) __builtin_prefetch(values + start);
  }

  // What the row's values are divided by.
  double norm(int64_t first, int64_t last, bool normalised) const {
    if (!normalised) return 1;
    double sum = values ? 0 : (double)(last - first);
    if (values)
      for (int64_t e = first; e < last; ++e) sum += std::abs((double)values[e]);
    return sum > 0 ? sum : 1;
  }
};

template <class T>
void gather_csr(const Features& from, const int64_t* ids, const T* scale, int64_t rows, bool normalised,
                int64_t capacity, int64_t* indptr_out, int32_t* indices_out, T* values_out, int64_t* status) {
  int64_t out = 0;
  indptr_out[0] = 0;
  status[0] = kDone;
  for (int64_t i = 0; i < rows; ++i) {
    from.ask_for(ids, i, rows);
    const int64_t first = from.indptr[ids[i]], last = from.indptr[ids[i] + 1];
    if (first < 0 || last < first || last > from.stored) {
      status[0] = kPointers;
      status[1] = ids[i];
      return;
    }
    if (last - first > from.cols) {  // no batch has room for it: rows were counted as no longer than there are columns
      status[0] = kRepeated;
      status[1] = ids[i];
      return;
    }
    if (last - first > capacity - out) {
      status[0] = kFull;
      return;
    }
    const double norm = from.norm(first, last, normalised);
    for (int64_t e = first; e < last; ++e, ++out) {
      if ((uint32_t)from.indices[e] >= (uint64_t)from.cols) {
        status[0] = kColumn;
        status[1] = e;
        return;
      }
      indices_out[out] = from.indices[e];
      const T itself = from.values ? (T)from.values[e] : (T)1, value = normalised ? (T)(itself / norm) : itself;
      values_out[out] = scale ? value * scale[i] : value;
    }
    indptr_out[i + 1] = out;
  }
}

template <class T>
void transpose_csr(const int64_t* indptr, const int32_t* indices, const T* values, int64_t rows, int64_t cols,
                   int64_t* indptr_t, int32_t* indices_t, T* values_t, int32_t* order) {
  transpose(indptr, indices, rows, cols, indptr_t, [&](int64_t to, int64_t row, int64_t entry) {
    indices_t[to] = (int32_t)row;
    values_t[to] = values[entry];
    if (order) order[to] = (int32_t)entry;
  });
}

}  // namespace

#define MGGCN_SPARSE_ROWS(suffix, T)                                                                              \
  MGGCN_EXPORT(mggcn_gather_csr_##suffix)                                                                         \
  (const int64_t* indptr, const int32_t* indices, const float* values, int64_t cols, int64_t stored,              \
   const int64_t* ids, const T* scale, int64_t rows, int32_t normalised, int64_t capacity, int64_t* indptr_out,   \
   int32_t* indices_out, T* values_out, int64_t* status) {                                                        \
    gather_csr<T>({indptr, indices, values, cols, stored}, ids, scale, rows, normalised, capacity, indptr_out,    \
                  indices_out, values_out, status);                                                               \
  }                                                                                                               \
  MGGCN_EXPORT(mggcn_transpose_csr_##suffix)                                                                      \
  (const int64_t* indptr, const int32_t* indices, const T* values, int64_t rows, int64_t cols, int64_t* indptr_t, \
   int32_t* indices_t, T* values_t, int32_t* order) {                                                             \
    transpose_csr<T>(indptr, indices, values, rows, cols, indptr_t, indices_t, values_t, order);                  \
  }
MGGCN_SPARSE_ROWS(f32, float)
MGGCN_SPARSE_ROWS(f64, double)
