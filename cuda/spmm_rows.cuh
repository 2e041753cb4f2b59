// Sums of rows of the dense operand, which is what every fast SpMM kernel consists of.
// A group of kLanes lanes reads a row: every lane kPieces pieces of kColumns columns (16 bytes, or one column if
// MGGCN_TIGHT), piece k of lane i from column (k * kLanes + i) * kColumns on. A team of groups shares the neighbours of
// one row of the matrix, each group keeps kUnroll of them in flight. Columns beyond kTile are other blocks' (grid.y).
#pragma once
#include "epilogue.cuh"

#if !defined(MGGCN_LANES) || !defined(MGGCN_PIECES) || !defined(MGGCN_UNROLL)
#error "define MGGCN_LANES, MGGCN_PIECES and MGGCN_UNROLL"
#endif
#if defined(MGGCN_TIGHT)
constexpr int kColumns = 1;
#else
constexpr int kColumns = kVector;
#endif
#if defined(MGGCN_RAGGED)
constexpr bool kRagged = true;  // the last tile reaches beyond the leading dimension, or far beyond the columns
#else
constexpr bool kRagged = false;
#endif
constexpr int kLanes = MGGCN_LANES, kPieces = MGGCN_PIECES, kUnroll = MGGCN_UNROLL;
static_assert(kLanes >= 4 && kUnroll <= kLanes && kLanes % kUnroll == 0, "a round is whole steps");
constexpr int kTile = kLanes * kPieces * kColumns;
constexpr int kGroups = 32 / kLanes;  // of a warp
constexpr int kWarps = 4;             // of a block

// The neighbours of one row, or of a part of it.
struct Neighbours {
  const int* indices;
  const real_t* values;  // null: ones
  int count;
};

struct Dense {
  const storage_t* at;
  unsigned stride;  // bytes from row to row
};

typedef real_t Sums[kPieces][kColumns];

__device__ __forceinline__ int lane_of(int width) { return (int)threadIdx.x % width; }

// Column of a lane's piece, counted from the first column of the matrix.
__device__ __forceinline__ int column_of(int piece) {
  return (int)blockIdx.y * kTile + (piece * kLanes + lane_of(kLanes)) * kColumns;
}

__device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
  for (int k = 0; k < kPieces; ++k)
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[k][i] = 0;
}

// The largest of the counts that the groups of a warp hold.
__device__ __forceinline__ int longest_of_warp(int count) {
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) count = max(count, __shfl_xor_sync(kFullWarp, count, step));
  return count;
}

// A piece as it lies in memory: half of the registers of its widened columns in bf16.
#if defined(MGGCN_TIGHT)
typedef storage_t piece_t;
__device__ __forceinline__ void unpack(const piece_t& piece, real_t (&x)[kColumns]) { x[0] = widen(piece); }
#else
#if defined(MGGCN_F64)
typedef double2 piece_t;
#elif defined(MGGCN_BF16)
typedef uint4 piece_t;
#else
typedef float4 piece_t;
#endif
__device__ __forceinline__ void unpack(const piece_t& piece, real_t (&x)[kColumns]) {
  load_vector(reinterpret_cast<const storage_t*>(&piece), x);
}
#endif

// sum += weights[n] * dense[indices[n], columns of this lane] for the n that this lane's group takes, in order.
// The kTeam lanes of a team (a group: kTeam = kLanes, or a warp) hold the same row; they take a round of kTeam
// neighbours from `first` on, then one at first + kStride, and so on. `longest` is a bound of count and the same in all
// lanes of a warp, so that all of them shuffle together; it is 0 if there is no nonzero at all. Loads are never
// skipped, so that kUnroll * kPieces of them are in flight: where a row has ended, its last neighbour is read again and
// added with weight 0; a row without any reads the matrix's first, and forgets it. So NaN reaches only its neighbours
// (there, infinity may become NaN). Columns from `cols` on are read and are nobody's.
template <int kTeam, int kStride>
__device__ __forceinline__ void add_neighbours(const Neighbours& row, int first, int longest, Dense dense, int cols,
                                               Sums& sum) {
  constexpr int kTogether = kTeam / kLanes, kStep = kUnroll * kTogether;  // groups of a team; its neighbours in flight
  const int lane = lane_of(kTeam), group = lane / kLanes, last = max(row.count - 1, 0);
  const storage_t* column[kPieces];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) column[k] = dense.at + (kRagged && column_of(k) >= cols ? 0 : column_of(k));
  int next = first < longest ? __ldcs(row.indices + min(first + lane, last)) : 0;
  for (; first < longest; first += kStride) {
    const int held = next;
#if defined(MGGCN_WEIGHTED)
    const real_t weight = first + lane < row.count ? __ldcs(row.values + first + lane) : (real_t)0;
#endif
    // The indices of the next round arrive behind the rows of this one.
    next = __ldcs(row.indices + min(first + kStride + lane, last));
#pragma unroll 1
    for (int base = group; base < kTeam && first + base - group < longest; base += kStep) {
      piece_t piece[kUnroll][kPieces];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int index = __shfl_sync(kFullWarp, held, base + u * kTogether, kTeam);
        const unsigned long long offset = (unsigned long long)(unsigned)index * dense.stride;
#pragma unroll
        for (int k = 0; k < kPieces; ++k)
          piece[u][k] = *reinterpret_cast<const piece_t*>(reinterpret_cast<const char*>(column[k]) + offset);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#if defined(MGGCN_WEIGHTED)
        const real_t w = __shfl_sync(kFullWarp, weight, base + u * kTogether, kTeam);
#else
        const real_t w = first + base + u * kTogether < row.count ? (real_t)1 : (real_t)0;
#endif
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          real_t x[kColumns];
          unpack(piece[u][k], x);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) sum[k][i] += w * x[i];
        }
      }
    }
  }
  if (!row.count) clear(sum);
}
