// Rows of a CSR as a sweep over the graph's files gives them, and which of its entries a rank takes.
#pragma once
#include <algorithm>

#include "common.h"
#include "owners.h"

namespace {

struct Sweep {
  const int64_t* indptr;   // [num_rows + 1], the chunk's own offsets into indices, first = 0
  const int32_t* indices;  // global columns of the chunk
  const float* values;     // or null
  int64_t first_row, num_rows;
  Owners owners;
  int64_t rows;  // V, rows of this rank
  int32_t rank, self_loops;
  const uint8_t *required_rows, *required_cols;  // [N]: entries elsewhere are left out; null: none is
};

inline bool keeps_row(const Sweep& s, int64_t v) { return !s.required_rows || s.required_rows[v]; }

inline bool keeps_column(const Sweep& s, int64_t u) { return !s.required_cols || s.required_cols[u]; }

// Whether row i of the chunk is to have a diagonal that the matrix has not stored.
inline bool lacks_diagonal(const Sweep& s, int64_t i) {
  const int64_t v = s.first_row + i;
  if (!s.self_loops || !keeps_row(s, v) || !keeps_column(s, v)) return false;
  return !std::binary_search(s.indices + s.indptr[i], s.indices + s.indptr[i + 1], (int32_t)v);
}

}  // namespace
