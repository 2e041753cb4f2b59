// Row passes over dense data: epilogue, gather, scatter; input dropout on sparse values. Twin: cpu/rows.cpp.
// Thread (x, y) of a block has W columns of one row; a block covers as many whole rows as its threads allow, so that
// all of a row is in flight at once. Nothing is shared between threads. Results may be of another type (out.cuh), which
// halves or doubles the bytes that they move.
#include "columns.cuh"
#include "epilogue.cuh"

template <int W>
__device__ __forceinline__ void finish(const storage_t* in, long long ld_in, out_t* out, long long ld_out,
                                       long long rows, int cols, long long first_row, const Epilogue& epilogue) {
  const long long v = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
  if (v >= rows || column >= cols) return;
  real_t z[W];
  load_columns<W>(in + v * ld_in + column, cols - column, rows_aligned(in, ld_in), z);
  finish_columns<W>(z, first_row + v, column, cols, epilogue);
  store_columns<W>(out + v * ld_out + column, cols - column, rows_aligned(out, ld_out), z);
}

// finish_rows: out[v, :] = epilogue(in[v, :]) without dropout; in == out works in place. Row v of the matrices is row
// first_row + v of the epilogue's vectors.
// in    in [V, D]; row_scale, out_scale [V'], bias [D], row_ids [V'] or null; see epilogue.cuh
// out   out [V, D]. Moves 2 V D.
// grid  (ceil(V / y), ceil(D / (kVector x))), block (x, y): x threads cover a row or 128 kVector columns of it
extern "C" __global__ void __launch_bounds__(128)
    finish_rows(const storage_t* in, long long ld_in, out_t* out, long long ld_out, long long rows, int cols,
                long long first_row, const real_t* row_scale, const real_t* bias, const real_t* out_scale,
                const long long* row_ids, const long long* clock, int relu, unsigned layer, unsigned threshold,
                float keep_scale) {
  const Epilogue epilogue = {row_scale, bias, out_scale, row_ids, {clock, layer, 0, keep_scale}, relu};
  finish<kVector>(in, ld_in, out, ld_out, rows, cols, first_row, epilogue);
}

// finish_rows_dropout: the same with dropout. A thread has 8 columns, the words of one Philox block, so that none is
// computed twice.
extern "C" __global__ void __launch_bounds__(128)
    finish_rows_dropout(const storage_t* in, long long ld_in, out_t* out, long long ld_out, long long rows, int cols,
                        long long first_row, const real_t* row_scale, const real_t* bias, const real_t* out_scale,
                        const long long* row_ids, const long long* clock, int relu, unsigned layer, unsigned threshold,
                        float keep_scale) {
  const Epilogue epilogue = {row_scale, bias, out_scale, row_ids, {clock, layer, threshold, keep_scale}, relu};
  finish<8>(in, ld_in, out, ld_out, rows, cols, first_row, epilogue);
}

// kVector columns of a row, or the `left` ones at its end: bit for bit, or converted to another type.
__device__ __forceinline__ void copy_columns(const storage_t* from, out_t* to, int left, bool aligned) {
#if defined(MGGCN_OUT_REAL) || defined(MGGCN_OUT_BF16)
  real_t x[kVector];
  load_columns<kVector>(from, left, aligned, x);
  store_columns<kVector>(to, left, aligned, x);
#else
  if (aligned && left >= kVector) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    return;
  }
#pragma unroll
  for (int d = 0; d < kVector; ++d)
    if (d < left) to[d] = from[d];
#endif
}

// gather_rows: out[i, :] = in[index[i], :], bit for bit, or converted.
// in    in [N, D], index int32 [V];  out [V, D]. Moves 2 V D.
// grid  as finish_rows
extern "C" __global__ void __launch_bounds__(128) gather_rows(const storage_t* in, long long ld_in, const int* index,
                                                              out_t* out, long long ld_out, long long rows, int cols) {
  const long long i = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (i >= rows || column >= cols) return;
  const bool aligned = rows_aligned(in, ld_in) && rows_aligned(out, ld_out);
  copy_columns(in + index[i] * ld_in + column, out + i * ld_out + column, cols - column, aligned);
}

