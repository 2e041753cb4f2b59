// triangles  how many triangles every vertex is in, of an undirected graph without self-loops and repeated edges
// in         indptr int64 [N + 1], indices int32 [E]: every edge once, at that of its ends which comes first in an
//            order of all vertices; in one by rising degree no row has more than sqrt(2 E) entries
// in/out     count int64 [N], to which is added; scratch: mark int32 [N] of -1
// Cost       a read of a mark for each entry of the row of each entry, at most E sqrt(2 E). One thread; whole numbers,
//            so that the order of sums changes nothing.
// Source     the forward algorithm: Schank and Wagner, "Finding, counting and listing all triangles in large graphs",
//            2005.
#include <cstdint>

#include "common.h"

MGGCN_EXPORT(mggcn_triangles)(const int64_t* indptr, const int32_t* indices, int64_t rows, int32_t* mark,
                              int64_t* count) {
  for (int64_t u = 0; u < rows; ++u) {
    const int64_t first = indptr[u], last = indptr[u + 1];
    for (int64_t e = first; e < last; ++e) mark[indices[e]] = (int32_t)u;
    for (int64_t e = first; e < last; ++e) {
      const int32_t v = indices[e];
      int64_t found = 0;
      for (int64_t f = indptr[v]; f < indptr[v + 1]; ++f) {
        const int32_t w = indices[f];
        const int64_t closed = mark[w] == (int32_t)u;
        count[w] += closed;
        found += closed;
      }
      count[v] += found;
      count[u] += found;
    }
  }
}
