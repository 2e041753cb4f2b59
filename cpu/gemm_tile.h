// A tile of a dense product in registers, and how its right operand is packed.
// A tile has kTileRows rows and up to kTileVectors vectors of columns; its sums are taken in the order of the inner
// dimension from what C holds or from zero, so that any cut of the dimensions gives the same bits.
#pragma once
#include "pieces.h"

namespace {

constexpr int kTileRows = 4, kTileVectors = 3;  // 12 accumulators, 3 vectors of B and one number of A: 16 registers

// The columns of B as consecutive panels of whole vectors, nearly equal and at most kTileVectors wide; [inner, width]
// numbers each, the last one filled up with zeros.
struct Panels {
  int64_t cols, vectors, count;  // columns in whole vectors, vectors, panels

  Panels(int64_t n, int width)
      : cols((n + width - 1) / width * width),
        vectors(cols / width),
        count((vectors + kTileVectors - 1) / kTileVectors) {}
  // First vector of a panel; of panel `count` the end.
  int64_t first(int64_t panel) const { return vectors * panel / count; }
};

// c[kRows, kVectors W] = or += a b: a in rows ra apart, or packed, kPacked numbers for each k; b a packed panel.
template <int kRows, int kVectors, int kPacked, class R>
inline __attribute__((always_inline)) void tile(int64_t inner, const R* a, int64_t ra, const R* b, R* c, int64_t ld_c,
                                                bool accumulate) {
  typedef Vector<R> V;
  constexpr int width = kVectors * V::width;
  typename V::type sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j)
      sum[i][j] = accumulate ? V::load(c + i * ld_c + j * V::width) : typename V::type{};
  for (int64_t k = 0; k < inner; ++k) {
    typename V::type x[kVectors];
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) x[j] = V::load(b + k * width + j * V::width);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename V::type y = V::fill(kPacked ? a[k * kPacked + i] : a[i * ra + k]);
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) sum[i][j] += y * x[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) V::store(c + i * ld_c + j * V::width, sum[i][j]);
}

template <int kRows, int kPacked, class R>
inline void tile_of(int64_t vectors, int64_t inner, const R* a, int64_t ra, const R* b, R* c, int64_t ld_c,
                    bool accumulate) {
  switch (vectors) {
    case 1:
      return tile<kRows, 1, kPacked>(inner, a, ra, b, c, ld_c, accumulate);
    case 2:
      return tile<kRows, 2, kPacked>(inner, a, ra, b, c, ld_c, accumulate);
    case 3:
      return tile<kRows, 3, kPacked>(inner, a, ra, b, c, ld_c, accumulate);
  }
}

// `cols` numbers of a row, `step` apart, and zeros up to `width`.
template <class S>
inline void pack_row(const S* row, int64_t step, int64_t cols, int64_t width, Real<S>* out) {
  if (step == 1)
    for (int64_t n = 0; n < cols; ++n) out[n] = widen(row[n]);
  else
    for (int64_t n = 0; n < cols; ++n) out[n] = widen(row[n * step]);
  for (int64_t n = cols; n < width; ++n) out[n] = 0;
}

}  // namespace
