// A tile of a dense product in registers, and how its operands are packed.
// A tile has up to kTileRows rows and kTileVectors vectors of columns; its sums are taken in the order of the inner
// dimension, pair by pair where lanes hold pairs, from what C holds or from zero, so that any cut of the dimensions (of
// the inner one between pairs) gives the same bits.
#pragma once
#include "gemm_factors.h"
#include "pieces.h"

namespace {

// 4 rows: 12 sums, 3 vectors of B and one number of A in 16 registers; 8 rows: 24 sums and these in 32.
constexpr int kTileRows = kTileBytes == 64 ? 8 : 4, kTileVectors = 3;

template <class S>
constexpr int kTileWidth = Factors<S>::Sums::width;  // columns of a vector

// The columns of B as consecutive panels of whole vectors, nearly equal and at most kTileVectors wide; [inner, width]
// numbers each, those of a lane together, the last one filled up with zeros.
struct Panels {
  int64_t cols, vectors, count;  // columns in whole vectors, vectors, panels

  Panels(int64_t n, int width)
      : cols((n + width - 1) / width * width),
        vectors(cols / width),
        count((vectors + kTileVectors - 1) / kTileVectors) {}
  // First vector of a panel; of panel `count` the end.
  int64_t first(int64_t panel) const { return vectors * panel / count; }
};

// The inner dimension as packed: whole groups.
template <class S>
inline int64_t whole_groups(int64_t inner) {
  constexpr int group = Factors<S>::group;
  return (inner + group - 1) / group * group;
}

// sum += the groups of a at `a` (rows ra apart, or side by side if packed) times a group of b; part: of one number.
template <class S, bool kInPanels, bool kPart, int kRows, int kVectors>
MGGCN_INLINE void add_group(typename Factors<S>::Sums::type (&sum)[kRows][kVectors], const Packed<S>* a, int64_t ra,
                            const Packed<S>* b) {
  typedef Factors<S> F;
  typename F::Lanes x[kVectors];
#pragma GCC unroll 16
  for (int j = 0; j < kVectors; ++j) x[j] = F::load(b + j * F::Sums::width * F::group);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    const Packed<S>* group = a + i * (kInPanels ? F::group : ra);
    const typename F::Lanes y = kPart ? F::fill_part(group) : F::fill(group);
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) F::add(sum[i][j], x[j], y);
  }
}

// c[kRows, kVectors W] = or += a b: a in rows ra apart, or packed, groups of kPacked rows; b a packed panel.
template <class S, int kRows, int kVectors, int kPacked>
MGGCN_INLINE void tile(int64_t inner, const Packed<S>* a, int64_t ra, const Packed<S>* b, Real<S>* c, int64_t ld_c,
                       bool accumulate) {
  typedef Factors<S> F;
  typedef typename F::Sums V;
  constexpr int64_t width = kVectors * V::width;
  typename V::type sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j)
      sum[i][j] = accumulate ? V::load(c + i * ld_c + j * V::width) : typename V::type{};
  constexpr int64_t next = kPacked ? kPacked : 1;
  int64_t k = 0;
  for (; k + F::group <= inner; k += F::group) add_group<S, (kPacked > 0), false>(sum, a + k * next, ra, b + k * width);
  if (k < inner) add_group<S, (kPacked > 0), true>(sum, a + k * next, ra, b + k * width);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) V::store(c + i * ld_c + j * V::width, sum[i][j]);
}

// Not inlined: the calls of every type of result share it.
template <class S, int kRows, int kPacked>
__attribute__((noinline)) void tile_of(int64_t vectors, int64_t inner, const Packed<S>* a, int64_t ra,
                                       const Packed<S>* b, Real<S>* c, int64_t ld_c, bool accumulate) {
  switch (vectors) {
    case 1:
      return tile<S, kRows, 1, kPacked>(inner, a, ra, b, c, ld_c, accumulate);
    case 2:
      return tile<S, kRows, 2, kPacked>(inner, a, ra, b, c, ld_c, accumulate);
    case 3:
      return tile<S, kRows, 3, kPacked>(inner, a, ra, b, c, ld_c, accumulate);
  }
}

// c[rows, vectors W] = or += a b from row i on, in tiles of kRows rows and then of fewer; row(i): where a has row i.
template <class S, int kRows, int kPacked, class Row>
inline void tiles(int64_t i, int64_t rows, int64_t vectors, int64_t inner, Row row, int64_t ra, const Packed<S>* b,
                  Real<S>* c, int64_t ld_c, bool accumulate) {
  for (; i + kRows <= rows; i += kRows)
    tile_of<S, kRows, kPacked>(vectors, inner, row(i), ra, b, c + i * ld_c, ld_c, accumulate);
  if constexpr (kRows > 1) tiles<S, kRows / 2, kPacked>(i, rows, vectors, inner, row, ra, b, c, ld_c, accumulate);
}

// A group of rows, `count` numbers in each column, step_k apart, columns step_n apart: the numbers of a column
// together, `cols` columns and zeros up to `width`.
template <class S>
MGGCN_INLINE void pack_group(const S* row, int64_t count, int64_t step_k, int64_t step_n, int64_t cols, int64_t width,
                             Packed<S>* out) {
  constexpr int group = Factors<S>::group;
  if constexpr (group == 2) {
    // Two rows of memory, in whole words: compilers make no interleave of stores to every second number.
    if (step_n == 1) {
      typedef uint32_t __attribute__((may_alias)) Pair;
      Pair* pairs = reinterpret_cast<Pair*>(out);
      const S *lower = row, *upper = row + step_k;
      if (count == 2)
        for (int64_t n = 0; n < cols; ++n) pairs[n] = lower[n].bits | (uint32_t)upper[n].bits << 16;
      else
        for (int64_t n = 0; n < cols; ++n) pairs[n] = lower[n].bits;
      for (int64_t n = cols; n < width; ++n) pairs[n] = 0;
      return;
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    const S* from = row + g * step_k;
    Packed<S>* to = out + g;
    if (group > 1 && g >= count)
      for (int64_t n = 0; n < cols; ++n) to[n * group] = Packed<S>{};
    else if (step_n == 1)
      for (int64_t n = 0; n < cols; ++n) to[n * group] = as_packed<S>(from[n]);
    else
      for (int64_t n = 0; n < cols; ++n) to[n * group] = as_packed<S>(from[n * step_n]);
  }
  for (int64_t n = cols * group; n < width * group; ++n) out[n] = Packed<S>{};
}

}  // namespace