// scatter_rows: out[index[i], :] = in[i, :], bit for bit, or converted; index without repeats, so that no two threads
// meet. in    in [V, D], index int32 [V];  out [N, D]. Moves 2 V D. grid  as finish_rows
extern "C" __global__ void __launch_bounds__(128) scatter_rows(const storage_t* in, long long ld_in, const int* index,
                                                               out_t* out, long long ld_out, long long rows, int cols) {
  const long long i = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (i >= rows || column >= cols) return;
  const bool aligned = rows_aligned(in, ld_in) && rows_aligned(out, ld_out);
  copy_columns(in + i * ld_in + column, out + index[i] * ld_out + column, cols - column, aligned);
}

// scatter_add_rows: out[index[i], :] += in[i, :]; index without repeats, so that no two threads meet.
// in    in [V, D], index int32 [V];  out [N, D]. Moves 3 V D.
// grid  as finish_rows
extern "C" __global__ void __launch_bounds__(128)
    scatter_add_rows(const storage_t* in, long long ld_in, const int* index, out_t* out, long long ld_out,
                     long long rows, int cols) {
  const long long i = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  if (i >= rows || left <= 0) return;
  out_t* to = out + index[i] * ld_out + column;
  real_t x[kVector], sum[kVector];
  load_columns<kVector>(in + i * ld_in + column, left, rows_aligned(in, ld_in), x);
  load_out_columns<kVector>(to, left, rows_aligned(out, ld_out), sum);
#pragma unroll
  for (int d = 0; d < kVector; ++d) sum[d] += x[d];
  store_columns<kVector>(to, left, rows_aligned(out, ld_out), sum);
}

// scatter_add_chains: out[index[i], :] += in[i, :] in the order of i, where a row of out may come several times: the
// thread of its first i adds all of them. chain[i]: the next i of the row, or 0; its complement if i is not the first.
// in    in [V, D], index int32 [V], chain int32 [V];  out [N, D]. Moves V D, and 2 D for each row of out.
// grid  as finish_rows
extern "C" __global__ void __launch_bounds__(128)
    scatter_add_chains(const storage_t* in, long long ld_in, const int* index, const int* chain, out_t* out,
                       long long ld_out, long long rows, int cols) {
  const long long i = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  if (i >= rows || left <= 0 || chain[i] < 0) return;
  out_t* to = out + index[i] * ld_out + column;
  real_t sum[kVector];
  load_out_columns<kVector>(to, left, rows_aligned(out, ld_out), sum);
  long long at = i;
  for (int next = chain[i];; next = ~chain[at]) {
    real_t x[kVector];
    load_columns<kVector>(in + at * ld_in + column, left, rows_aligned(in, ld_in), x);
#pragma unroll
    for (int d = 0; d < kVector; ++d) sum[d] += x[d];
    if (!next) break;
    at = next;
  }
  store_columns<kVector>(to, left, rows_aligned(out, ld_out), sum);
}

// dropout_values: the values of sparse features under input dropout, by the mask that finish_rows_dropout gives the
// dense row. in    indptr int64 [V + 1], indices int32 [nnz], values [nnz], row_ids int64 [V];  out [nnz]. Moves 3 nnz.
// grid  ceil(V / y), block (x, y): x lanes over the nonzeros of a row
extern "C" __global__ void __launch_bounds__(128)
    dropout_values(const long long* indptr, const int* indices, const real_t* values, real_t* out, long long rows,
                   const long long* row_ids, const long long* clock, unsigned layer, unsigned threshold,
                   float keep_scale) {
  const long long v = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (v >= rows) return;
  const Dropout dropout = {clock, layer, threshold, keep_scale};
  const long long end = indptr[v + 1];
  for (long long e = indptr[v] + threadIdx.x; e < end; e += blockDim.x) {
    const int column = indices[e];
    const Philox words = philox(dropout, row_ids[v], (unsigned)column / 8);
    out[e] = kept(words, column, threshold) ? values[e] * (real_t)keep_scale : (real_t)0;
  }
}
