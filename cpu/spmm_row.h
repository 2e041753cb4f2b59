// Registers of a sparse product: the entries [begin, end) of a row times columns of the rows of the operand they name.
// The sums of a column are added in the order of the entries, from what `sum` holds or from zero: any cut of the
// columns or of the entries that keeps their order gives the same bits.
#pragma once
#include "common.h"

namespace {

// Entries as a kernel reads them. The operand's row of the entry `ahead` places on is fetched early; the arrays reach
// as far (ahead = 0: none is). ld counts elements of S.
template <class S>
struct Entries {
  const int32_t* indices;
  const Real<S>* values;  // null: ones
  int64_t begin, end, ahead;
};

// Even and odd columns of two vectors, and two vectors of such columns in order again.
#if defined(__AVX2__)
#define MGGCN_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define MGGCN_ODD 1, 3, 5, 7, 9, 11, 13, 15
#define MGGCN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define MGGCN_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define MGGCN_EVEN 0, 2, 4, 6
#define MGGCN_ODD 1, 3, 5, 7
#define MGGCN_LOW 0, 4, 1, 5
#define MGGCN_HIGH 2, 6, 3, 7
#endif
#if defined(__clang__)
#define MGGCN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Lanes __attribute__((vector_size(kVectorBytes)));
#define MGGCN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Lanes){__VA_ARGS__})
#endif

// A group of columns that one 32-byte (16-byte) load brings: one vector of sums, or two of the even and the odd columns
// of bfloat16, which a shift and a mask widen.
template <class S>
struct Group {
  typedef Vector<S> V;
  typename V::type sum[1];
  static constexpr int width = V::width, registers = 1;
  inline void read(const S* p) { sum[0] = V::load(p); }
  inline void write(S* p) const { V::store(p, sum[0]); }
  inline void add(const S* x) { sum[0] += V::load(x); }
  inline void add(const S* x, typename V::type w) { sum[0] += w * V::load(x); }
};

template <>
struct Group<bf16> {
  typedef Vector<float> V;
  typedef uint32_t words __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t loose __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
  V::type sum[2];
  static constexpr int width = 2 * V::width, registers = 2;
  static inline words load(const bf16* x) { return (words) * reinterpret_cast<const loose*>(x); }
  inline void read(const float* p) {
    const V::type low = V::load(p), high = V::load(p + V::width);
    sum[0] = MGGCN_SHUFFLE(low, high, MGGCN_EVEN);
    sum[1] = MGGCN_SHUFFLE(low, high, MGGCN_ODD);
  }
  inline void write(float* p) const {
    V::store(p, MGGCN_SHUFFLE(sum[0], sum[1], MGGCN_LOW));
    V::store(p + V::width, MGGCN_SHUFFLE(sum[0], sum[1], MGGCN_HIGH));
  }
  inline void add(const bf16* x) {
    const words both = load(x);
    sum[0] += (V::type)(both << 16);
    sum[1] += (V::type)(both & 0xffff0000u);
  }
  inline void add(const bf16* x, V::type w) {
    const words both = load(x);
    sum[0] += w * (V::type)(both << 16);
    sum[1] += w * (V::type)(both & 0xffff0000u);
  }
};

// One row times `Tile` groups of columns, the sums in registers.
template <int Tile, bool Weighted, bool Ahead, class S>
inline __attribute__((always_inline)) void row_tile(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out,
                                                    bool accumulate) {
  typedef Group<S> G;
  G group[Tile];
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) {
    if (accumulate)
      group[k].read(out + k * G::width);
    else
      group[k] = G{};
  }
  for (int64_t e = entries.begin; e < entries.end; ++e) {
    const S* x = dense + (int64_t)entries.indices[e] * ld;
    if (Ahead) {
      const char* next = reinterpret_cast<const char*>(dense + (int64_t)entries.indices[e + entries.ahead] * ld);
#pragma GCC unroll 16
      for (int at = 0; at < Tile * kVectorBytes; at += 64) __builtin_prefetch(next + at);
    }
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
  for (int k = 0; k < Tile; ++k) group[k].write(out + k * G::width);
}

// `N` columns, fewer than a group has: a fixed number of sums stays in registers.
template <int N, bool Weighted, class S>
inline __attribute__((always_inline)) void few_columns(const Entries<S>& entries, const S* dense, int64_t ld,
                                                       Real<S>* out, bool accumulate) {
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

// out[0 .. cols) (+)= the entries times columns of the operand. Tiles are nearly equal: 16 groups run as 8 + 8.
template <bool Weighted, bool Ahead, class S>
inline void add_entries(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols,
                        bool accumulate) {
  constexpr int width = Group<S>::width, most = kMaxTile / Group<S>::registers;
  int64_t groups = cols / width;
  for (int64_t pass = (groups + most - 1) / most; pass > 0; --pass) {
    const int64_t tile = (groups + pass - 1) / pass;
    switch (tile) {
#define MGGCN_TILE(N)                                                                              \
  case N:                                                                                          \
    if constexpr (N <= most) row_tile<N, Weighted, Ahead, S>(entries, dense, ld, out, accumulate); \
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
    dense += tile * width;
    out += tile * width;
    groups -= tile;
  }
  if (cols % width) row_tail<Weighted, S>(entries, dense, ld, out, cols % width, accumulate);
}

template <class S>
inline void add_row(const Entries<S>& entries, const S* dense, int64_t ld, Real<S>* out, int64_t cols,
                    bool accumulate) {
  if (entries.ahead) {
    if (entries.values)
      add_entries<true, true>(entries, dense, ld, out, cols, accumulate);
    else
      add_entries<false, true>(entries, dense, ld, out, cols, accumulate);
  } else {
    if (entries.values)
      add_entries<true, false>(entries, dense, ld, out, cols, accumulate);
    else
      add_entries<false, false>(entries, dense, ld, out, cols, accumulate);
  }
}

}  // namespace
