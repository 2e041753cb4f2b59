// edge_gradient_edges: the gradient of edge_reduce by an operand of edges: out[e, :] = scale * d (edge_gradient.cuh).
// narrow_out: the operand has one column and gets the sum over all.
// in    as edge_gradient.cu, rows by destination
// out   storage [E, D or 1], rows at edge_ids if given
// moves per edge 4 bytes of index, D sizeof storage for out and for each operand that is not of the destination; per
//       row D sizeof storage of g and 4 D of winners, which stay cached. Bitwise repeatable. Not measured.
//       Twin: cpu/edge_gradient.cpp.
#include "edge_gradient.cuh"

constexpr int kRun = 16;  // consecutive edges of a group

// The row of entry k: the last that begins at or before it.
__device__ __forceinline__ long long row_of(const long long* indptr, long long rows, long long k) {
  long long low = 0, high = rows;
  while (high - low > 1) {
    const long long middle = (low + high) / 2;
    if (indptr[middle] <= k)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// edge_gradient_edges: the same for an operand of edges, rows by destination.
// grid  ceil(E / (16 groups)), block 128: a group of lanes per 16 consecutive edges, whatever row they are of
extern "C" __global__ void __launch_bounds__(128, 7)
    edge_gradient_edges(const long long* indptr, const int* ends, const int* edge_ids, const storage_t* a,
                        long long ld_a, int a_of, int a_narrow, const storage_t* b, long long ld_b, int b_of,
                        int b_narrow, const storage_t* g, long long ld_g, const int* winners, storage_t* out,
                        long long ld_out, int cols, int partial, int narrow_out, float scale, int lanes, long long rows,
                        long long count) {
  const EdgeRows edges = {indptr, ends, nullptr, nullptr, edge_ids};
  const Operand of_a = {a, ld_a, a_of, a_narrow}, of_b = {b, ld_b, b_of, b_narrow};
  const Gradient x = {edges, of_a, of_b, g, ld_g, winners, out, ld_out, cols, partial, narrow_out, (real_t)scale};
  const Team<1> team = {lanes};
  const long long groups = blockDim.x / lanes, begin = (blockIdx.x * groups + threadIdx.x / lanes) * kRun;
  long long row = begin < count ? row_of(indptr, rows, begin) : 0;
  for (long long k = begin; k < begin + kRun; ++k) {
    while (k < count && k >= indptr[row + 1]) ++row;
    real_t whole = 0;
    for (int column = team.lane() * kVector; column < cols && k < count; column += lanes * kVector) {
      real_t d[kVector];
      derive(x, row, k, column, d);
      if (narrow_out)
        whole += total(d);
      else
        store(x, edge_id_of(edges, k), column, d);
    }
    if (!narrow_out) continue;
    for (int step = 1; step < lanes; step *= 2) whole += __shfl_xor_sync(kFullWarp, whole, step);
    if (k < count && !team.lane()) out[edge_id_of(edges, k) * ld_out] = narrow(x.scale * whole);
  }
}
