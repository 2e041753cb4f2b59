// What an instruction set multiplies in a lane of a vector: a number of each operand, or a pair of bfloat16.
//   AVX-512 BF16: the upper product is added to the sum of a lane, then the lower one, each sum rounded once; numbers
//   below the normal ones are taken for zero, as operands and as sums.
#pragma once
#include "common.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// MGGCN_WIDE, MGGCN_PAIRS: tiles of these sets in narrower instructions, by which any processor can test them. Products
// below the normal numbers are rounded there before they are added.
#if defined(__AVX512F__) || defined(MGGCN_WIDE)
constexpr int kTileBytes = 64;
#else
constexpr int kTileBytes = kVectorBytes;
#endif

// How products of stored numbers S are packed and summed. group: consecutive numbers of the inner dimension in a lane.
template <class S>
struct Factors {
  typedef Real<S> Number;  // as packed
  typedef Vector<Real<S>, kTileBytes> Sums;
  typedef typename Sums::type Lanes;
  static constexpr int group = 1;

  static inline Lanes load(const Number* p) { return Sums::load(p); }
  static inline Lanes fill(const Number* p) { return Sums::fill(*p); }
  static inline Lanes fill_part(const Number*) { return Lanes{}; }
  static inline void add(Lanes& sum, Lanes x, Lanes y) { sum += y * x; }
};

#if defined(__AVX512BF16__) || defined(MGGCN_PAIRS)
template <>
struct Factors<bf16> {
  typedef bf16 Number;
  typedef Vector<float, kTileBytes> Sums;
  typedef Vector<int32_t, kTileBytes> Pairs;
  typedef typename Pairs::type Lanes;
  static constexpr int group = 2;

  static inline Lanes load(const bf16* p) { return Pairs::load(reinterpret_cast<const int32_t*>(p)); }
  static inline Lanes fill(const bf16* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return Pairs::fill(pair);
  }
  // A number that has no partner: what lies behind it is not read.
  static inline Lanes fill_part(const bf16* p) { return Pairs::fill(p->bits); }
#if defined(__AVX512BF16__)
  static inline void add(Sums::type& sum, Lanes x, Lanes y) {
    sum = (Sums::type)_mm512_dpbf16_ps((__m512)sum, (__m512bh)y, (__m512bh)x);
  }
#else
  static inline Sums::type normal(Sums::type x) {
    return (Sums::type)(((Lanes)x & 0x7f800000) == 0 ? (Lanes)x & (int32_t)0x80000000 : (Lanes)x);
  }
  static inline void add(Sums::type& sum, Lanes x, Lanes y) {
    typedef Sums::type F;
    const Lanes upper = Pairs::fill((int32_t)0xffff0000);
    sum = normal(normal(sum) + normal((F)(y & upper)) * normal((F)(x & upper)));
    sum = normal(sum + normal((F)(y << 16)) * normal((F)(x << 16)));
  }
#endif
};
#endif

template <class S>
using Packed = typename Factors<S>::Number;

// Stored numbers that are packed as numbers of sums are multiplied as these: one tile is compiled for both.
template <class S>
using Tiled = std::conditional_t<std::is_same_v<Packed<S>, Real<S>>, Real<S>, S>;

template <class S>
inline Packed<S> as_packed(S x) {
  if constexpr (std::is_same_v<S, Packed<S>>)
    return x;
  else
    return widen(x);
}

}  // namespace
