// The transpose of a matrix by rows, by counting, on one thread.
#pragma once
#include "common.h"

namespace {

// Calls put(to, row, entry) for each entry: `to` is its place in the transpose, whose rows have entries in order of the
// matrix's rows. indptr int64 [rows + 1] from 0, columns int32 [indptr[rows]], each in 0 .. cols - 1; indptr_t int64
// [cols + 1]. Bound: a random line for each entry that `put` writes, in the cache for those of a batch.
template <class Put>
inline void transpose(const int64_t* indptr, const int32_t* columns, int64_t rows, int64_t cols, int64_t* indptr_t,
                      Put put) {
  // next: where a column's next entry goes; at the end it is where the column ends.
  int64_t *next = indptr_t + 1, at = 0;
  memset(indptr_t, 0, 8 * (cols + 1));
  for (int64_t i = 0; i < indptr[rows]; ++i) ++next[columns[i]];
  for (int64_t u = 0; u < cols; ++u) {
    const int64_t count = next[u];
    next[u] = at;
    at += count;
  }
  for (int64_t v = 0; v < rows; ++v)
    for (int64_t i = indptr[v]; i < indptr[v + 1]; ++i) put(next[columns[i]]++, v, i);
}

}  // namespace
