// Philox4x32-10 (Salmon et al., SC'11) as mggcn keys dropout: key (seed, epoch), counter (column / 8, id low, id high,
// layer); the 16-bit word (column mod 8), counted from the low half of the first output, keeps if >= threshold.
#pragma once
#include <cstdint>

namespace {

struct Dropout {
  uint32_t seed, epoch, layer, threshold;  // threshold = round(65536 p); 0 drops nothing
  double keep_scale;                       // 65536 / (65536 - threshold)
};

// words[8 kLanes]: the 16-bit words of the columns from 8 first_group on; the Philox blocks are computed together.
template <int kLanes>
inline void philox_words(const Dropout& key, int64_t id, uint32_t first_group, uint16_t* words) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    c0[l] = first_group + l;
    c1[l] = (uint32_t)id;
    c2[l] = (uint32_t)((uint64_t)id >> 32);
    c3[l] = key.layer;
  }
  uint32_t k0 = key.seed, k1 = key.epoch;
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < kLanes; ++l) {
      const uint64_t p0 = (uint64_t)0xD2511F53u * c0[l], p1 = (uint64_t)0xCD9E8D57u * c2[l];
      const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1[l] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3[l] ^ k1;
      c1[l] = (uint32_t)p1;
      c3[l] = (uint32_t)p0;
      c0[l] = n0;
      c2[l] = n2;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int l = 0; l < kLanes; ++l) {
    const uint32_t out[4] = {c0[l], c1[l], c2[l], c3[l]};
    for (int w = 0; w < 4; ++w) {
      words[8 * l + 2 * w] = (uint16_t)out[w];
      words[8 * l + 2 * w + 1] = (uint16_t)(out[w] >> 16);
    }
  }
}

}  // namespace
