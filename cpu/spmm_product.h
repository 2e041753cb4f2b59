// A product as the kernels read it, its cut into passes over columns and blocks, and its hubs.
#pragma once
#include "epilogue.h"
#include "pieces.h"
#include "spmm_sums.h"

namespace {

struct Part {
  int64_t begin, end;
};

struct Hub {
  int64_t row, first_part, num_parts;
};

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class S, class O>
struct Product {  // `ProductArgs` of mggcn/backend/cpu/structs.py
  int64_t num_chunks, num_parts, num_hubs;
  const int64_t* chunks;  // [num_chunks + 1]
  const Part* parts;
  const Hub* hubs;
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

// Whether the epilogue has dropout, which draws words for whole pieces of a row.
template <class S, class O>
inline bool drops(const Product<S, O>& a) {
  return a.epilogue && a.epilogue->dropout.threshold;
}

template <class S, class O>
inline Entries<S> entries_of(const Product<S, O>& a, int64_t begin, int64_t end, int64_t ahead) {
  return {a.indices, a.values, begin, end, ahead};
}

// Columns [first, first + cols) of the result, in one block of the operand's rows.
template <class S>
struct Pass {
  const S* dense;
  int64_t ld, first, cols;
  const Real<S>* tail;  // the bias of a last group that goes on behind the last column
  bool padded;          // rows of dense go on to the end of a group
  int64_t block = 0;
  int64_t grouped = 0;  // columns that run as whole groups; behind the last column they are padding
  Tiles tiles = {};
};

template <class S, class O>
inline Pass<S> pass_of(const Product<S, O>& a, int64_t first, const Real<S>* tail) {
  constexpr bool rounds = !std::is_same_v<O, Real<S>>;
  constexpr int width = Group<S>::width;
  const int64_t cols = a.cols - first < a.panel ? a.cols - first : a.panel, whole = up(cols, width);
  Pass<S> p = {a.dense + first, a.ld_dense, first, cols, tail, first + whole <= a.ld_dense};
  if (a.packed) {
    p.dense = a.packed;
    p.ld = a.panel;
    p.padded = true;
  }
  if (rounds && drops(a)) return p;  // by way of memory
  // Rows padded to whole vectors run without a scalar tail: the padding of sums holds numbers that nobody reads.
  p.grouped = p.padded && (rounds || first + whole <= a.ld_out) ? whole : cols / width * width;
  p.tiles = tiles_of<S>(p.grouped / width);
  return p;
}

// Whether rows begin with this pass, end with it, and get their epilogue on the way from registers.
template <class S, class O>
inline bool begins(const Product<S, O>& a, const Pass<S>& p) {
  return p.block == 0 && !a.accumulate;
}
template <class S, class O>
inline bool ends(const Product<S, O>& a, const Pass<S>& p) {
  return p.block + 1 == a.blocks;
}
template <class S, class O>
inline bool finishes(const Product<S, O>& a, const Pass<S>& p) {
  return ends(a, p) && a.epilogue && !drops(a);
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

}  // namespace
