// The rows of a chunk, one after the other. What is the same for all of them stays in registers: rows have few entries
// in many graphs, and then the way to the first and from the last one is what they cost (docs/notes/0012).
#pragma once
#include "spmm_product.h"

namespace {

// The end of the entries of row v in this block.
template <class S, class O>
__attribute__((noinline)) int64_t block_end(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t stop,
                                            int64_t v) {
  if (ends(a, p)) return stop;
  const int64_t limit = a.inner * (p.block + 1) / a.blocks;
  int64_t end = begin;
  while (end + 1 < stop && a.indices[end] < limit) ++end;
  return a.next[v] = end;
}

// What whole groups leave of row v: its other columns, and all columns of an epilogue with dropout.
template <class S, class O>
__attribute__((noinline)) void complete(const Product<S, O>& a, const Pass<S>& p, int64_t v, int64_t begin, int64_t end,
                                        int64_t ahead) {
  const Entries<S> entries = entries_of(a, begin, end, ahead);
  O* z = a.out + v * a.ld_out + p.first;
  if constexpr (std::is_same_v<O, Real<S>>) {
    const int64_t at = p.grouped;
    if (at < p.cols) row_tail(entries, p.dense + at, p.ld, z + at, p.cols - at, !begins(a, p));
    const int64_t finished = finishes(a, p) ? at : 0;
    if (ends(a, p) && a.epilogue) finish_row(z + finished, p.first + finished, p.cols - finished, v, *a.epilogue);
  } else {
    Real<S> sums[kPiece];
    for (int64_t at = p.grouped; at < p.cols; at += kPiece) {
      const int64_t cols = p.cols - at < kPiece ? p.cols - at : kPiece;
      if (a.accumulate) widen_row(z + at, sums, cols);
      add_row(entries, p.dense + at, p.ld, sums, cols, p.padded || cols == kPiece, a.accumulate != 0);
      if (a.epilogue) finish_row(sums, p.first + at, cols, v, *a.epilogue);
      narrow_row(sums, z + at, cols);
    }
  }
}

// Rows [begin, end) but for hubs, `Tile` groups of columns at a time.
template <int Tile, class S, class O>
void run_rows(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t end, int64_t ahead) {
  constexpr int width = Group<S>::width;
  const bool fresh = begins(a, p), must = fresh || (ends(a, p) && a.epilogue), in_blocks = a.blocks > 1;
  const bool incomplete = p.grouped < p.cols || (ends(a, p) && drops(a));
  const Epilogue<Real<S>> none = {};
  const Epilogue<Real<S>>& e = finishes(a, p) ? *a.epilogue : none;
  const Real<S>*bias = e.bias ? e.bias + p.first : nullptr, *row_scale = e.row_scale, *out_scale = e.out_scale;
  const S* dense = p.dense;
  const int64_t* indptr = a.indptr;
  const int64_t ld = p.ld, ld_out = a.ld_out, hub = a.hub;
  const int64_t num_smaller = p.tiles.num_smaller, num_whole = p.tiles.num - num_smaller;
  Entries<S> entries = entries_of(a, 0, 0, ahead);
  Result<S, O> result = {a.out + begin * ld_out + p.first, p.cols, !fresh, bias, p.tail, 1, 1, e.relu != 0};
  for (int64_t v = begin; v < end; ++v, result.z += ld_out) {
    entries.begin = indptr[v];
    entries.end = indptr[v + 1];
    if (entries.end - entries.begin > hub) continue;
    if (in_blocks) {
      if (p.block) entries.begin = a.next[v];
      entries.end = block_end(a, p, entries.begin, entries.end, v);
    }
    if (entries.begin == entries.end && !must) continue;
    if (row_scale) result.row_scale = row_scale[v];
    if (out_scale) result.out_scale = out_scale[v];
    if constexpr (2 * Tile <= kTile<S>) {  // one tile, or none: more would be larger
      if (num_whole) row_tile<Tile, S>(entries, dense, ld, result, 0);
    } else {
      int64_t at = 0;
      for (int64_t k = 0; k < num_whole; ++k, at += Tile * width) row_tile<Tile, S>(entries, dense, ld, result, at);
      for (int64_t k = 0; k < num_smaller; ++k, at += (Tile - 1) * width)
        row_tile<Tile - 1, S>(entries, dense, ld, result, at);
    }
    if (incomplete) complete(a, p, v, entries.begin, entries.end, ahead);
  }
}

}  // namespace
