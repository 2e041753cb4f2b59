// maximum: out[v, :] = the maximum over the edges u -> v of rows[u, :], and winners[v, :] = whose it is: of equal ones
// the vertex of the lowest number. Tiles come in any order: a call goes on from what it finds, unless it is the first.
// in    indptr int64 [V+1] or null (no entries), indices int32 [nnz], rows storage [N, D + 1], the last column the
//       vertex's number (vertex_numbers.cuh)
// out   storage [V, D], winners likewise: numbers, kNobody without entries. After the last tile such a row is 0.
//       NaN: the first vertex's is the maximum.
// moves per entry 4 bytes of index and (D + 1) sizeof storage, per row 2 D sizeof storage
// sums  kEdges entries in flight for each group of `lanes` lanes, each with kPieces pieces of 16 bytes. Any order gives
//       the same (take): bitwise repeatable, no atomics. A row of n entries takes n / kEdges steps of a warp, a long
//       one n / (8 kEdges) of a block. Gain: docs/notes/0039. Twin: cpu/maximum.cpp.
// -DMGGCN_TIGHT: pieces are not aligned, or end behind what may be read of a row
#include "columns.cuh"
#include "teams.cuh"
#include "vertex_numbers.cuh"

#ifndef MGGCN_PIECES
#define MGGCN_PIECES 1
#endif
constexpr int kPieces = kVector > 4 ? 1 : MGGCN_PIECES, kEdges = kVector > 4 ? 2 : 4;

struct Held {
  real_t value[kPieces][kVector];
  number_t winner[kPieces][kVector];
};

struct Maximum {
  const long long* indptr;
  const int* indices;
  const storage_t* rows;
  long long ld;
  storage_t* out;
  long long ld_out;
  storage_t* winners;
  long long ld_winners;
  int cols, fresh, last;
};

// What the groups of a team hold, in the first one.
template <int kWarps>
__device__ __forceinline__ void combine(const Team<kWarps>& team, Held& held) {
  for (int step = team.lanes; step < 32; step *= 2)
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const real_t value = __shfl_xor_sync(kFullWarp, held.value[p][i], step);
        const number_t winner = __shfl_xor_sync(kFullWarp, held.winner[p][i], step);
        take(value, winner, held.value[p][i], held.winner[p][i]);
      }
  if (kWarps == 1) return;
  __shared__ real_t values[kWarps][kPieces][kVector][32];
  __shared__ number_t winners[kWarps][kPieces][kVector][32];
  const int lane = (int)threadIdx.x % 32;
  __syncthreads();
#pragma unroll
  for (int p = 0; p < kPieces; ++p)
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[team.warp()][p][i][lane] = held.value[p][i];
      winners[team.warp()][p][i][lane] = held.winner[p][i];
    }
  __syncthreads();
  if (team.warp()) return;
  for (int warp = 1; warp < kWarps; ++warp)
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        take(values[warp][p][i][lane], winners[warp][p][i][lane], held.value[p][i], held.winner[p][i]);
}

// Joins what lies there, unless this is the first tile of the graph, and writes.
__device__ __forceinline__ void store(storage_t* to, storage_t* whose, int left, bool vectors, int fresh, int last,
                                      real_t (&value)[kVector], number_t (&winner)[kVector]) {
  real_t numbers[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (!fresh && i < left) take(widen(to[i]), number_of(whose[i]), value[i], winner[i]);
    if (last && winner[i] == kNobody) value[i] = 0;
    numbers[i] = widen(as_storage(winner[i]));
  }
  store_columns<kVector>(to, left, vectors, value);
  store_columns<kVector>(whose, left, vectors, numbers);
}

template <int kWarps>
__device__ __forceinline__ void maximum_of_row(const Maximum& a, long long row, const Team<kWarps>& team) {
  const long long begin = a.indptr ? a.indptr[row] : 0, end = a.indptr ? a.indptr[row + 1] : 0;
  const int step = team.lanes * kVector;
  for (int tile = 0; tile < a.cols; tile += kPieces * step) {
    int column[kPieces];
    Held held;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      column[p] = tile + p * step + team.lane() * kVector;
#pragma unroll
      for (int i = 0; i < kVector; ++i) held.value[p][i] = -infinity(), held.winner[p][i] = kNobody;
    }
    for (long long k = begin + team.group(); k < end; k += kEdges * team.groups()) {
      real_t x[kEdges][kPieces][kVector];
      number_t id[kEdges];
#pragma unroll
      for (int j = 0; j < kEdges; ++j) {
        // Behind the end the first of these again, which changes nothing.
        const long long other = k + (long long)j * team.groups();
        const storage_t* from = a.rows + a.indices[other < end ? other : k] * a.ld;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          const int at = column[p] < a.cols ? column[p] : 0;
          load_piece(from + at, a.cols - at, x[j][p]);
        }
        id[j] = number_of(from[a.cols]);
      }
#pragma unroll
      for (int j = 0; j < kEdges; ++j)
#pragma unroll
        for (int p = 0; p < kPieces; ++p)
#pragma unroll
          for (int i = 0; i < kVector; ++i) take(x[j][p][i], id[j], held.value[p][i], held.winner[p][i]);
    }
    __syncwarp();
    combine(team, held);
    if (team.group()) continue;
    const bool vectors = rows_aligned(a.out, a.ld_out) && rows_aligned(a.winners, a.ld_winners);
    storage_t *to = a.out + row * a.ld_out, *whose = a.winners + row * a.ld_winners;
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      if (column[p] < a.cols)
        store(to + column[p], whose + column[p], a.cols - column[p], vectors, a.fresh, a.last, held.value[p],
              held.winner[p]);
  }
}

// grid  num_long + num_hubs + ceil(V / 8), block 256: a block per long row, then a warp per other one
extern "C" __global__ void __launch_bounds__(256, 3)
    maximum(const long long* indptr, const int* indices, const storage_t* rows, long long ld, storage_t* out,
            long long ld_out, storage_t* winners, long long ld_winners, int cols, int fresh, int last, int lanes,
            const int* long_rows, const int* hubs, int num_long, int num_hubs, const unsigned char* order,
            long long num_rows, int longest) {
  const Maximum a = {indptr, indices, rows, ld, out, ld_out, winners, ld_winners, cols, fresh, last};
  const Rows all = {long_rows, hubs, num_long, num_hubs, order, num_rows, longest};
  if (all.in_long_block()) {
    maximum_of_row(a, long_row(long_rows, hubs, num_hubs), Team<kWarpsOfBoth>{lanes});
  } else {
    const long long row = all.of_warp(indptr);
    if (row >= 0) maximum_of_row(a, row, Team<1>{lanes});
  }
}
