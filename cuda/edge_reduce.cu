// edge_reduce: out[v, :] = reduction over the edges u -> v of op(lhs, rhs), the operands of source, destination or
// edge; reduction a sum, maximum or minimum; op add, sub, mul, div, or copy of lhs alone. Source: DistGNN, Algorithm 1.
// in    indptr int64 [V+1], ends int32 [E] (the sources), edge_ids int32 [E] or null, operands storage [N or E, D or 1]
// out   storage [V, D]; winners int32 [V, D] or null: place in its row of the edge whose value a maximum or minimum is,
//       the first of equal ones. A vertex without in-edges gets 0 and -1. NaN: the first of a column is its extremum.
// moves per edge 4 bytes of index, D sizeof storage (sizeof storage if narrow) for each operand of source or edge, 4 of
//       edge_ids for one of edges; per vertex 8 + D sizeof storage, and 4 D of winners. A hub is one block's work.
//       No atomics: bitwise repeatable. Not measured. Twin: cpu/edge_reduce.cpp.
#include "edges.cuh"

enum Op { kAdd = 0, kSub = 1, kMul = 2, kDiv = 3, kCopy = 4 };
enum Reducer { kSum = 0, kMax = 1, kMin = 2 };

struct Reduce {
  EdgeRows edges;
  Operand lhs, rhs;
  storage_t* out;
  long long ld_out;
  int* winners;
  int cols, op, reducer;
};

struct Held {
  real_t value[kVector];
  int place[kVector];  // -1: none yet
};

__device__ __forceinline__ real_t message(int op, real_t l, real_t r) {
  if (op == kAdd) return l + r;
  if (op == kSub) return l - r;
  if (op == kMul) return l * r;
  if (op == kDiv) return l / r;
  return l;
}

// Whether value m at place p goes before `held` at place q: an order of all values, so that any tree gives the same.
__device__ __forceinline__ bool takes(int reducer, real_t m, int p, real_t held, int q) {
  if (p < 0 || q < 0) return q < 0;
  const bool nan = m != m, held_nan = held != held;
  if (nan || held_nan) return nan && (!held_nan || p < q);
  if (m == held) return p < q;
  return reducer == kMax ? m > held : m < held;
}

__device__ __forceinline__ void take(int reducer, Held& held, int d, real_t m, int place) {
  if (reducer == kSum) {
    held.value[d] += m;
  } else if (takes(reducer, m, place, held.value[d], held.place[d])) {
    held.value[d] = m;
    held.place[d] = place;
  }
}

// What the groups of a row hold, in the first one.
template <int kWarps>
__device__ __forceinline__ void combine(const Team<kWarps>& team, int reducer, Held& held) {
  for (int step = team.lanes; step < 32; step *= 2) {
#pragma unroll
    for (int d = 0; d < kVector; ++d) {
      const real_t m = __shfl_xor_sync(kFullWarp, held.value[d], step);
      take(reducer, held, d, m, __shfl_xor_sync(kFullWarp, held.place[d], step));
    }
  }
  if (kWarps == 1) return;
  __shared__ real_t values[kWarpsOfLong][32 * kVector];
  __shared__ int places[kWarpsOfLong][32 * kVector];
  const int at = team.lane() * kVector;
  __syncthreads();
  if (threadIdx.x % 32 < team.lanes) {
#pragma unroll
    for (int d = 0; d < kVector; ++d) {
      values[team.warp()][at + d] = held.value[d];
      places[team.warp()][at + d] = held.place[d];
    }
  }
  __syncthreads();
  if (team.group()) return;
  for (int warp = 1; warp < kWarps; ++warp)
#pragma unroll
    for (int d = 0; d < kVector; ++d) take(reducer, held, d, values[warp][at + d], places[warp][at + d]);
}

template <int kWarps>
__device__ __forceinline__ void reduce_row(const Reduce& a, long long row, const Team<kWarps>& team) {
  const long long begin = a.edges.indptr[row], end = a.edges.indptr[row + 1];
  for (int first = 0; first < a.cols; first += team.lanes * kVector) {
    const int column = first + team.lane() * kVector, left = a.cols - column;
    Held held;
#pragma unroll
    for (int d = 0; d < kVector; ++d) held.value[d] = 0, held.place[d] = -1;
    for (long long k = begin + team.group(); k < end && left > 0; k += team.groups()) {
      real_t l[kVector], r[kVector] = {};
      load_operand(a.lhs, a.edges, row, k, column, a.cols, l);
      if (a.op != kCopy) load_operand(a.rhs, a.edges, row, k, column, a.cols, r);
#pragma unroll
      for (int d = 0; d < kVector; ++d) take(a.reducer, held, d, message(a.op, l[d], r[d]), (int)(k - begin));
    }
    combine(team, a.reducer, held);
    if (team.group() || left <= 0) continue;
    store_columns<kVector>(a.out + row * a.ld_out + column, left, rows_aligned(a.out, a.ld_out), held.value);
    for (int d = 0; d < kVector && d < left && a.winners; ++d) a.winners[row * a.cols + column + d] = held.place[d];
  }
}

// grid  ceil(V / 4), block 128: a warp per row of at most `longest` edges
extern "C" __global__ void __launch_bounds__(128, 7)
    edge_reduce(const long long* indptr, const int* ends, const int* edge_ids, const storage_t* lhs, long long ld_lhs,
                int lhs_of, int lhs_narrow, const storage_t* rhs, long long ld_rhs, int rhs_of, int rhs_narrow,
                storage_t* out, long long ld_out, int* winners, int cols, int op, int reducer, int lanes,
                long long rows, int longest) {
  const long long row = blockIdx.x * (long long)kWarpsOfBlock + threadIdx.x / 32;
  if (row >= rows || indptr[row + 1] - indptr[row] > longest) return;
  const Reduce a = {{indptr, ends, nullptr, nullptr, edge_ids},
                    {lhs, ld_lhs, lhs_of, lhs_narrow},
                    {rhs, ld_rhs, rhs_of, rhs_narrow},
                    out,
                    ld_out,
                    winners,
                    cols,
                    op,
                    reducer};
  reduce_row(a, row, Team<1>{lanes});
}

// grid  num_long + hubs, block 512: a block per longer row
extern "C" __global__ void __launch_bounds__(512, 1)
    edge_reduce_long(const long long* indptr, const int* ends, const int* edge_ids, const storage_t* lhs,
                     long long ld_lhs, int lhs_of, int lhs_narrow, const storage_t* rhs, long long ld_rhs, int rhs_of,
                     int rhs_narrow, storage_t* out, long long ld_out, int* winners, int cols, int op, int reducer,
                     int lanes, const int* long_rows, const int* hubs, int num_hubs) {
  const Reduce a = {{indptr, ends, nullptr, nullptr, edge_ids},
                    {lhs, ld_lhs, lhs_of, lhs_narrow},
                    {rhs, ld_rhs, rhs_of, rhs_narrow},
                    out,
                    ld_out,
                    winners,
                    cols,
                    op,
                    reducer};
  reduce_row(a, long_row(long_rows, hubs, num_hubs), Team<kWarpsOfLong>{lanes});
}
