// A product as the kernels read it, and how one of its rows gets to its place: straight from registers, or by way of
// memory where it is a hub, drops or ends within a group.
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

// Columns [first, first + cols) of out from those of dense, and which block of its rows.
template <class S>
struct Pass {
  const S* dense;
  int64_t ld, first, cols, block;
  bool padded;          // rows of dense go on to the end of a group
  const Real<S>* tail;  // the bias of a last group that goes on behind the last column
};

// Dropout draws for whole pieces of a row.
template <class S, class O>
inline bool drops(const Product<S, O>& a) {
  return a.epilogue && a.epilogue->dropout.threshold;
}

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class S, class O>
inline Entries<S> entries_of(const Product<S, O>& a, int64_t begin, int64_t end) {
  return {a.indices, a.values, begin, end, a.ahead};
}

// Row v where it goes, the epilogue on its way.
template <class S, class O>
inline Result<S, O> result_of(const Product<S, O>& a, const Pass<S>& p, int64_t v, bool accumulate, bool last) {
  typedef Real<S> R;
  O* z = a.out + v * a.ld_out + p.first;
  const Epilogue<R>* e = a.epilogue;
  if (!last || !e) return {z, p.cols, accumulate, nullptr, nullptr, 1, 1, false};
  return {z,
          p.cols,
          accumulate,
          e->bias ? e->bias + p.first : nullptr,
          p.tail,
          e->row_scale ? e->row_scale[v] : (R)1,
          e->out_scale ? e->out_scale[v] : (R)1,
          e->relu != 0};
}

template <class S, class O>
inline void add_parts(const Product<S, O>& a, int64_t row, int64_t first, Real<S>* z, int64_t cols) {
  const Hub* hub = a.hubs;
  for (int64_t count = a.num_hubs; count > 1 && hub->row != row;) {
    const int64_t half = count / 2;
    if (hub[half].row <= row) hub += half;
    count -= half;
  }
  for (int64_t part = hub->first_part; part < hub->first_part + hub->num_parts; ++part) {
    const Real<S>* sums = a.sums + part * a.ld_sums + first;
    for (int64_t d = 0; d < cols; ++d) z[d] += sums[d];
  }
}

// Columns [at, cols) of the whole row by way of memory: hubs, dropout, columns that no group holds.
template <bool Weighted, bool Ahead, class S, class O>
inline void store_pieces(const Product<S, O>& a, const Pass<S>& p, int64_t v, bool hub, int64_t at) {
  Real<S> sums[kPiece];
  for (; at < p.cols; at += kPiece) {
    const int64_t cols = p.cols - at < kPiece ? p.cols - at : kPiece, first = p.first + at;
    O* z = a.out + v * a.ld_out + first;
    if (a.accumulate) widen_row(z, sums, cols);
    if (hub) {
      if (!a.accumulate) memset(sums, 0, sizeof sums);
      add_parts(a, v, first, sums, cols);
    } else {
      add_row<Weighted, Ahead>(entries_of(a, a.indptr[v], a.indptr[v + 1]), p.dense + at, p.ld, sums, cols,
                               p.padded || cols == kPiece, a.accumulate != 0);
    }
    if (a.epilogue) finish_row(sums, first, cols, v, *a.epilogue);
    narrow_row(sums, z, cols);
  }
}

template <bool Weighted, bool Ahead, class S, class O>
inline void store_row(const Product<S, O>& a, const Pass<S>& p, int64_t v, bool hub) {
  if (hub || drops(a)) return store_pieces<Weighted, Ahead>(a, p, v, hub, 0);
  constexpr int width = Group<S>::width;
  const int64_t groups = p.padded ? (p.cols + width - 1) / width : p.cols / width;
  row_groups<Weighted, Ahead>(entries_of(a, a.indptr[v], a.indptr[v + 1]), p.dense, p.ld,
                              result_of(a, p, v, a.accumulate != 0, true), groups);
  store_pieces<Weighted, Ahead>(a, p, v, hub, groups * width);
}

// The end of the entries of row v in this block.
template <class S, class O>
inline int64_t block_end(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t stop, int64_t v) {
  int64_t end = stop;
  if (p.block + 1 < a.blocks) {
    const int64_t limit = a.inner * (p.block + 1) / a.blocks;
    for (end = begin; end + 1 < stop && a.indices[end] < limit;) ++end;
    a.next[v] = end;
  }
  return end;
}

// Sums are kept where the result goes, block after block.
template <bool Weighted, bool Ahead, class S>
inline void add_block(const Product<S, Real<S>>& a, const Pass<S>& p, int64_t v, bool hub) {
  const bool last = p.block + 1 == a.blocks, fresh = p.block == 0 && !a.accumulate;
  Real<S>* z = a.out + v * a.ld_out + p.first;
  int64_t finished = 0;
  if (hub) {
    if (!last) return;
    if (!a.accumulate) memset(z, 0, p.cols * sizeof(Real<S>));
    add_parts(a, v, p.first, z, p.cols);
  } else {
    const int64_t begin = p.block ? a.next[v] : a.indptr[v], end = block_end(a, p, begin, a.indptr[v + 1], v);
    const bool direct = last && a.epilogue && !drops(a);
    if (begin < end || fresh || direct) {
      constexpr int width = Group<S>::width;
      // Rows padded to whole vectors run without a scalar tail: the padding holds numbers that nobody reads.
      const bool padded = p.padded && p.first + up(p.cols, width) <= a.ld_out;
      const int64_t groups = padded ? (p.cols + width - 1) / width : p.cols / width, done = groups * width;
      const Entries<S> entries = entries_of(a, begin, end);
      row_groups<Weighted, Ahead>(entries, p.dense, p.ld, result_of(a, p, v, !fresh, direct), groups);
      if (done < p.cols) row_tail<Weighted>(entries, p.dense + done, p.ld, z + done, p.cols - done, !fresh);
      if (direct) finished = done;
    }
  }
  if (last && a.epilogue && finished < p.cols)
    finish_row(z + finished, p.first + finished, p.cols - finished, v, *a.epilogue);
}

// Whether nothing is left to do for row v because it has no entries: then it costs its store, if that.
template <class S, class O>
inline bool skip_row(const Product<S, O>& a, const Pass<S>& p, int64_t v) {
  if (a.indptr[v + 1] > a.indptr[v] || a.epilogue) return false;
  if (!a.accumulate && p.block == 0) memset(a.out + v * a.ld_out + p.first, 0, p.cols * sizeof(O));
  return true;
}

}  // namespace
