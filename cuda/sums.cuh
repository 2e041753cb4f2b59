// Sums over the rows of a chunk: no atomics, the threads of a block in a tree, so that they repeat bit for bit.
#pragma once

constexpr int kSumThreads = 256;

// The sum over threadIdx.y of each slot of `sums`; it ends in the slots of threadIdx.y == 0.
template <int W, int Threads>
__device__ __forceinline__ void sum_over_y(double (&sums)[W][Threads]) {
  const int at = threadIdx.y * blockDim.x + threadIdx.x;
  for (int live = blockDim.y; live > 1;) {
    const int half = (live + 1) / 2;
    __syncthreads();
    if ((int)threadIdx.y + half < live) {
#pragma unroll
      for (int i = 0; i < W; ++i) sums[i][at] += sums[i][at + half * blockDim.x];
    }
    live = half;
  }
}
