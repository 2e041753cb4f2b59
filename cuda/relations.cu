// Products of the rows of several relations at once, each with the matrix of its relation (R-GCN): one launch where a
// product for each relation would be as many. No twin: CPUs multiply relation by relation.
// in    spans int32 [S, 3]: relation, first row and the row behind the last; no relation comes twice
// grid  x: spans; y, z: tiles of kTileRows by kTileCols of its result; tiles behind it end at once. block kThreads
// sums  every element by one thread, in order: bitwise repeatable, no atomics
// Steps: a thread has 4 by 4 elements, so that two elements of shared memory serve four products of each.
// Gain: docs/notes/0040; a relation alone leaves a GPU idle up to some 1,000 rows.
#include "common.cuh"

constexpr int kTileRows = 64, kTileCols = 32;
constexpr int kInner = 32;  // elements of a sum between two barriers
constexpr int kThreads = 128;
constexpr int kAcross = kTileCols / 4;  // threads side by side

// The first operand of a tile's products, as (inner, rows), and the second, as (inner, columns). One element more in a
// row, so that writing a column of it meets every bank.
struct Operands {
  real_t left[kInner][kTileRows + 1];
  real_t right[kInner][kTileCols + 1];
};

// sum[i][j] += the products of what is loaded, for the 4 rows and columns of this thread.
__device__ __forceinline__ void multiply_tile(const Operands& of, real_t (&sum)[4][4]) {
  const int row = (int)threadIdx.x / kAcross * 4, col = (int)threadIdx.x % kAcross * 4;
#pragma unroll 4
  for (int k = 0; k < kInner; ++k) {
    real_t left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = of.left[k][row + i], right[i] = of.right[k][col + i];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += left[i] * right[j];
  }
}

// relation_products: out[i, :] = in[i, :] W_r for the rows i of every span, or in[i, :] W_r^T.
// in    in [n, inner], weights [R, ld_weights]: W_r (inner, cols) row by row, or (cols, inner) if transposed
// out   out [n, cols]. Moves n (inner + cols), and W_r once for each tile of rows
extern "C" __global__ void __launch_bounds__(128)
    relation_products(const storage_t* in, long long ld_in, const storage_t* weights, long long ld_weights,
                      const int* spans, storage_t* out, long long ld_out, int inner, int cols, int transposed) {
  __shared__ Operands of;
  const int* span = spans + 3 * blockIdx.x;
  const int row0 = span[1] + (int)blockIdx.y * kTileRows, col0 = (int)blockIdx.z * kTileCols;
  if (row0 >= span[2]) return;
  const int rows = span[2] - row0, here = cols - col0;
  const storage_t* matrix = weights + span[0] * ld_weights;
  real_t sum[4][4] = {};
  for (int k0 = 0; k0 < inner; k0 += kInner) {
    if (k0) __syncthreads();
    const int left = inner - k0;
    // Neighbouring threads read neighbouring elements of memory, whichever way they are written.
    for (int n = (int)threadIdx.x; n < kInner * kTileRows; n += kThreads) {
      const int k = n % kInner, i = n / kInner;
      of.left[k][i] = k < left && i < rows ? widen(in[(row0 + i) * ld_in + k0 + k]) : (real_t)0;
    }
    for (int n = (int)threadIdx.x; n < kInner * kTileCols; n += kThreads) {
      const int k = transposed ? n % kInner : n / kTileCols, j = transposed ? n / kInner : n % kTileCols;
      const long long at = transposed ? (long long)(col0 + j) * inner + k0 + k : (long long)(k0 + k) * cols + col0 + j;
      of.right[k][j] = k < left && j < here ? widen(matrix[at]) : (real_t)0;
    }
    __syncthreads();
    multiply_tile(of, sum);
  }
  const int row = (int)threadIdx.x / kAcross * 4, col = (int)threadIdx.x % kAcross * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row + i < rows && col + j < here) out[(row0 + row + i) * ld_out + col0 + col + j] = narrow(sum[i][j]);
}

// relation_gradients: gradients_r += a[rows of r, :]^T b[rows of r, :] for the relation r of every span.
// in    a [n, D], b [n, E];  out  gradients [R, ld_gradients]: (D, E) row by row. Moves n D for each tile of columns,
//       n E for each of rows, 2 D E for each relation
extern "C" __global__ void __launch_bounds__(128)
    relation_gradients(const storage_t* a, long long ld_a, const storage_t* b, long long ld_b, const int* spans,
                       storage_t* gradients, long long ld_gradients, int rows, int cols) {
  __shared__ Operands of;
  const int* span = spans + 3 * blockIdx.x;
  const int first = span[1], inner = span[2] - first;
  const int row0 = (int)blockIdx.y * kTileRows, col0 = (int)blockIdx.z * kTileCols;
  const int down = rows - row0, here = cols - col0;
  real_t sum[4][4] = {};
  for (int k0 = 0; k0 < inner; k0 += kInner) {
    if (k0) __syncthreads();
    const int left = inner - k0;
    for (int n = (int)threadIdx.x; n < kInner * kTileRows; n += kThreads) {
      const int k = n / kTileRows, i = n % kTileRows;
      of.left[k][i] = k < left && i < down ? widen(a[(first + k0 + k) * ld_a + row0 + i]) : (real_t)0;
    }
    for (int n = (int)threadIdx.x; n < kInner * kTileCols; n += kThreads) {
      const int k = n / kTileCols, j = n % kTileCols;
      of.right[k][j] = k < left && j < here ? widen(b[(first + k0 + k) * ld_b + col0 + j]) : (real_t)0;
    }
    __syncthreads();
    multiply_tile(of, sum);
  }
  const int row = (int)threadIdx.x / kAcross * 4, col = (int)threadIdx.x % kAcross * 4;
  storage_t* matrix = gradients + span[0] * ld_gradients;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row + i < down && col + j < here) {
        storage_t* at = matrix + (long long)(row0 + row + i) * cols + col0 + col + j;
        *at = narrow(widen(*at) + sum[i][j]);
      }
}
