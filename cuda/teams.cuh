// The threads that share a row, and which row a warp or a block has: mggcn/backend/cuda/spmm.py, class Schedule.
#pragma once
#include "common.cuh"

constexpr int kWindow = 256;      // consecutive rows that are ordered by length among themselves
constexpr int kWarpsOfBlock = 4;  // rows of a block whose rows are a warp each
constexpr int kWarpsOfLong = 16;  // of a block that has one long row

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

// The place of this warp in the grid.
__device__ __forceinline__ long long warp_number() { return blockIdx.x * (long long)kWarpsOfBlock + threadIdx.x / 32; }

// The row of this warp: the longest of a window come first, so that the warps of a block end together; order null: as
// they are. From the number of rows on it is none.
__device__ __forceinline__ long long row_in_order(const unsigned char* order, long long rows) {
  const long long at = warp_number();
  return order && at < rows ? at / kWindow * kWindow + order[at] : at;
}

// The row of a block of long ones: first those of long_rows, then the hubs, which are the first of four numbers each.
__device__ __forceinline__ long long long_row(const int* long_rows, int num_long, const int* hubs) {
  const int block = (int)blockIdx.x;
  return block < num_long ? long_rows[block] : hubs[4 * (block - num_long)];
}
