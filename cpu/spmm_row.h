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

// `groups` groups of columns. Tiles are nearly equal: 16 groups run as 8 + 8.
template <bool Weighted, bool Ahead, class S, class O>
MGGCN_INLINE void row_groups(const Entries<S>& entries, const S* dense, int64_t ld, const Result<S, O>& result,
                             int64_t groups) {
  constexpr int most = kMaxTile / Group<S>::registers;
  int64_t at = 0;
  for (int64_t pass = (groups + most - 1) / most; pass > 0; --pass) {
    const int64_t tile = pass == 1 ? groups : (groups + pass - 1) / pass;
    switch (tile) {
#define MGGCN_TILE(N)                                                                         \
  case N:                                                                                     \
    if constexpr (N <= most) row_tile<N, Weighted, Ahead, S>(entries, dense, ld, result, at); \
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
