// What the passes of attention share: a warp for each row and head, scores of edges, and their weights.
// A head has C columns, D = H C. An edge u -> v has the score e = LeakyReLU(s_u + t_v) (GAT, Velickovic et al. 2018,
// eq. 3) or e = sum over c of a_c LeakyReLU(x_uc + y_vc) (GATv2, Brody et al. 2022, eq. 7), and its weight is the
// softmax of e over the in-edges of v. Rows that travel forwards are [x (D) | s (H), of GAT | number of u]; backwards,
// of destinations, [g (D) | d (H) | t (H) or y (D) | m (H) | 1 / l (H) | number of v]. Twin: cpu/attention.h.
#pragma once
#include "epilogue.cuh"
#include "vertex_numbers.cuh"

constexpr int kSpan = 4;  // columns of a lane at a time

struct Heads {
  const real_t* a;  // [H, C] of GATv2; null: GAT
  real_t slope;
  Dropout dropout;         // of weights: counter (head / 8, number of u, number of v, 2^31 + site)
  int heads, first, cols;  // heads from `first` on of all that the model has
  __device__ __forceinline__ int width() const { return heads * cols; }
  __device__ __forceinline__ int scored() const { return a ? width() : heads; }
  __device__ __forceinline__ int id_forwards() const { return width() + (a ? 0 : heads); }
  __device__ __forceinline__ int maxima() const { return width() + heads + scored(); }
};

__device__ __forceinline__ real_t exp_of(real_t x) {
#if defined(MGGCN_F64)
  return exp(x);
#else
  return expf(x);
#endif
}

__device__ __forceinline__ real_t warp_sum(real_t x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

__device__ __forceinline__ real_t warp_dot(const storage_t* x, const storage_t* y, int cols) {
  real_t sum = 0;
  for (int c = (int)threadIdx.x % 32; c < cols; c += 32) sum += widen(x[c]) * widen(y[c]);
  return warp_sum(sum);
}

struct Score {
  real_t value, slope;  // slope: of LeakyReLU, of GAT
};

// The score of head `head` from what two rows have there: s and t, or x and y.
__device__ __forceinline__ Score score(const Heads& a, int head, const storage_t* theirs, const storage_t* mine) {
  if (!a.a) {
    const real_t q = widen(theirs[head]) + widen(mine[head]), r = q > 0 ? (real_t)1 : a.slope;
    return {r * q, r};
  }
  real_t sum = 0;
  for (int c = (int)threadIdx.x % 32 + head * a.cols; c < (head + 1) * a.cols; c += 32) {
    const real_t q = widen(theirs[c]) + widen(mine[c]);
    sum += a.a[c] * (q > 0 ? q : a.slope * q);
  }
  return {warp_sum(sum), 0};
}

// The factor of dropout: 1 without it.
__device__ __forceinline__ real_t factor(const Heads& a, int head, long long source, long long destination) {
  if (!a.dropout.threshold) return 1;
  const long long both = (long long)((unsigned long long)(unsigned)destination << 32 | (unsigned)source);
  const Philox p = philox(a.dropout, both, (unsigned)(a.first + head) / 8);
  return kept(p, a.first + head, a.dropout.threshold) ? (real_t)a.dropout.keep_scale : (real_t)0;
}

// A weight of entry k times its parallel edges; counts null: as it is, to the bit.
__device__ __forceinline__ real_t times(const real_t* counts, long long k, real_t weight) {
  return counts ? weight * counts[k] : weight;
}

// The softmax from a score and what the destination's row has.
__device__ __forceinline__ real_t softened(const Heads& a, int head, real_t e, const storage_t* destination) {
  const storage_t* m = destination + a.maxima();
  return exp_of(e - widen(m[head])) * widen(m[a.heads + head]);
}
