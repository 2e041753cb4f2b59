// Rows of a graph as the sweeps of a locality order hand them over.
#pragma once
#include <omp.h>

#include <cstdint>

namespace {

// Rows of A, and of A^T where it is another matrix, of some consecutive vertices.
struct Chunk {
  const int64_t* indptr;   // [num_rows + 1], the chunk's own offsets
  const int32_t* indices;  // columns
  const int64_t* indptr_t;
  const int32_t* indices_t;  // rows of the transpose, or null
  int64_t first_row, num_rows;
  int32_t threads;

  int64_t entries(int64_t i) const {
    return indptr[i + 1] - indptr[i] + (indptr_t ? indptr_t[i + 1] - indptr_t[i] : 0);
  }
  // Entries of the longer of the vertex's two rows.
  int64_t longest(int64_t i) const {
    const int64_t here = indptr[i + 1] - indptr[i], there = indptr_t ? indptr_t[i + 1] - indptr_t[i] : 0;
    return here > there ? here : there;
  }
  template <class F>
  void each(int64_t i, int64_t step, F f) const {
    for (int64_t e = indptr[i]; e < indptr[i + 1]; e += step) f(indices[e]);
    if (indptr_t)
      for (int64_t e = indptr_t[i]; e < indptr_t[i + 1]; e += step) f(indices_t[e]);
  }
};

constexpr int kMaxThreads = 1024;

// What `walk(low, high, f)` finds in rows low .. high - 1, calling f(a, b) for each, is numbered in the order of the
// rows from *filled on, whatever the threads: all count first, then put(number, a, b). count_only: *filled moves on all
// the same.
template <class Walk, class Put>
inline void fill_in_order(int64_t rows, int32_t threads, int64_t* filled, Walk walk, bool count_only, Put put) {
  int64_t ends[kMaxThreads + 1] = {0};
#pragma omp parallel num_threads(threads < kMaxThreads ? threads : kMaxThreads)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t low = rows * me / all, high = rows * (me + 1) / all;
    int64_t count = 0;
    walk(low, high, [&](auto, auto) { ++count; });
    ends[me + 1] = count;
#pragma omp barrier
#pragma omp single
    for (int t = 0; t < all; ++t) ends[t + 1] += ends[t];
    if (!count_only) {
      int64_t at = *filled + ends[me];
      walk(low, high, [&](auto a, auto b) { put(at++, a, b); });
    }
#pragma omp barrier
#pragma omp single
    *filled += ends[all];
  }
}

}  // namespace
