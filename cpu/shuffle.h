// Seeded randomness without state: a hash of 64 bits, and a permutation of 0 .. n - 1 that needs no memory.
#pragma once
#include <cstdint>

namespace {

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
inline uint64_t hash64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Key of stream `number` of a seed: streams draw independently of each other.
inline uint64_t stream(uint64_t seed, uint64_t number) { return hash64(hash64(seed) + number); }

// A permutation of the words of b bits, 2^b the first power of two from n on (b >= 1): three rounds of adding a key,
// xor with the upper half, and an odd factor, each a bijection. Words from n on are passed over by the caller.
struct Shuffle {
  static constexpr int kRounds = 3;
  uint64_t mask = 1, add[kRounds], times[kRounds];
  int shift = 1;

  Shuffle(uint64_t n, uint64_t key) {
    int bits = 1;
    while (bits < 63 && (uint64_t)1 << bits < n) ++bits;
    mask = ((uint64_t)1 << bits) - 1;
    shift = (bits + 1) / 2;
    for (int r = 0; r < kRounds; ++r) {
      add[r] = stream(key, 2 * r);
      times[r] = stream(key, 2 * r + 1) | 1;
    }
  }

  inline uint64_t operator()(uint64_t x) const {
    for (int r = 0; r < kRounds; ++r) {
      x = (x + add[r]) & mask;
      x = ((x ^ (x >> shift)) * times[r]) & mask;
    }
    return x ^ (x >> shift);
  }
};

}  // namespace
