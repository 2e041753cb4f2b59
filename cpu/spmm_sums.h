// Columns of a row as sums in memory: parts of hubs, and what whole groups of a row do not cover.
#pragma once
#include "spmm_row.h"

namespace {

// Sums of `groups` groups of columns.
template <class S>
__attribute__((noinline)) void add_groups(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out,
                                          int64_t groups, bool accumulate) {
  const Tiles tiles = tiles_of<S>(groups);
  const Result<S, Real<S>> result = {out, groups * Group<S>::width, accumulate, nullptr, nullptr, 1, 1, false};
  int64_t at = 0;
  for (int64_t k = 0; k < tiles.num; ++k) {
    const int64_t size = tiles.size - (k >= tiles.num - tiles.num_smaller);
    with_tile<S>(size, [&](auto n) { row_tile<n(), S>(entries, dense, ld, result, at); });
    at += size * Group<S>::width;
  }
}

// sum + w * x, rounded as a group's sums are. Left to the compiler, a loop over entries may round products alone,
// whatever its options allow it to join.
template <class R>
MGGCN_INLINE R added(R sum, R w, R x) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::is_same_v<R, float> ? (R)__builtin_fmaf(w, x, sum) : (R)__builtin_fma(w, x, sum);
#else
  return sum + w * x;
#endif
}

// `N` columns, fewer than a group has: a fixed number of sums stays in registers.
template <int N, bool Weighted, class S>
MGGCN_INLINE void few_columns(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, bool accumulate) {
  Real<S> sum[N];
#pragma GCC unroll 16
  for (int d = 0; d < N; ++d) sum[d] = accumulate ? out[d] : 0;
  for (int64_t e = entries.begin; e < entries.end; ++e) {
    const S* x = dense + (int64_t)entries.indices[e] * ld;
    const Real<S> w = Weighted ? entries.values[e] : (Real<S>)1;
#pragma GCC unroll 16
    for (int d = 0; d < N; ++d) sum[d] = Weighted ? added(sum[d], w, widen(x[d])) : sum[d] + widen(x[d]);
  }
#pragma GCC unroll 16
  for (int d = 0; d < N; ++d) out[d] = sum[d];
}

// The last columns of rows without padding, fewer than a group.
template <bool Weighted, class S>
inline void tail_columns(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols,
                         bool accumulate) {
  for (; cols >= 4; cols -= 4) {
    few_columns<4, Weighted, S>(entries, dense, ld, out, accumulate);
    dense += 4;
    out += 4;
  }
  if (cols == 3) few_columns<3, Weighted, S>(entries, dense, ld, out, accumulate);
  if (cols == 2) few_columns<2, Weighted, S>(entries, dense, ld, out, accumulate);
  if (cols == 1) few_columns<1, Weighted, S>(entries, dense, ld, out, accumulate);
}

template <class S>
inline void row_tail(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols,
                     bool accumulate) {
  if (entries.values)
    tail_columns<true>(entries, dense, ld, out, cols, accumulate);
  else
    tail_columns<false>(entries, dense, ld, out, cols, accumulate);
}

// Sums of `cols` columns; where `padded`, operand and sums go on to the end of a group.
template <class S>
inline void add_row(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols, bool padded,
                    bool accumulate) {
  constexpr int width = Group<S>::width;
  const int64_t groups = padded ? (cols + width - 1) / width : cols / width, done = groups * width;
  add_groups<S>(entries, dense, ld, out, groups, accumulate);
  if (done < cols) row_tail<S>(entries, dense + done, ld, out + done, cols - done, accumulate);
}

}  // namespace
