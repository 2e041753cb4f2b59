// A group of columns that one 32-byte (16-byte) load brings, and its sums: one vector, or two for bfloat16, which is
// widened on the way in and rounded on the way out.
#pragma once
#include "common.h"

namespace {

// Lanes of two vectors. Interleaving with zeros below widens the low and the high half of each 16 bytes, in one
// operation with the load; sums are put in order, and rounded ones packed, the same way back.
#if defined(__AVX2__)
#define MGGCN_WIDEN_LOW 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27
#define MGGCN_WIDEN_HIGH 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31
#define MGGCN_UPPER 1, 3, 5, 7, 17, 19, 21, 23, 9, 11, 13, 15, 25, 27, 29, 31
#define MGGCN_FIRST 0, 1, 2, 3, 8, 9, 10, 11
#define MGGCN_SECOND 4, 5, 6, 7, 12, 13, 14, 15
#else
#define MGGCN_WIDEN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define MGGCN_WIDEN_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define MGGCN_UPPER 1, 3, 5, 7, 9, 11, 13, 15
#define MGGCN_FIRST 0, 1, 2, 3
#define MGGCN_SECOND 4, 5, 6, 7
#endif
#if defined(__clang__)
#define MGGCN_SHUFFLE(a, b, lanes, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MGGCN_SHUFFLE(a, b, lanes, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

// Keeps a product apart from a sum that follows: together they would be rounded once.
template <class V>
MGGCN_INLINE void round_here(V& x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
}

// To nearest, ties to even, in the upper halves; NaN stays NaN.
typedef uint32_t words_t __attribute__((vector_size(kVectorBytes)));
MGGCN_INLINE words_t rounded_words(Vector<float>::type x) {
  const words_t bits = (words_t)x, nearest = bits + 0x7fff + (bits >> 16 & 1);
  return x == x ? nearest : bits | 0x400000;
}

template <class S>
struct Group {
  typedef Vector<S> V;
  static constexpr int width = V::width, registers = 1;
  typename V::type sum[registers];

  MGGCN_INLINE void read(const S* p) { sum[0] = V::load(p); }
  MGGCN_INLINE void write(S* p) const { V::store(p, sum[0]); }
  MGGCN_INLINE void add(const S* x) { sum[0] += V::load(x); }
  MGGCN_INLINE void add(const S* x, typename V::type w) { sum[0] += w * V::load(x); }
  // Of results that are rounded, as `narrow` does.
  MGGCN_INLINE void read(const bf16* p) {
    halves packed;
    memcpy(&packed, p, sizeof packed);
    sum[0] = (typename V::type)(__builtin_convertvector(packed, words_t) << 16);
  }
  MGGCN_INLINE void write(bf16* p) const {
    const halves packed = __builtin_convertvector(rounded_words(sum[0]) >> 16, halves);
    memcpy(p, &packed, sizeof packed);
  }

 private:
  typedef uint16_t halves __attribute__((vector_size(kVectorBytes / 2)));
};

template <>
struct Group<bf16> {
  typedef Vector<float> V;
  typedef int32_t lanes __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t halves __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t loose __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
  static constexpr int width = 2 * V::width, registers = 2;
  V::type sum[registers];

  static MGGCN_INLINE halves load(const bf16* x) { return (halves) * reinterpret_cast<const loose*>(x); }
  static MGGCN_INLINE V::type low(halves x) { return (V::type)MGGCN_SHUFFLE(halves{}, x, halves, MGGCN_WIDEN_LOW); }
  static MGGCN_INLINE V::type high(halves x) { return (V::type)MGGCN_SHUFFLE(halves{}, x, halves, MGGCN_WIDEN_HIGH); }
  static MGGCN_INLINE halves rounded(V::type x) { return (halves)rounded_words(x); }

  MGGCN_INLINE void read(const float* p) {
    const V::type first = V::load(p), second = V::load(p + V::width);
    sum[0] = MGGCN_SHUFFLE(first, second, lanes, MGGCN_FIRST);
    sum[1] = MGGCN_SHUFFLE(first, second, lanes, MGGCN_SECOND);
  }
  MGGCN_INLINE void write(float* p) const {
    V::store(p, MGGCN_SHUFFLE(sum[0], sum[1], lanes, MGGCN_FIRST));
    V::store(p + V::width, MGGCN_SHUFFLE(sum[0], sum[1], lanes, MGGCN_SECOND));
  }
  MGGCN_INLINE void read(const bf16* p) {
    sum[0] = low(load(p));
    sum[1] = high(load(p));
  }
  MGGCN_INLINE void write(bf16* p) const {
    *reinterpret_cast<loose*>(p) = MGGCN_SHUFFLE(rounded(sum[0]), rounded(sum[1]), halves, MGGCN_UPPER);
  }
  MGGCN_INLINE void add(const bf16* x) {
    sum[0] += low(load(x));
    sum[1] += high(load(x));
  }
  MGGCN_INLINE void add(const bf16* x, V::type w) {
    sum[0] += w * low(load(x));
    sum[1] += w * high(load(x));
  }
};

}  // namespace
