// The threads that share a row, their sums, and which row a warp or a block has: mggcn/backend/cuda/spmm.py, Schedule.
#pragma once
#include "common.cuh"

constexpr int kWindow = 256;      // consecutive rows that are ordered by length among themselves
constexpr int kWarpsOfBlock = 4;  // rows of a block whose rows are a warp each
constexpr int kWarpsOfLong = 16;  // of a block that has one long row
constexpr int kWarpsOfBoth = 8;   // of a block of a grid that has both: a long row, or a row for each warp

// kWarps warps in groups of `lanes` (a power of two), each lane with some columns of a tile. Groups take entries of the
// row in turn, so that order and sums depend on nothing but shapes.
template <int kWarps>
struct Team {
  int lanes;
  __device__ __forceinline__ int lane() const { return (int)threadIdx.x % lanes; }
  __device__ __forceinline__ int group() const { return (int)threadIdx.x % (32 * kWarps) / lanes; }
  __device__ __forceinline__ int groups() const { return 32 * kWarps / lanes; }
  __device__ __forceinline__ int warp() const { return kWarps == 1 ? 0 : (int)threadIdx.x / 32; }
};

// x = the sum over the groups of a team, in the first one: groups of a warp by halves, then warps in their order.
template <int kWarps, int kCount>
__device__ __forceinline__ void add_team(const Team<kWarps>& team, real_t* x) {
  for (int step = team.lanes; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(kFullWarp, x[i], step);
  if (kWarps == 1) return;
  __shared__ real_t shared[kWarps][kCount][32];
  const int lane = (int)threadIdx.x % 32;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) shared[team.warp()][i][lane] = x[i];
  __syncthreads();
  if (team.warp()) return;
  for (int warp = 1; warp < kWarps; ++warp)
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += shared[warp][i][lane];
}

// The place of this warp in the grid.
__device__ __forceinline__ long long warp_number() { return blockIdx.x * (long long)kWarpsOfBlock + threadIdx.x / 32; }

// The row of a block of long ones: the hubs, which are the first of four numbers each, then those of long_rows.
__device__ __forceinline__ long long long_row(const int* long_rows, const int* hubs, int num_hubs) {
  const int block = (int)blockIdx.x;
  return block < num_hubs ? hubs[4 * block] : long_rows[block - num_hubs];
}

// All rows of a grid: blocks of long ones come first, so that the others run beside them.
struct Rows {
  const int *long_rows, *hubs;
  int num_long, num_hubs;
  const unsigned char* order;  // uint8 [whole windows] or null: as they are
  long long count;
  int longest;  // entries of a row that a warp takes

  __device__ __forceinline__ bool in_long_block() const { return (int)blockIdx.x < num_long + num_hubs; }
  // The row of this warp, -1 for none: the longest of a window come first, so that the warps of a block end together.
  __device__ __forceinline__ long long of_warp(const long long* indptr) const {
    const long long block = (long long)blockIdx.x - num_long - num_hubs, at = block * kWarpsOfBoth + threadIdx.x / 32;
    if (at >= count) return -1;
    const long long row = order ? at / kWindow * kWindow + order[at] : at;
    return indptr && indptr[row + 1] - indptr[row] > longest ? -1 : row;
  }
};
