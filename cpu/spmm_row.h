// One row of a sparse product: the entries [begin, end) times columns of the rows of the operand that they name, in
// registers from the first entry to the epilogue. The sums of a column are added in the order of the entries, from what
// the result holds or from zero: any cut of the columns or of the entries that keeps their order gives the same bits.
#pragma once
#include "spmm_group.h"

namespace {

// Entries as a kernel reads them. The operand's row of the entry `ahead` places on is fetched early; the arrays reach
// as far.
template <class S>
struct Entries {
  const int32_t* indices;
  const Real<S>* values;
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

  MGGCN_INLINE void begin(Group<S>& g, int64_t at) const {
    if (accumulate)
      read(g, at);
    else
      g = Group<S>{};
  }
  MGGCN_INLINE void end(Group<S>& g, int64_t at) const {
    for (auto& sum : g.sum) sum *= row_scale;
    if (bias) {
      Group<S> b;
      b.read(at + Group<S>::width > cols ? tail : bias + at);
      for (int k = 0; k < Group<S>::registers; ++k) {
        round_here(g.sum[k]);
        g.sum[k] += b.sum[k];
      }
    }
    if (relu)
      for (auto& sum : g.sum) sum = sum < (R)0 ? typename Vector<R>::type{} : sum;
    for (auto& sum : g.sum) sum *= out_scale;
    write(g, at);
  }

 private:
  MGGCN_INLINE void read(Group<S>& g, int64_t at) const {
    if constexpr (!std::is_same_v<O, R>) {
      if (at + Group<S>::width > cols) {
        O whole[Group<S>::width] = {};
        memcpy(whole, z + at, (cols - at) * sizeof(O));
        return g.read(whole);
      }
    }
    g.read(z + at);
  }
  MGGCN_INLINE void write(const Group<S>& g, int64_t at) const {
    if constexpr (!std::is_same_v<O, R>) {
      if (at + Group<S>::width > cols) {
        O whole[Group<S>::width];
        g.write(whole);
        memcpy(z + at, whole, (cols - at) * sizeof(O));
        return;
      }
    }
    g.write(z + at);
  }
};

// The sums themselves. S: of the operand.
template <class S>
inline Result<S, Real<S>> sums_in(Real<S>* z, int64_t cols, bool accumulate) {
  return {z, cols, accumulate, nullptr, nullptr, 1, 1, false};
}

// `Tile` groups of columns from column `at` on.
template <int Tile, bool Weighted, bool Ahead, class S, class O>
MGGCN_INLINE void row_tile(const Entries<S>& entries, const S* dense, int64_t ld, const Result<S, O>& result,
                           int64_t at) {
  typedef Group<S> G;
  G group[Tile];
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) result.begin(group[k], at + k * G::width);
  // Bytes from here on: no addition for each entry.
  const char* columns = reinterpret_cast<const char*>(dense + at);
  const int64_t step = ld * sizeof(S);
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
      for (int k = 0; k < Tile; ++k) group[k].add(x + k * G::width, w);
    } else {
#pragma GCC unroll 16
      for (int k = 0; k < Tile; ++k) group[k].add(x + k * G::width);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) result.end(group[k], at + k * G::width);
}

// The most groups whose sums the registers hold beside what adds to them; fewer of float64, which is for checks. Tiles
// are nearly equal: 16 groups run as 8 + 8.
template <class S>
constexpr int kTile = sizeof(S) == 8 ? 4 : kMaxTile / Group<S>::registers;

// f(N) for each number of groups that a tile can have.
#define MGGCN_TILES(f) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12)

// Sums of `groups` groups of columns.
template <bool Weighted, bool Ahead, class S>
__attribute__((noinline)) void row_groups(const Entries<S>& entries, const S* dense, int64_t ld,
                                          const Result<S, Real<S>>& result, int64_t groups) {
  int64_t at = 0;
  for (int64_t left = (groups + kTile<S> - 1) / kTile<S>; left > 0; --left) {
    const int64_t tile = (groups + left - 1) / left;
    switch (tile) {
#define MGGCN_TILE(N)                                                                             \
  case N:                                                                                         \
    if constexpr (N <= kTile<S>) row_tile<N, Weighted, Ahead, S>(entries, dense, ld, result, at); \
    break;
      MGGCN_TILES(MGGCN_TILE)
#undef MGGCN_TILE
    }
    at += tile * Group<S>::width;
    groups -= tile;
  }
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
    for (int d = 0; d < N; ++d) sum[d] += Weighted ? w * widen(x[d]) : widen(x[d]);
  }
#pragma GCC unroll 16
  for (int d = 0; d < N; ++d) out[d] = sum[d];
}

// The last columns of rows without padding, fewer than a group.
template <bool Weighted, class S>
inline void row_tail(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols,
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

// Sums of `cols` columns; where `padded`, operand and sums go on to the end of a group.
template <bool Weighted, bool Ahead, class S>
inline void add_row(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols, bool padded,
                    bool accumulate) {
  constexpr int width = Group<S>::width;
  const int64_t groups = padded ? (cols + width - 1) / width : cols / width, done = groups * width;
  row_groups<Weighted, Ahead, S>(entries, dense, ld, sums_in<S>(out, groups * width, accumulate), groups);
  if (done < cols) row_tail<Weighted, S>(entries, dense + done, ld, out + done, cols - done, accumulate);
}

}  // namespace
