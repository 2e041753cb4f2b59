// attend: z_v += the sum over the edges u -> v, by head, of exp(e - m_v) kept x_u, rescaled as the running maximum m_v
// grows, and l_v += the sum of exp(e - m_v). Tiles come in any order; after the last z_v is divided by l_v.
// attention.cuh has e and the rows. Source: FlashAttention (Dao et al. 2022, algorithm 1), by destination. in    indptr
// int64 [V+1] or null (no entries), indices int32 [nnz], counts real [nnz] parallel edges of an entry or null (one
// each),
//       rows storage [N, ...] that travel, own [V, ...]: t
//       or y
// out   storage [V, D] z; state storage [V, 2 H] m and l, -infinity and 0 without entries
// moves per edge 4 bytes of index and the source's row; per row z, m and l. Nothing has a number per edge.
// grid  ceil(V H / 4), block 128: a warp per row and head. No atomics: bitwise repeatable. Not measured; a hub is H
//       warps' work. Twin: cpu/attention.cpp.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attend(const long long* indptr, const int* indices, const real_t* counts, const storage_t* rows, long long ld,
           const storage_t* own, long long ld_own, storage_t* out, long long ld_out, storage_t* state,
           long long ld_state, const real_t* a, const long long* ids, const long long* clock, unsigned layer,
           unsigned threshold, float keep_scale, int heads, int first_head, int cols, double slope, int fresh, int last,
           long long num_rows) {
  const long long row = warp_number() / heads;
  const int head = (int)(warp_number() % heads), lane = (int)threadIdx.x % 32;
  if (row >= num_rows) return;
  const Heads w = {a, (real_t)slope, {clock, layer, threshold, keep_scale}, heads, first_head, cols};
  const long long begin = indptr ? indptr[row] : 0, end = indptr ? indptr[row + 1] : 0;
  const int scores = a ? 0 : w.width();
  storage_t* held = state + row * ld_state + head;
  const real_t m0 = fresh ? -infinity() : widen(held[0]), l0 = fresh ? (real_t)0 : widen(held[heads]);
  real_t m = m0, l = l0;
  for (int first = lane; first - lane < cols; first += 32 * kSpan) {
    storage_t* to = out + row * ld_out + head * cols + first;
    real_t z[kSpan];
#pragma unroll
    for (int j = 0; j < kSpan; ++j) z[j] = !fresh && first + 32 * j < cols ? widen(to[32 * j]) : (real_t)0;
    m = m0, l = l0;
    for (long long k = begin; k < end; ++k) {
      const storage_t* x = rows + indices[k] * ld;
      const real_t e = score(w, head, x + scores, own + row * ld_own).value;
      const real_t most = e > m ? e : m, scale = exp_of(m - most), p = times(counts, k, exp_of(e - most));
      const real_t kept_p = threshold ? p * factor(w, head, number_of(x[w.id_forwards()]), ids[row]) : p;
      m = most;
      l = l * scale + p;
#pragma unroll
      for (int j = 0; j < kSpan; ++j)
        if (first + 32 * j < cols) z[j] = z[j] * scale + kept_p * widen(x[head * cols + first + 32 * j]);
    }
    const real_t share = !last ? (real_t)1 : l == 0 ? (real_t)0 : 1 / l;
#pragma unroll
    for (int j = 0; j < kSpan; ++j)
      if (first + 32 * j < cols) to[32 * j] = narrow(z[j] * share);
  }
  __syncwarp();
  if (lane == 0) held[0] = narrow(m), held[heads] = narrow(l);
}

// The triples (z, m, l) of a message [z | m | l], one for each of `index`, join those that lie there.
// grid  ceil(rows of the message H / 4), block 128
extern "C" __global__ void __launch_bounds__(128)
    attend_combine(const int* index, const storage_t* message, long long ld, storage_t* out, long long ld_out,
                   storage_t* state, long long ld_state, int heads, int cols, long long num_rows) {
  const long long i = warp_number() / heads;
  const int head = (int)(warp_number() % heads), width = heads * cols;
  if (i >= num_rows) return;
  const storage_t *from = message + i * ld, *m2 = from + width + head;
  const real_t sum = widen(m2[heads]);
  if (sum == 0) return;  // no edges there
  storage_t *to = out + index[i] * ld_out, *held = state + index[i] * ld_state + head;
  const real_t m = widen(held[0]), l = widen(held[heads]), other = widen(m2[0]), most = other > m ? other : m;
  const real_t scale = exp_of(m - most), scale2 = exp_of(other - most);
  for (int c = head * cols + (int)threadIdx.x % 32; c < (head + 1) * cols; c += 32)
    to[c] = narrow(widen(to[c]) * scale + widen(from[c]) * scale2);
  __syncwarp();
  if (threadIdx.x % 32 == 0) held[0] = narrow(most), held[heads] = narrow(l * scale + sum * scale2);
}

