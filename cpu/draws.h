// What sampling draws with: words by name, Floyd's algorithm on eight rows at once, and keys of weighted draws. Word k
// of a draw at `vertex` in `hop` is word k % 4 of the Philox block with key (seed, step) and counter (2^31 + hop,
// vertex low, vertex high, first + k / 4): no rank, thread or other row occurs in it. Dropout, which has the same key,
// has column / 8 as its first counter, which never reaches 2^31.
#pragma once
#include "common.h"
#include "philox.h"
#include "shuffle.h"

namespace {

typedef Vector<uint32_t, 4 * kPhiloxLanes> Eight;

constexpr uint32_t kSampling = (uint32_t)1 << 31;

struct DrawKey {
  uint32_t seed, step, hop;
};

// The upper halves of 64-bit products: a word becomes a number below y.
inline uint32_t below(uint32_t word, uint32_t y) { return (uint32_t)((uint64_t)word * y >> 32); }

inline Eight::type below(Eight::type word, Eight::type y) {
#if defined(__AVX2__)
  const __m256i a = (__m256i)word, b = (__m256i)y, even = _mm256_mul_epu32(a, b);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  return (Eight::type)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  Eight::type high;
  for (int l = 0; l < kPhiloxLanes; ++l) high[l] = below((uint32_t)word[l], (uint32_t)y[l]);
  return high;
#endif
}

// words[k][l]: word k of row l, k < count rounded up to 4.
inline void words_of_rows(const DrawKey& key, const uint32_t* vertices, int count, uint32_t (*words)[kPhiloxLanes]) {
  const Dropout philox{key.seed, key.step, 0, 0, 0.0, 0};
  for (int first = 0; first < count; first += 4) {
    PhiloxBlocks c;
    for (int l = 0; l < kPhiloxLanes; ++l) {
      c[0][l] = kSampling + key.hop;
      c[1][l] = vertices[l];
      c[2][l] = 0;
      c[3][l] = (uint32_t)first / 4;
    }
    philox_blocks(philox, c);
    memcpy(words + first, c, sizeof c);
  }
}

// The words of one row, 32 made at a time; those of an edge type begin at block 2^16 type.
class RowWords {
 public:
  RowWords(const DrawKey& key, uint32_t vertex, uint32_t type) : key_(key), vertex_(vertex), first_(type << 16) {}

  inline uint32_t operator[](uint32_t k) {
    constexpr uint32_t kAtOnce = 4 * kPhiloxLanes;
    if (k / kAtOnce != made_) {
      made_ = k / kAtOnce;
      for (uint32_t l = 0; l < kPhiloxLanes; ++l) {
        c_[0][l] = kSampling + key_.hop;
        c_[1][l] = vertex_;
        c_[2][l] = 0;
        c_[3][l] = first_ + made_ * kPhiloxLanes + l;
      }
      philox_blocks(Dropout{key_.seed, key_.step, 0, 0, 0.0, 0}, c_);
    }
    return c_[k % 4][k / 4 % kPhiloxLanes];
  }

 private:
  const DrawKey key_;
  const uint32_t vertex_, first_;
  uint32_t made_ = ~0u;
  PhiloxBlocks c_;
};

// f of the numbers below degs[l], ascending, for each of eight rows: picks[k][l]. Without replacement by Floyd's
// algorithm, or all of them where there are no more than f. No branch depends on a draw. Cost: f^2 vector operations.
template <bool kReplace>
inline void draw_rows(const uint32_t (*words)[kPhiloxLanes], const uint32_t* degs, int f,
                      uint32_t (*picks)[kPhiloxLanes]) {
  typedef Eight::type vec;
  const vec deg = Eight::load(degs);
  for (int k = 0; k < f; ++k) {
    const vec last = kReplace ? deg - 1 : deg - Eight::fill(f - k);
    vec t = below(Eight::load(words[k]), last + 1);
    if (!kReplace) {
      vec twice = {};
      for (int i = 0; i < k; ++i) twice |= (vec)(Eight::load(picks[i]) == t);
      t = (twice & last) | (~twice & t);
    }
    for (int i = 0; i < k; ++i) {
      const vec s = Eight::load(picks[i]), less = (vec)(s < t);
      Eight::store(picks[i], (less & s) | (~less & t));
      t = (less & t) | (~less & s);
    }
    Eight::store(picks[k], t);
  }
  if (kReplace) return;
  const vec all = (vec)(deg <= Eight::fill(f));
  for (int k = 0; k < f; ++k) Eight::store(picks[k], (all & Eight::fill(k)) | (~all & Eight::load(picks[k])));
}

// A bijection of 32 bits ("lowbias32").
template <class T>
inline T mixed(T x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// LABOR's number of a vertex, uniform in 0 .. 2^32 - 1: two rounds of the bijection, keyed. Every neighbour that is
// read costs one, of which a counter generator would throw three words away.
struct VertexNumbers {
  uint32_t first, second;

  VertexNumbers(const DrawKey& key, bool every_hop) {
    const uint64_t k = stream((uint64_t)key.seed << 32 | key.step, every_hop ? 0 : key.hop + 1);
    first = (uint32_t)k;
    second = (uint32_t)(k >> 32);
  }
  inline Eight::type operator()(Eight::type vertex) const {
    return mixed<Eight::type>(mixed<Eight::type>(vertex ^ first) + second);
  }
};

// Minus the natural logarithm of (word + 1/2) / 2^32, to about 1e-15. Divisions, sums and products in this order, each
// rounded once (-ffp-contract=off): the same bits for every instruction set, and in the tests' NumPy.
inline double exponential(uint32_t word) {
  constexpr double kLn2 = 0.6931471805599453;
  const double u = ((double)word + 0.5) * 0x1p-32;
  uint64_t bits;
  memcpy(&bits, &u, 8);
  int power = (int)(bits >> 52) - 1023;
  bits = (bits & (((uint64_t)1 << 52) - 1)) | (uint64_t)1023 << 52;
  double m;
  memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++power;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double sum = 1.0 / 19;
  for (int k = 17; k > 0; k -= 2) sum = sum * z + 1.0 / k;
  return -(power * kLn2 + 2.0 * s * sum);
}

}  // namespace
