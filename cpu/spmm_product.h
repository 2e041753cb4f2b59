// A product as the kernels read it, its hubs, and the columns of a row that get to their place by way of memory: all
// of a hub's and of bf16 with dropout, and those behind the last whole group of rows without padding.
#pragma once
#include "epilogue.h"
#include "pieces.h"
#include "spmm_row.h"

namespace {

struct Part {
  int64_t begin, end;
};

struct Hub {
  int64_t row, first_part, num_parts;
};

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class S, class O>
struct Product {  // `ProductArgs` of mggcn/backend/cpu_spmm.py
  int64_t num_chunks, num_parts, num_hubs;
  const int64_t* chunks;  // [num_chunks + 1]
  const Part* parts;
  const Hub* hubs;  // by row
  const int64_t* indptr;
  const int32_t* indices;
  const Real<S>* values;
  const S* dense;
  O* out;
  const Epilogue<Real<S>>* epilogue;  // or null
  S* packed;                          // [N, panel] or null
  int64_t* next;                      // [V] where the next block of a row begins, if blocks > 1
  Real<S>* sums;                      // [num_parts, ld_sums]
  int64_t ld_dense, ld_out, ld_sums, inner, cols, hub, panel, blocks, ahead;
  int32_t accumulate, threads;
};

// Columns [first, first + cols) of out from those of dense, and which block of its rows. The first `done` ones are
// whole groups, `tile` of them at a time, `tiles` times, in the last `smaller` ones of these one less.
template <class S>
struct Pass {
  const S* dense;
  int64_t ld, first, cols, block, done, tile, tiles, smaller;
  bool padded;          // rows of dense go on to the end of a group
  const Real<S>* tail;  // the bias of a last group that goes on behind the last column
};

// Dropout draws for whole pieces of a row.
template <class S, class O>
inline bool drops(const Product<S, O>& a) {
  return a.epilogue && a.epilogue->dropout.threshold;
}

template <class S, class O>
inline Pass<S> pass_of(const Product<S, O>& a, int64_t first, int64_t cols, const Real<S>* tail) {
  constexpr bool rounds = !std::is_same_v<O, Real<S>>;
  constexpr int width = Group<S>::width;
  const int64_t whole = up(cols, width);
  Pass<S> p = {a.dense + first, a.ld_dense, first, cols, 0, 0, 1, 0, 0, first + whole <= a.ld_dense, tail};
  if (a.packed) {
    p.dense = a.packed;
    p.ld = a.panel;
    p.padded = true;
  }
  if (rounds && drops(a)) return p;
  // Rows padded to whole vectors run without a scalar tail: the padding of sums holds numbers that nobody reads.
  p.done = p.padded && (rounds || first + whole <= a.ld_out) ? whole : cols / width * width;
  if (!p.done) return p;
  const int64_t groups = p.done / width;
  p.tiles = (groups + kTile<S> - 1) / kTile<S>;
  p.tile = (groups + p.tiles - 1) / p.tiles;
  p.smaller = p.tile * p.tiles - groups;
  return p;
}

template <class S, class O>
inline Entries<S> entries_of(const Product<S, O>& a, int64_t begin, int64_t end) {
  return {a.indices, a.values, begin, end, a.ahead};
}

// The sums of a hub's parts, added to what is there or to zero, then as any row.
template <class S, class O>
void store_hub(const Product<S, O>& a, const Hub& hub) {
  Real<S> sums[kPiece];
  for (int64_t first = 0; first < a.cols; first += kPiece) {
    const int64_t cols = a.cols - first < kPiece ? a.cols - first : kPiece;
    O* z = a.out + hub.row * a.ld_out + first;
    if (a.accumulate)
      widen_row(z, sums, cols);
    else
      memset(sums, 0, sizeof sums);
    for (int64_t part = hub.first_part; part < hub.first_part + hub.num_parts; ++part) {
      const Real<S>* added = a.sums + part * a.ld_sums + first;
      for (int64_t d = 0; d < cols; ++d) sums[d] += added[d];
    }
    if (a.epilogue) finish_row(sums, first, cols, hub.row, *a.epilogue);
    narrow_row(sums, z, cols);
  }
}

// Columns [at, cols) of row v of a result that is rounded.
template <bool Weighted, bool Ahead, class S, class O>
void store_pieces(const Product<S, O>& a, const Pass<S>& p, int64_t v, const Entries<S>& entries, int64_t at) {
  Real<S> sums[kPiece];
  for (; at < p.cols; at += kPiece) {
    const int64_t cols = p.cols - at < kPiece ? p.cols - at : kPiece, first = p.first + at;
    O* z = a.out + v * a.ld_out + first;
    if (a.accumulate) widen_row(z, sums, cols);
    add_row<Weighted, Ahead>(entries, p.dense + at, p.ld, sums, cols, p.padded || cols == kPiece, a.accumulate != 0);
    if (a.epilogue) finish_row(sums, first, cols, v, *a.epilogue);
    narrow_row(sums, z, cols);
  }
}

}  // namespace
