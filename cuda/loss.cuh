// The frame of losses: rows by groups of lanes, sums of losses and of columns in an order that shapes alone fix.
// A group of x = 4, 8, 16 or 32 lanes of one warp has one row at a time, lanes over the columns; a block has y groups.
#pragma once
#include "common.cuh"

constexpr int kLossThreads = 256;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// The lanes of this thread's group.
__device__ __forceinline__ unsigned group_lanes() {
  if (blockDim.x == 32) return kFullWarp;
  const unsigned first = threadIdx.y * blockDim.x % 32;
  return ((1u << blockDim.x) - 1u) << first;
}

// The arguments that all losses share, and what they do. The columns of the gradient before row_scale go to partials.
// in    z [V, C], mask uint8 [V], row_scale [V] or null; total double [1] += inv_count * the sum of what row_loss
// returns
//       for the rows whose mask has bit 0, through losses double [chunks]; other rows get the gradient 0
// out   partials (double [num_partials >= chunks, C] or null) = the columns, 0 without a chunk; arrived unsigned [1], 0
//       before and after
// grid  chunks, block (x, y) of at least a warp: chunk c has rows V c / chunks ..., group y every y-th of them. The
//       first warp of the block that arrives last adds the chunks' losses, in an order that their number alone fixes.
// shared  columns: y C doubles if in_shared, which hold the groups' columns; else y is 1 and they are summed in
// partials
struct LossArgs {
  storage_t* z;
  long long ld, rows;
  int cols;
  const unsigned char* mask;
  double inv_count;
  const real_t* row_scale;
  double* losses;
  unsigned* arrived;
  double* total;
  double* partials;
  int num_partials, in_shared;
};

// row_loss(row, v, scale, sums): writes the gradient of one row, by one group; the loss it returns counts on lane 0.
template <class RowLoss>
__device__ __forceinline__ void loss_of_rows(const LossArgs& a, double* columns, double* group_loss, bool* last,
                                             RowLoss row_loss) {
  const int at = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y, groups = blockDim.y;
  const int cols = a.cols;
  double* sums = !a.partials   ? nullptr
                 : a.in_shared ? columns + threadIdx.y * cols
                               : a.partials + (long long)blockIdx.x * cols;
  if (sums)
    for (int d = threadIdx.x; d < cols; d += blockDim.x) sums[d] = 0;
  double loss = 0;
  const long long chunks = gridDim.x, end = a.rows * (blockIdx.x + 1ll) / chunks;
  for (long long v = a.rows * blockIdx.x / chunks + threadIdx.y; v < end; v += groups) {
    storage_t* row = a.z + v * a.ld;
    if (a.mask[v] & 1)
      loss += row_loss(row, v, a.row_scale ? a.row_scale[v] : (real_t)1, sums);
    else
      for (int d = threadIdx.x; d < cols; d += blockDim.x) row[d] = narrow(0);
  }
  if (threadIdx.x == 0) group_loss[threadIdx.y] = loss;
  __syncthreads();
  if (at == 0) {
    for (int k = 1; k < groups; ++k) loss += group_loss[k];
    a.losses[blockIdx.x] = loss;
    __threadfence();
    *last = atomicAdd(a.arrived, 1u) + 1 == gridDim.x;
    __threadfence();  // what the other blocks wrote before they arrived
  }
  for (int d = at; a.partials && d < cols; d += threads) {
    if (a.in_shared) {
      double sum = 0;
      for (int k = 0; k < groups; ++k) sum += columns[k * cols + d];
      a.partials[(long long)blockIdx.x * cols + d] = sum;
    }
    for (int c = blockIdx.x + gridDim.x; c < a.num_partials; c += gridDim.x) a.partials[(long long)c * cols + d] = 0;
  }
  __syncthreads();
  if (!*last || at >= 32) return;
  double sum = 0;
  for (int c = at; c < (int)gridDim.x; c += 32) sum += __ldcg(a.losses + c);
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  if (at) return;
  *a.arrived = 0;
  a.total[0] += sum * a.inv_count;
}
