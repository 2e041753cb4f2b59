// Stored rows as numbers of the type of sums, some columns at a time.
#pragma once
#include "common.h"

namespace {

constexpr int64_t kPiece = 64;  // columns that are widened at a time: whole groups of dropout's words

template <class S>
inline void widen_row(const S* in, Real<S>* out, int64_t cols) {
  for (int64_t d = 0; d < cols; ++d) out[d] = widen(in[d]);
}

template <class S>
inline void narrow_row(const Real<S>* in, S* out, int64_t cols) {
  for (int64_t d = 0; d < cols; ++d) out[d] = narrow<S>(in[d]);
}

// f(columns, first, count) on pieces of a stored row as numbers of the type of sums; the result is stored again. Rows
// that need no conversion are one piece, in place.
template <class S, class F>
inline void in_pieces(S* row, int64_t cols, F f) {
  if constexpr (std::is_same_v<S, Real<S>>) {
    f(row, (int64_t)0, cols);
  } else {
    Real<S> piece[kPiece];
    for (int64_t first = 0; first < cols; first += kPiece) {
      const int64_t count = cols - first < kPiece ? cols - first : kPiece;
      widen_row(row + first, piece, count);
      f(piece, first, count);
      narrow_row(piece, row + first, count);
    }
  }
}

// The same from one stored row to another one of a different type.
template <class S, class O, class F>
inline void between(const S* from, O* to, int64_t cols, F f) {
  Real<S> piece[kPiece];
  for (int64_t first = 0; first < cols; first += kPiece) {
    const int64_t count = cols - first < kPiece ? cols - first : kPiece;
    widen_row(from + first, piece, count);
    f(piece, first, count);
    narrow_row(piece, to + first, count);
  }
}

}  // namespace
