// maximum_grad: out[u, :] (+)= g[v, :] of the edges u -> v where winners[v, :] is u. Parallel edges, which lie side by
// side, count once.
// in    indptr int64 [V+1], indices int32 [nnz], ids int64 [V], rows storage [N, 2 D]: [g | winners]
//       (vertex_numbers.cuh)
// out   storage [V, D]
// moves per entry 4 bytes of index, D sizeof storage of winners, and of g what lies beside a winner that is u; per row
//       D sizeof storage
// sums  kEdges entries in flight for each group of `lanes` lanes, each with kPieces pieces of 16 bytes of either half;
//       groups and warps are added in order: bitwise repeatable, no atomics. A row of n entries takes n / kEdges steps
//       of a warp, a long one n / (8 kEdges) of a block. Gain: docs/notes/0039. Twin: cpu/maximum.cpp.
// -DMGGCN_TIGHT: pieces are not aligned, or end behind their half of a row
#include "columns.cuh"
#include "teams.cuh"
#include "vertex_numbers.cuh"

#ifndef MGGCN_PIECES
#define MGGCN_PIECES 1
#endif
constexpr int kPieces = kVector > 4 ? 1 : MGGCN_PIECES, kEdges = kVector > 4 ? 1 : 4 / kPieces;
#ifdef MGGCN_TIGHT
constexpr int kBlocks = 2;  // of a multiprocessor: more would spill
#else
constexpr int kBlocks = 3;
#endif

struct Won {
  const long long* indptr;
  const int* indices;
  const storage_t* rows;
  long long ld;
  storage_t* out;
  long long ld_out;
  int cols, fresh;
};

// sum += g of the entries k, k + groups() and so on whose winner is `mine`, in the columns of this lane.
template <int kWarps>
__device__ __forceinline__ void add_entries(const Won& a, const Team<kWarps>& team, long long k, long long begin,
                                            long long end, number_t mine, const int (&column)[kPieces],
                                            real_t (&sum)[kPieces][kVector]) {
  const storage_t* from[kEdges];
  bool counts[kEdges];
  real_t whose[kEdges][kPieces][kVector], g[kEdges][kPieces][kVector] = {};
#pragma unroll
  for (int j = 0; j < kEdges; ++j) {
    const long long other = k + (long long)j * team.groups(), entry = other < end ? other : k;
    const int v = a.indices[entry];
    counts[j] = other < end && (entry == begin || a.indices[entry - 1] != v);
    from[j] = a.rows + v * a.ld;
  }
#pragma unroll
  for (int j = 0; j < kEdges; ++j)
#pragma unroll
    for (int p = 0; p < kPieces; ++p) load_piece(from[j] + a.cols + column[p], a.cols - column[p], whose[j][p]);
  // Few columns have this winner: g is read where one has.
#pragma unroll
  for (int j = 0; j < kEdges; ++j)
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      bool won = false;
#pragma unroll
      for (int i = 0; i < kVector; ++i) won = won || number_of(narrow(whose[j][p][i])) == mine;
      if (counts[j] && won) load_piece(from[j] + column[p], a.cols - column[p], g[j][p]);
    }
#pragma unroll
  for (int j = 0; j < kEdges; ++j)
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (number_of(narrow(whose[j][p][i])) == mine) sum[p][i] += g[j][p][i];
}

template <int kWarps>
__device__ __forceinline__ void gradient_of_row(const Won& a, long long row, number_t mine, const Team<kWarps>& team) {
  const long long begin = a.indptr[row], end = a.indptr[row + 1];
  const int step = team.lanes * kVector;
  for (int tile = 0; tile < a.cols; tile += kPieces * step) {
    int column[kPieces];
    real_t sum[kPieces][kVector] = {};
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int own = tile + p * step + team.lane() * kVector;
      column[p] = own < a.cols ? own : 0;
    }
    for (long long k = begin + team.group(); k < end; k += kEdges * team.groups())
      add_entries(a, team, k, begin, end, mine, column, sum);
    __syncwarp();
    add_team<kWarps, kPieces * kVector>(team, &sum[0][0]);
    if (team.group()) continue;
    const bool vectors = rows_aligned(a.out, a.ld_out);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (tile + p * step + team.lane() * kVector >= a.cols) break;
      storage_t* to = a.out + row * a.ld_out + column[p];
      real_t before[kVector] = {};
      if (!a.fresh) load_columns<kVector>(to, a.cols - column[p], vectors, before);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[p][i] += before[i];
      store_columns<kVector>(to, a.cols - column[p], vectors, sum[p]);
    }
  }
}

// grid  num_long + num_hubs + ceil(V / 8), block 256: a block per long row, then a warp per other one
extern "C" __global__ void __launch_bounds__(256, kBlocks)
    maximum_grad(const long long* indptr, const int* indices, const storage_t* rows, long long ld, const long long* ids,
                 storage_t* out, long long ld_out, int cols, int fresh, int lanes, const int* long_rows,
                 const int* hubs, int num_long, int num_hubs, const unsigned char* order, long long num_rows,
                 int longest) {
  const Won a = {indptr, indices, rows, ld, out, ld_out, cols, fresh};
  const Rows all = {long_rows, hubs, num_long, num_hubs, order, num_rows, longest};
  if (all.in_long_block()) {
    const long long row = long_row(long_rows, hubs, num_hubs);
    gradient_of_row(a, row, (number_t)ids[row], Team<kWarpsOfBoth>{lanes});
  } else {
    const long long row = all.of_warp(indptr);
    if (row >= 0) gradient_of_row(a, row, (number_t)ids[row], Team<1>{lanes});
  }
}
