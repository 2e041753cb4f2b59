// maximum: out[v, :] = the maximum over the edges u -> v of rows[u, :], and winners[v, :] = whose it is: of equal ones
// the vertex of the lowest number. Tiles come in any order: a call goes on from what it finds, unless it is the first.
// in    indptr int64 [V+1] or null (no entries), indices int32 [nnz], rows storage [N, D + 1], the last column the
//       vertex's number (vertex_numbers.cuh)
// out   storage [V, D], winners likewise: numbers, kNobody without entries. After the last tile such a row is 0.
//       NaN: the first vertex's is the maximum.
// moves per entry 4 bytes of index and (D + 1) sizeof storage, per row 2 D sizeof storage
// grid  ceil(V / 4), block 128: a warp per row, a lane per column. No atomics: bitwise repeatable. Not measured; a
//       hub is one warp's work. Twin: cpu/maximum.cpp.
// maximum_combine: the same of whole rows with their winners, one for each of `index`.
// maximum_grad: out[u, :] (+)= g[v, :] of the edges u -> v where winners[v, :] is u; rows [N, 2 D] are [g | winners].
//               Parallel edges, which lie side by side, count once. Eight blocks of it per multiprocessor: up to 64
//               registers, where a compiler that aims at 32 spills one.
#include "vertex_numbers.cuh"

struct Held {
  real_t value;
  number_t winner;
};

__device__ __forceinline__ void take(real_t x, number_t id, Held& held) {
  const bool first = id < held.winner;
  if (x > held.value || (x == held.value && first) || (x != x && (held.value == held.value || first)))
    held.value = x, held.winner = id;
}

extern "C" __global__ void __launch_bounds__(128)
    maximum(const long long* indptr, const int* indices, const storage_t* rows, long long ld, storage_t* out,
            long long ld_out, storage_t* winners, long long ld_winners, int cols, int fresh, int last,
            long long num_rows) {
  const long long row = warp_number();
  if (row >= num_rows) return;
  const long long begin = indptr ? indptr[row] : 0, end = indptr ? indptr[row + 1] : 0;
  for (int column = (int)threadIdx.x % 32; column < cols; column += 32) {
    storage_t *to = out + row * ld_out + column, *whose = winners + row * ld_winners + column;
    Held held = {-infinity(), kNobody};
    if (!fresh) held.value = widen(*to), held.winner = number_of(*whose);
    for (long long k = begin; k < end; ++k) {
      const storage_t* x = rows + indices[k] * ld;
      take(widen(x[column]), number_of(x[cols]), held);
    }
    *to = narrow(last && held.winner == kNobody ? (real_t)0 : held.value);
    *whose = as_storage(held.winner);
  }
}

// grid  ceil(rows of the message / 4), block 128
extern "C" __global__ void __launch_bounds__(128)
    maximum_combine(const int* index, const storage_t* message, long long ld, storage_t* out, long long ld_out,
                    storage_t* winners, long long ld_winners, int cols, long long num_rows) {
  const long long i = warp_number();
  if (i >= num_rows) return;
  for (int column = (int)threadIdx.x % 32; column < cols; column += 32) {
    const storage_t* x = message + i * ld + column;
    storage_t *to = out + index[i] * ld_out + column, *whose = winners + index[i] * ld_winners + column;
    Held held = {widen(*to), number_of(*whose)};
    take(widen(x[0]), number_of(x[cols]), held);
    *to = narrow(held.value);
    *whose = as_storage(held.winner);
  }
}

extern "C" __global__ void __launch_bounds__(128, 8)
    maximum_grad(const long long* indptr, const int* indices, const storage_t* rows, long long ld, const long long* ids,
                 storage_t* out, long long ld_out, int cols, int fresh, long long num_rows) {
  const long long row = warp_number();
  if (row >= num_rows) return;
  const long long begin = indptr[row], end = indptr[row + 1];
  const number_t mine = (number_t)ids[row];
  for (int column = (int)threadIdx.x % 32; column < cols; column += 32) {
    storage_t* to = out + row * ld_out + column;
    real_t sum = fresh ? (real_t)0 : widen(*to);
    int before = -1;
    for (long long k = begin; k < end; ++k) {
      const int v = indices[k];
      const storage_t* x = rows + v * ld + column;
      if (v != before && number_of(x[cols]) == mine) sum += widen(x[0]);
      before = v;
    }
    *to = narrow(sum);
  }
}