// out[u, :] (+)= gradients of x_u, and of s_u behind it: weights w are computed again, and the gradient of a score is
// w (kept g_v x_u - d_v) with d_v = g_v z_v by head. rows: what travels backwards; own: what travelled forwards.
extern "C" __global__ void __launch_bounds__(128)
    attend_sources(const long long* indptr, const int* indices, const real_t* counts, const storage_t* rows,
                   long long ld, const storage_t* own, long long ld_own, storage_t* out, long long ld_out,
                   const real_t* a, const long long* ids, const long long* clock, unsigned layer, unsigned threshold,
                   float keep_scale, int heads, int first_head, int cols, double slope, int fresh, long long num_rows) {
  const long long row = warp_number() / heads;
  const int head = (int)(warp_number() % heads), lane = (int)threadIdx.x % 32;
  if (row >= num_rows) return;
  const Heads w = {a, (real_t)slope, {clock, layer, threshold, keep_scale}, heads, first_head, cols};
  const int width = w.width(), at = width + heads, begin = head * cols;
  const storage_t* x = own + row * ld_own;
  storage_t* to = out + row * ld_out;
  real_t scored = 0;
  for (int first = lane; first - lane < cols; first += 32 * kSpan) {
    real_t sum[kSpan];
#pragma unroll
    for (int j = 0; j < kSpan; ++j)
      sum[j] = !fresh && first + 32 * j < cols ? widen(to[begin + first + 32 * j]) : (real_t)0;
    scored = 0;
    for (long long k = indptr[row]; k < indptr[row + 1]; ++k) {
      const storage_t* message = rows + indices[k] * ld;
      const Score e = score(w, head, message + at, a ? x : x + width);
      real_t weight = times(counts, k, softened(w, head, e.value, message));
      const real_t kept = threshold ? factor(w, head, ids[row], number_of(message[w.maxima() + 2 * heads])) : (real_t)1;
      const real_t grad = weight * (kept * warp_dot(message + begin, x + begin, cols) - widen(message[width + head]));
      weight *= kept;
      scored += e.slope * grad;
#pragma unroll
      for (int j = 0; j < kSpan; ++j) {
        const int c = begin + first + 32 * j;
        if (first + 32 * j >= cols) break;
        sum[j] += weight * widen(message[c]);
        if (a) sum[j] += grad * a[c] * (widen(x[c]) + widen(message[at + c]) > 0 ? (real_t)1 : w.slope);
      }
    }
#pragma unroll
    for (int j = 0; j < kSpan; ++j)
      if (first + 32 * j < cols) to[begin + first + 32 * j] = narrow(sum[j]);
  }
  if (!a && lane == 0) to[width + head] = narrow(fresh ? scored : widen(to[width + head]) + scored);
}

// out[v, :] (+)= the gradient of t_v or y_v; beside storage [V, D] (+)= that of a, by row, of GATv2. rows: what travels
// forwards; own: what travelled backwards.
extern "C" __global__ void __launch_bounds__(128)
    attend_destinations(const long long* indptr, const int* indices, const real_t* counts, const storage_t* rows,
                        long long ld, const storage_t* own, long long ld_own, storage_t* out, long long ld_out,
                        storage_t* beside, long long ld_beside, const real_t* a, const long long* ids,
                        const long long* clock, unsigned layer, unsigned threshold, float keep_scale, int heads,
                        int first_head, int cols, double slope, int fresh, long long num_rows) {
  const long long row = warp_number() / heads;
  const int head = (int)(warp_number() % heads), lane = (int)threadIdx.x % 32;
  if (row >= num_rows) return;
  const Heads w = {a, (real_t)slope, {clock, layer, threshold, keep_scale}, heads, first_head, cols};
  const int width = w.width(), at = width + heads, begin = head * cols;
  const storage_t* message = own + row * ld_own;
  storage_t *to = out + row * ld_out, *other = a ? beside + row * ld_beside : nullptr;
  real_t scored = 0;
  for (int first = lane; first - lane < (a ? cols : 1); first += 32 * kSpan) {
    real_t sum[kSpan] = {}, values[kSpan] = {};
    scored = 0;
    for (long long k = indptr[row]; k < indptr[row + 1]; ++k) {
      const storage_t* x = rows + indices[k] * ld;
      const Score e = score(w, head, a ? x : x + width, message + at);
      const real_t weight = times(counts, k, softened(w, head, e.value, message));
      const real_t kept = threshold ? factor(w, head, number_of(x[w.id_forwards()]), ids[row]) : (real_t)1;
      const real_t grad = weight * (kept * warp_dot(message + begin, x + begin, cols) - widen(message[width + head]));
      scored += e.slope * grad;
#pragma unroll
      for (int j = 0; j < kSpan; ++j) {
        const int c = begin + first + 32 * j;
        if (!a || first + 32 * j >= cols) break;
        const real_t q = widen(x[c]) + widen(message[at + c]), r = q > 0 ? (real_t)1 : w.slope;
        sum[j] += grad * a[c] * r;
        values[j] += grad * r * q;
      }
    }
#pragma unroll
    for (int j = 0; j < kSpan; ++j) {
      const int c = begin + first + 32 * j;
      if (!a || first + 32 * j >= cols) break;
      to[c] = narrow(fresh ? sum[j] : widen(to[c]) + sum[j]);
      other[c] = narrow(fresh ? values[j] : widen(other[c]) + values[j]);
    }
  }
  if (!a && lane == 0) to[head] = narrow(fresh ? scored : widen(to[head]) + scored);
}

// out[v, h] = the sum over the columns of head h of x[v, :] y[v, :]; y of stride 0 is one row for all.
// grid  ceil(V H / 4), block 128
extern "C" __global__ void __launch_bounds__(128)
    head_dots(const storage_t* x, long long ld_x, const storage_t* y, long long ld_y, storage_t* out, long long ld_out,
              int heads, int cols, long long num_rows) {
  const long long row = warp_number() / heads;
  const int head = (int)(warp_number() % heads);
  if (row >= num_rows) return;
  const real_t sum = warp_dot(x + row * ld_x + head * cols, y + row * ld_y + head * cols, cols);
  if (threadIdx.x % 32 == 0) out[row * ld_out + head] = narrow(sum);
}
