// Philox4x32-10 (Salmon et al., SC'11) as mggcn keys dropout: key (seed, epoch), counter (column / 8, id low, id high,
// layer); the 16-bit word (column mod 8), counted from the low half of the first output, keeps if >= threshold.
#pragma once
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

struct Dropout {
  uint32_t seed, epoch, layer, threshold;  // threshold = round(65536 p); 0 drops nothing
  double keep_scale;                       // 65536 / (65536 - threshold)
  uint32_t first_group;                    // of the row of which z is a part: its first column / 8
};

constexpr int kPhiloxLanes = 8;
constexpr uint32_t kPhiloxKeys[2] = {0x9E3779B9u, 0xBB67AE85u}, kPhiloxFactors[2] = {0xD2511F53u, 0xCD9E8D57u};

// Four words of each of eight blocks: counters, then outputs.
typedef uint32_t PhiloxBlocks[4][kPhiloxLanes];

#if defined(__AVX2__)
// Low and high halves of products; compilers make no vectors of them.
inline __m256i philox_products(__m256i x, uint32_t factor, __m256i& high) {
  const __m256i f = _mm256_set1_epi32((int)factor), even = _mm256_mul_epu32(x, f);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), f);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
#endif

// The counters become the outputs of their blocks.
inline void philox_blocks(const Dropout& key, PhiloxBlocks& c) {
  uint32_t k0 = key.seed, k1 = key.epoch;
#if defined(__AVX2__)
  __m256i x[4], high[2], low[2];
  for (int w = 0; w < 4; ++w) x[w] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c[w]));
#endif
  for (int round = 0; round < 10; ++round) {
#if defined(__AVX2__)
    for (int p = 0; p < 2; ++p) low[p] = philox_products(x[2 * p], kPhiloxFactors[p], high[p]);
    x[0] = _mm256_xor_si256(_mm256_xor_si256(high[1], x[1]), _mm256_set1_epi32((int)k0));
    x[2] = _mm256_xor_si256(_mm256_xor_si256(high[0], x[3]), _mm256_set1_epi32((int)k1));
    x[1] = low[1];
    x[3] = low[0];
#else
    for (int l = 0; l < kPhiloxLanes; ++l) {
      const uint64_t p0 = (uint64_t)kPhiloxFactors[0] * c[0][l], p1 = (uint64_t)kPhiloxFactors[1] * c[2][l];
      c[0][l] = (uint32_t)(p1 >> 32) ^ c[1][l] ^ k0;
      c[2][l] = (uint32_t)(p0 >> 32) ^ c[3][l] ^ k1;
      c[1][l] = (uint32_t)p1;
      c[3][l] = (uint32_t)p0;
    }
#endif
    k0 += kPhiloxKeys[0];
    k1 += kPhiloxKeys[1];
  }
#if defined(__AVX2__)
  for (int w = 0; w < 4; ++w) _mm256_storeu_si256(reinterpret_cast<__m256i*>(c[w]), x[w]);
#endif
}

inline void set_counter(PhiloxBlocks& c, int64_t lane, const Dropout& key, int64_t id, uint32_t group) {
  c[0][lane] = group;
  c[1][lane] = (uint32_t)id;
  c[2][lane] = (uint32_t)((uint64_t)id >> 32);
  c[3][lane] = key.layer;
}

// words[64]: the 16-bit words of the columns from 8 first_group on.
inline void philox_words(const Dropout& key, int64_t id, uint32_t first_group, uint16_t* words) {
  PhiloxBlocks c;
  for (int l = 0; l < kPhiloxLanes; ++l) set_counter(c, l, key, id, first_group + l);
  philox_blocks(key, c);
  for (int l = 0; l < kPhiloxLanes; ++l)
    for (int w = 0; w < 4; ++w) {
      words[8 * l + 2 * w] = (uint16_t)c[w][l];
      words[8 * l + 2 * w + 1] = (uint16_t)(c[w][l] >> 16);
    }
}

}  // namespace
