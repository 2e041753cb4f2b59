// What the choice of an SpMM kernel looks at in a matrix beside its extents (mggcn/backend/cpu/variants.py).
// ascending  result[0] = whether the entries of every row but for the last, which may be a self-loop that was added,
//            ascend. Cost: one pass over the entries.
// reuse      distinct[s, k] = different columns among the first first_edges 2^k entries behind place nnz s / num_starts
//            with k < num_levels: the working set of consecutive rows. A column counts once, however often it occurs.
//            Cost: num_starts first_edges 2^(num_levels - 1) entries; a bit per column and thread.
#include <vector>

#include "common.h"

MGGCN_EXPORT(mggcn_ascending)(const int64_t* indptr, const int32_t* indices, int64_t rows, int32_t* result,
                              int32_t threads) {
  int32_t ascending = 1;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : ascending)
  for (int64_t v = 0; v < rows; ++v) {
    bool row = true;
    for (int64_t e = indptr[v]; e + 2 < indptr[v + 1]; ++e) row &= indices[e] <= indices[e + 1];
    ascending = ascending && row;
  }
  *result = ascending;
}

MGGCN_EXPORT(mggcn_reuse)(const int32_t* indices, int64_t nnz, int64_t columns, int64_t num_starts, int64_t first_edges,
                          int64_t num_levels, int64_t* distinct, int32_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t s = 0; s < num_starts; ++s) {
    std::vector<uint64_t> seen(columns / 64 + 1, 0);
    int64_t e = nnz * s / num_starts, count = 0;
    for (int64_t k = 0; k < num_levels; ++k) {
      for (const int64_t stop = nnz * s / num_starts + (first_edges << k); e < stop; ++e) {
        const int32_t u = indices[e];
        count += ~(seen[u / 64] >> (u % 64)) & 1;
        seen[u / 64] |= (uint64_t)1 << (u % 64);
      }
      distinct[s * num_levels + k] = count;
    }
  }
}
