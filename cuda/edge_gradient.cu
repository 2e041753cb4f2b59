// edge_gradient: the gradient of edge_reduce by an operand of vertices: out[i, :] = scale * sum, over the edges that
// read row i of it, of d as edge_gradient.cuh says. narrow_out: the operand has one column and gets the sum over all.
// in    indptr int64 [rows+1], ends int32 [E]; place int32 [E] and starts int64 [N+1] by source, null by destination;
//       edge_ids int32 [E] or null, operands storage [N or E, D or 1], g storage [N, D], winners int32 [N, D] or null
// out   storage [rows, D or 1]; vertices without such edges get 0
// moves per edge 4 bytes of index (8 by source), D sizeof storage for g (by source) and for each operand that is not of
//       the row's vertex, 4 D for winners by source; per row 8 + D sizeof storage of out. A hub is one block's work.
//       No atomics: bitwise repeatable. Not measured. Twin: cpu/edge_gradient.cpp.
#include "edge_gradient.cuh"

// The sum over the groups of a row, in the first one; over all lanes if from == 1.
template <int kWarps>
__device__ __forceinline__ void sum_groups(const Team<kWarps>& team, int from, real_t (&sum)[kVector]) {
  for (int step = from; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], step);
  }
  if (kWarps == 1) return;
  __shared__ real_t sums[kWarpsOfLong][32 * kVector];
  const int at = team.lane() * kVector;
  __syncthreads();
  if (threadIdx.x % 32 < team.lanes) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[team.warp()][at + i] = sum[i];
  }
  __syncthreads();
  if (team.group()) return;
  for (int warp = 1; warp < kWarps; ++warp)
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += sums[warp][at + i];
}

template <int kWarps>
__device__ __forceinline__ void gradient_of_row(const Gradient& x, long long row, const Team<kWarps>& team) {
  const long long begin = x.edges.indptr[row], end = x.edges.indptr[row + 1];
  real_t whole[kVector] = {};
  for (int first = 0; first < x.cols; first += team.lanes * kVector) {
    const int column = first + team.lane() * kVector;
    real_t sum[kVector] = {}, d[kVector];
    for (long long k = begin + team.group(); k < end && column < x.cols; k += team.groups()) {
      derive(x, row, k, column, d);
      add(sum, d);
    }
    if (x.narrow_out) {
      whole[0] += total(sum);
      continue;
    }
    sum_groups(team, team.lanes, sum);
    if (!team.group() && column < x.cols) store(x, row, column, sum);
  }
  if (!x.narrow_out) return;
  sum_groups(team, 1, whole);
  if (!team.group() && !team.lane()) x.out[row * x.ld_out] = narrow(x.scale * whole[0]);
}

// grid  ceil(rows / 4), block 128: a warp per row of at most `longest` edges
extern "C" __global__ void __launch_bounds__(128, 7)
    edge_gradient(const long long* indptr, const int* ends, const int* place, const long long* starts,
                  const int* edge_ids, const storage_t* a, long long ld_a, int a_of, int a_narrow, const storage_t* b,
                  long long ld_b, int b_of, int b_narrow, const storage_t* g, long long ld_g, const int* winners,
                  storage_t* out, long long ld_out, int cols, int partial, int narrow_out, float scale, int lanes,
                  long long rows, int longest) {
  const long long row = blockIdx.x * (long long)kWarpsOfBlock + threadIdx.x / 32;
  if (row >= rows || indptr[row + 1] - indptr[row] > longest) return;
  const EdgeRows edges = {indptr, ends, place, starts, edge_ids};
  const Operand of_a = {a, ld_a, a_of, a_narrow}, of_b = {b, ld_b, b_of, b_narrow};
  const Gradient x = {edges, of_a, of_b, g, ld_g, winners, out, ld_out, cols, partial, narrow_out, (real_t)scale};
  gradient_of_row(x, row, Team<1>{lanes});
}

// grid  num_long + hubs, block 512: a block per longer row
extern "C" __global__ void __launch_bounds__(512, 1)
    edge_gradient_long(const long long* indptr, const int* ends, const int* place, const long long* starts,
                       const int* edge_ids, const storage_t* a, long long ld_a, int a_of, int a_narrow,
                       const storage_t* b, long long ld_b, int b_of, int b_narrow, const storage_t* g, long long ld_g,
                       const int* winners, storage_t* out, long long ld_out, int cols, int partial, int narrow_out,
                       float scale, int lanes, const int* long_rows, const int* hubs, int num_hubs) {
  const EdgeRows edges = {indptr, ends, place, starts, edge_ids};
  const Operand of_a = {a, ld_a, a_of, a_narrow}, of_b = {b, ld_b, b_of, b_narrow};
  const Gradient x = {edges, of_a, of_b, g, ld_g, winners, out, ld_out, cols, partial, narrow_out, (real_t)scale};
  gradient_of_row(x, long_row(long_rows, hubs, num_hubs), Team<kWarpsOfLong>{lanes});
}
