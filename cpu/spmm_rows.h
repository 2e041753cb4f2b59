// The rows of a chunk, one after the other. What is the same for all of them stays in registers: rows have few entries
// in many graphs, and then the way to the first and from the last one is what they cost (docs/notes/0012).
#pragma once
#include "spmm_product.h"

namespace {

// The end of the entries of row v in this block.
template <class S, class O>
inline int64_t block_end(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t stop, int64_t v) {
  if (p.block + 1 == a.blocks) return stop;
  const int64_t limit = a.inner * (p.block + 1) / a.blocks;
  int64_t end = begin;
  while (end + 1 < stop && a.indices[end] < limit) ++end;
  return a.next[v] = end;
}

// What is left of row v after its whole groups: further columns, and an epilogue that these did not get.
template <bool Weighted, bool Ahead, class S, class O>
__attribute__((noinline)) void finish(const Product<S, O>& a, const Pass<S>& p, int64_t v, const Entries<S>& entries,
                                      bool fresh, bool last, bool direct) {
  if constexpr (std::is_same_v<O, Real<S>>) {
    O* z = a.out + v * a.ld_out + p.first;
    if (p.done < p.cols) row_tail<Weighted>(entries, p.dense + p.done, p.ld, z + p.done, p.cols - p.done, !fresh);
    const int64_t finished = direct ? p.done : 0;
    if (last && a.epilogue) finish_row(z + finished, p.first + finished, p.cols - finished, v, *a.epilogue);
  } else {
    store_pieces<Weighted, Ahead>(a, p, v, entries, p.done);
  }
}

// Rows [begin, end) but for hubs.
template <int Tile, bool Weighted, bool Ahead, class S, class O>
void run_rows(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t end) {
  typedef Real<S> R;
  constexpr int width = Group<S>::width;
  const bool blocks = a.blocks > 1, last = p.block + 1 == a.blocks, fresh = p.block == 0 && !a.accumulate;
  // The epilogue on the way from registers; sums are kept where the result goes, block after block.
  const bool direct = last && a.epilogue && !drops(a), rest = p.done < p.cols || (last && drops(a));
  const Epilogue<R> none = {}, &e = direct ? *a.epilogue : none;
  const R *row_scale = e.row_scale, *out_scale = e.out_scale;
  const S* dense = p.dense;
  const int64_t* indptr = a.indptr;
  const int64_t ld = p.ld, ld_out = a.ld_out, hub = a.hub, larger = p.tiles - p.smaller, smaller = p.smaller;
  Entries<S> entries = {a.indices, a.values, 0, 0, a.ahead};
  Result<S, O> result = {
      a.out + begin * ld_out + p.first, p.cols, !fresh, e.bias ? e.bias + p.first : nullptr, p.tail, 1, 1, e.relu != 0};
  for (int64_t v = begin; v < end; ++v, result.z += ld_out) {
    entries.begin = indptr[v];
    entries.end = indptr[v + 1];
    if (entries.end - entries.begin > hub) continue;
    if (blocks) {
      if (p.block) entries.begin = a.next[v];
      entries.end = block_end(a, p, entries.begin, entries.end, v);
    }
    if (entries.begin == entries.end && !fresh && !(last && a.epilogue)) continue;
    if (row_scale) result.row_scale = row_scale[v];
    if (out_scale) result.out_scale = out_scale[v];
    // Two sizes of tiles, or several: more groups than a tile holds, so more than half as many in each.
    if constexpr (2 * Tile <= kTile<S>) {
      if (larger) row_tile<Tile, Weighted, Ahead, S>(entries, dense, ld, result, 0);
    } else {
      int64_t at = 0;
      for (int64_t k = 0; k < larger; ++k, at += Tile * width)
        row_tile<Tile, Weighted, Ahead, S>(entries, dense, ld, result, at);
      for (int64_t k = 0; k < smaller; ++k, at += (Tile - 1) * width)
        row_tile<Tile - 1, Weighted, Ahead, S>(entries, dense, ld, result, at);
    }
    if (rest) finish<Weighted, Ahead>(a, p, v, entries, fresh, last, direct);
  }
}

}  // namespace
