// row_scales_*: S_r or S_c of some vertices of a graph (feed/norm_scales.py), from their rows of A^T alone:
//   out[t] = 1 / d, or d^-1/2 if symmetric, d the sum of row ids[t] (or its number of entries), plus 1 if self_loops
//            and the row lacks its diagonal; 0 where that is not finite. The sum is that of tile_degree (tiles.cpp),
//            bit for bit.
//   known    scales by vertex that were computed before, 0 where none was; or null. Threads may share it: two that
//            compute one write the same bits.
//   bad      set to the first id whose row pointers are not within the matrix (status 1), or whose sum is negative (2)
// Moves: a line of row pointers a vertex, of `known` one; under self-loops some of the row's columns, with values the
// row.
#include <cmath>

#include "common.h"

namespace {

struct RowScales {
  const int64_t *indptr, *ids;
  const int32_t* indices;
  const float* values;  // or null: all are 1
  void* known;
  int64_t num_entries, rows, bad;
  int32_t self_loops, symmetric, status;
};

inline bool has_diagonal(const int32_t* begin, const int32_t* end, int64_t v) {
  while (begin < end) {  // columns ascend
    const int32_t* middle = begin + (end - begin) / 2;
    if (*middle == v) return true;
    if (*middle < v) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return false;
}

template <class T>
void row_scales(RowScales& s, T* out) {
  T* known = static_cast<T*>(s.known);
  for (int64_t t = 0; t < s.rows; ++t) {
    if (t + 16 < s.rows) __builtin_prefetch(s.indptr + s.ids[t + 16]);
    const int64_t v = s.ids[t];
    if (known) {
      const T found = *const_cast<const volatile T*>(known + v);
      if (found != 0) {
        out[t] = found;
        continue;
      }
    }
    const int64_t first = s.indptr[v], last = s.indptr[v + 1];
    if (first < 0 || first > last || last > s.num_entries) {
      s.bad = v, s.status = 1;
      return;
    }
    double degree = s.self_loops && !has_diagonal(s.indices + first, s.indices + last, v) ? 1.0 : 0.0;
    if (s.values) {
      for (int64_t e = first; e < last; ++e) degree += (double)s.values[e];
    } else {
      degree += (double)(last - first);
    }
    if (degree < 0) {
      s.bad = v, s.status = 2;
      return;
    }
    const double scale = 1.0 / (s.symmetric ? std::sqrt(degree) : degree);
    out[t] = std::isfinite(scale) ? (T)scale : (T)0;
    if (known) known[v] = out[t];
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_row_scales_f32)(RowScales* s, float* out) { row_scales(*s, out); }
MGGCN_EXPORT(mggcn_row_scales_f64)(RowScales* s, double* out) { row_scales(*s, out); }
