// The rank of each vertex and its row there: in arrays, or ranks with consecutive vertices.
#pragma once
#include <cstdint>

namespace {

struct Owners {
  const uint16_t* owner;  // [N]; null: rank r has the vertices bounds[r] .. bounds[r + 1] - 1
  const int32_t* local;   // [N]
  const int64_t* bounds;  // [ranks + 1]
  int64_t ranks;

  int32_t rank_of(int64_t v) const {
    if (owner) return owner[v];
    int64_t low = 0;
    for (int64_t left = ranks; left > 1;) {
      const int64_t half = left / 2;
      low += bounds[low + half] <= v ? half : 0;
      left -= half;
    }
    return (int32_t)low;
  }

  int64_t row_of(int64_t v, int32_t rank) const { return owner ? local[v] : v - bounds[rank]; }
};

}  // namespace
