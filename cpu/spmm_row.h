// One row of a sparse product: the entries [begin, end) times columns of the rows of the operand that they name, in
// registers from the first entry to the epilogue. The sums of a column are added in the order of the entries, from what
// the result holds or from zero: any cut of the columns or of the entries that keeps their order gives the same bits.
#pragma once
#include "spmm_group.h"

namespace {

// Entries as a kernel reads them. The operand's row of the entry `ahead` places on is fetched early unless that is 0;
// the arrays reach as far.
template <class S>
struct Entries {
  const int32_t* indices;
  const Real<S>* values;  // or null: ones
  int64_t begin, end, ahead;
};

// Columns [0, cols) of a row's result, and what becomes of sums on their way there: the epilogue but for dropout.
// A group of columns that goes on behind the last one finds its part of the bias in `tail`. Where O is the type of
// sums, its further columns are overwritten.
template <class S, class O>
struct Result {
  typedef Real<S> R;
  O* z;
  int64_t cols;
  bool accumulate;
  const R *bias, *tail;  // or null
  R row_scale, out_scale;
  bool relu;

  // `last`: of its tile; no other group goes on behind the last column.
  MGGCN_INLINE void begin(Group<S>& g, int64_t at, bool last) const {
    if (accumulate)
      read(g, at, last);
    else
      g = Group<S>{};
  }
  MGGCN_INLINE void end(Group<S>& g, int64_t at, bool last) const {
    for (auto& sum : g.sum) sum *= row_scale;
    if (bias) {
      Group<S> b;
      b.read(last && at + Group<S>::width > cols ? tail : bias + at);
      for (int k = 0; k < Group<S>::registers; ++k) {
        round_here(g.sum[k]);
        g.sum[k] += b.sum[k];
      }
    }
    if (relu)
      for (auto& sum : g.sum) sum = sum < (R)0 ? typename Vector<R>::type{} : sum;
    for (auto& sum : g.sum) sum *= out_scale;
    write(g, at, last);
  }

 private:
  MGGCN_INLINE void read(Group<S>& g, int64_t at, bool last) const {
    if constexpr (!std::is_same_v<O, R>) {
      if (last && at + Group<S>::width > cols) {
        O whole[Group<S>::width] = {};
        memcpy(whole, z + at, (cols - at) * sizeof(O));
        return g.read(whole);
      }
    }
    g.read(z + at);
  }
  MGGCN_INLINE void write(const Group<S>& g, int64_t at, bool last) const {
    if constexpr (!std::is_same_v<O, R>) {
      if (last && at + Group<S>::width > cols) {
        O whole[Group<S>::width];
        g.write(whole);
        memcpy(z + at, whole, (cols - at) * sizeof(O));
        return;
      }
    }
    g.write(z + at);
  }
};

// Adds the entries to `Tile` groups of columns, which begin at `columns`.
template <int Tile, bool Weighted, bool Ahead, class S>
MGGCN_INLINE void add_entries(Group<S> (&group)[Tile], const Entries<S>& entries, const char* columns, int64_t step) {
  for (int64_t e = entries.begin; e < entries.end; ++e) {
    if (Ahead) {
      const char* next = columns + (int64_t)entries.indices[e + entries.ahead] * step;
#pragma GCC unroll 16
      for (int byte = 0; byte < Tile * kVectorBytes; byte += 64) __builtin_prefetch(next + byte);
    }
    const S* x = reinterpret_cast<const S*>(columns + (int64_t)entries.indices[e] * step);
    if (Weighted) {
      const typename Vector<Real<S>>::type w = Vector<Real<S>>::fill(entries.values[e]);
#pragma GCC unroll 16
      for (int k = 0; k < Tile; ++k) group[k].add(x + k * Group<S>::width, w);
    } else {
#pragma GCC unroll 16
      for (int k = 0; k < Tile; ++k) group[k].add(x + k * Group<S>::width);
    }
  }
}

// `Tile` groups of columns from column `at` on. Only the loop exists for each way to read entries: with what precedes
// and follows it as well, sums took 2.5 times as long to compile and no less to run.
template <int Tile, class S, class O>
MGGCN_INLINE void row_tile(const Entries<S>& entries, const S* dense, int64_t ld, const Result<S, O>& result,
                           int64_t at) {
  Group<S> group[Tile];
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) result.begin(group[k], at + k * Group<S>::width, k == Tile - 1);
  // Bytes from here on: no addition for each entry.
  const char* columns = reinterpret_cast<const char*>(dense + at);
  const int64_t step = ld * sizeof(S);
  if (entries.ahead && entries.values)
    add_entries<Tile, true, true>(group, entries, columns, step);
  else if (entries.ahead)
    add_entries<Tile, false, true>(group, entries, columns, step);
  else if (entries.values)
    add_entries<Tile, true, false>(group, entries, columns, step);
  else
    add_entries<Tile, false, false>(group, entries, columns, step);
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) result.end(group[k], at + k * Group<S>::width, k == Tile - 1);
}

// The most groups whose sums the registers hold beside what adds to them.
template <class S>
constexpr int kTile = kMaxTile / Group<S>::registers;
static_assert(kMaxTile <= 12, "with_tile knows no larger tile");

// How a number of groups is cut into tiles: nearly equal ones, so that 16 groups run as 8 + 8. The last `num_smaller`
// ones have one group less.
struct Tiles {
  int64_t size = 1, num = 0, num_smaller = 0;
};

template <class S>
inline Tiles tiles_of(int64_t groups) {
  if (!groups) return {};
  const int64_t num = (groups + kTile<S> - 1) / kTile<S>, size = (groups + num - 1) / num;
  return {size, num, size * num - groups};
}

// f(N) with the size of a tile as a type.
template <class S, class F>
MGGCN_INLINE void with_tile(int64_t size, F f) {
  switch (size) {
#define MGGCN_TILE(N)                                                 \
  case N:                                                             \
    if constexpr (N <= kTile<S>) f(std::integral_constant<int, N>()); \
    break;
    MGGCN_TILE(1)
    MGGCN_TILE(2)
    MGGCN_TILE(3)
    MGGCN_TILE(4)
    MGGCN_TILE(5)
    MGGCN_TILE(6)
    MGGCN_TILE(7)
    MGGCN_TILE(8)
    MGGCN_TILE(9)
    MGGCN_TILE(10)
    MGGCN_TILE(11)
    MGGCN_TILE(12)
#undef MGGCN_TILE
  }
}

}  // namespace
