// attend: z_v += the sum over the edges u -> v, by head, of exp(e - m_v) kept x_u, rescaled as the running maximum m_v
// grows, and l_v += the sum of exp(e - m_v). Tiles come in any order; after the last z_v is divided by l_v.
// attention.cuh has e and the rows. Source: FlashAttention (Dao et al. 2022, algorithm 1), by destination.
// in    indptr int64 [V+1] or null (no entries), indices int32 [nnz], counts real [nnz] parallel edges of an entry or
//       null (one each), rows storage [N, ...] that travel, own [V, ...]: t or y
// out   storage [V, D] z; state storage [V, 2 H] m and l, -infinity and 0 without entries
// moves per edge 4 bytes of index and the source's row; per row z, m and l. Nothing has a number per edge.
// sums  kEdges edges in flight for each group of lanes, heads side by side; groups and warps hold (m, l, z) of their
// own,
//       which are combined in their order: bitwise repeatable, no atomics. A row of n edges takes n / kEdges steps of a
//       warp, a long one n / (8 kEdges) of a block. Gain: docs/notes/0039. Twin: cpu/attention.cpp.
#include "attention.cuh"

struct Attend {
  Edges edges;
  const storage_t* own;
  long long ld_own;
  storage_t* out;
  long long ld_out;
  storage_t* state;
  long long ld_state;
  const long long* ids;
  int fresh, last;
};

struct Held {
  real_t m, l;
  Pieces z;
};

__device__ __forceinline__ real_t rescale(real_t m, real_t most) { return m == most ? (real_t)1 : exp_of(m - most); }

// held += other, either of which may be without edges.
__device__ __forceinline__ void merge(Held& held, const Held& other) {
  const real_t most = other.m > held.m ? other.m : held.m;
  const real_t scale = rescale(held.m, most), scale2 = rescale(other.m, most);
  held.m = most;
  held.l = held.l * scale + other.l * scale2;
#pragma unroll
  for (int p = 0; p < kPieces; ++p)
#pragma unroll
    for (int i = 0; i < kVector; ++i) held.z[p][i] = held.z[p][i] * scale + other.z[p][i] * scale2;
}

// held += the first `there` edges in flight, which are entries k, k + step and so on: one rescale for all of them.
__device__ __forceinline__ void add_edges(const Heads& w, const real_t* counts, unsigned k, int step, int there,
                                          const Pieces (&x)[kEdges], const real_t (&e)[kEdges], unsigned kept,
                                          Held& held) {
  real_t most = held.m;
#pragma unroll
  for (int j = 0; j < kEdges; ++j) most = j < there && e[j] > most ? e[j] : most;
  const real_t scale = rescale(held.m, most);
  held.m = most;
  held.l *= scale;
#pragma unroll
  for (int i = 0; i < kPieces * kVector; ++i) held.z[i / kVector][i % kVector] *= scale;
#pragma unroll
  for (int j = 0; j < kEdges; ++j) {
    const real_t weight = j < there ? times(counts, k + j * step, exp_of(e[j] - most)) : (real_t)0;
    const real_t kept_weight = weight * factor(w, kept, j);
    held.l += weight;
#pragma unroll
    for (int i = 0; i < kPieces * kVector; ++i)
      held.z[i / kVector][i % kVector] += kept_weight * x[j][i / kVector][i % kVector];
  }
}

// What the groups of a team hold, in the first one.
template <int kWarps>
__device__ __forceinline__ void combine(const Team<kWarps>& team, Held& held) {
  Held other;
  for (int step = team.lanes; step < 32; step *= 2) {
    other.m = __shfl_xor_sync(kFullWarp, held.m, step);
    other.l = __shfl_xor_sync(kFullWarp, held.l, step);
#pragma unroll
    for (int i = 0; i < kPieces * kVector; ++i)
      other.z[i / kVector][i % kVector] = __shfl_xor_sync(kFullWarp, held.z[i / kVector][i % kVector], step);
    merge(held, other);
  }
  if (kWarps == 1) return;
  __shared__ real_t shared[kWarps][2 + kPieces * kVector][32];
  const int lane = (int)threadIdx.x % 32;
  __syncthreads();
  shared[team.warp()][0][lane] = held.m;
  shared[team.warp()][1][lane] = held.l;
#pragma unroll
  for (int i = 0; i < kPieces * kVector; ++i) shared[team.warp()][2 + i][lane] = held.z[i / kVector][i % kVector];
  __syncthreads();
  if (team.warp()) return;
  for (int warp = 1; warp < kWarps; ++warp) {
    other.m = shared[warp][0][lane], other.l = shared[warp][1][lane];
#pragma unroll
    for (int i = 0; i < kPieces * kVector; ++i) other.z[i / kVector][i % kVector] = shared[warp][2 + i][lane];
    merge(held, other);
  }
}

// Joins what lies there, unless this is the first tile of the graph, and writes. Every lane of a warp calls this.
__device__ __forceinline__ void finish(const Heads& w, const Attend& a, long long row, const Place& at,
                                       bool first_group, bool last_of_head, Held& held) {
  storage_t *state = a.state + row * a.ld_state + at.head, *out = a.out + row * a.ld_out;
  if (!a.fresh) {
    Held before;
    before.m = widen(state[0]), before.l = widen(state[w.heads]);
    load_own(out, at, before.z);
    merge(before, held);
    held = before;
  }
  __syncwarp();
  if (!first_group) return;
  const bool vectors = rows_aligned(a.out, a.ld_out) && w.cols % kVector == 0;
  const real_t share = !a.last ? (real_t)1 : held.l == 0 ? (real_t)0 : 1 / held.l;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) held.z[p][i] *= share;
    if (at.live[p]) store_columns<kVector>(out + at.column[p], at.left[p], vectors, held.z[p]);
  }
  if (at.first && last_of_head) state[0] = narrow(held.m), state[w.heads] = narrow(held.l);
}

template <int kWarps>
__device__ __forceinline__ void attend_row(const Heads& w, const Attend& a, long long row, const Team<kWarps>& team) {
  const unsigned begin = a.edges.indptr ? (unsigned)a.edges.indptr[row] : 0;
  const unsigned end = a.edges.indptr ? (unsigned)a.edges.indptr[row + 1] : 0;
  const storage_t* own = a.own + row * a.ld_own;
  const int each = w.tiles_of_head();
  for (int tile = 0; tile < w.tiles(team.lanes); ++tile) {
    const Place at = place(w, team.lane(), team.lanes, tile);
    Pieces y, weights;
    if (kDynamic) load_own(own, at, y), load_weights(w, at, weights);
    const real_t t = kDynamic ? (real_t)0 : widen(own[at.head]);
    Held held = {-infinity(), 0, {}};
    int next[kEdges];
    unsigned k = first_entry(team, begin);
    if (k < end) look_ahead(a.edges, team, k + group_of_warp(team.lanes), end, next);
    for (; k < end; k += kEdges * team.groups()) {
      const unsigned mine = k + group_of_warp(team.lanes);
      const Flight f = flight(a.edges, team, mine, end, next);
      Pieces x[kEdges];
      real_t e[kEdges];
#pragma unroll
      for (int j = 0; j < kEdges; ++j) {
        load_pieces(f.row[j], at, x[j]);
        if (!kDynamic) e[j] = widen(f.row[j][w.width() + at.head]);
      }
      const unsigned kept = kDrops ? kept_weights(w, at, f, w.id_forwards(), a.ids[row], false) : 0;
#pragma unroll
      for (int j = 0; j < kEdges; ++j) {
        if (kDynamic) {
          Pieces q;
          for (int i = 0; i < kPieces * kVector; ++i) q[i / kVector][i % kVector] = x[j][i / kVector][i % kVector];
          add_pieces(q, y);
          e[j] = score(w, at, weights, q, f.row[j], own);
        } else {
          const real_t q = e[j] + t;
          e[j] = q > 0 ? q : rounded_product(w.slope, q);
        }
      }
      if (kDynamic) sum_heads(w, e);
      add_edges(w, a.edges.counts, mine, team.groups(), f.there, x, e, kept, held);
    }
    combine(team, held);
    if (team.warp()) continue;
    finish(w, a, row, at, team.group() == 0, tile % each == each - 1, held);
  }
}

// grid  num_long + num_hubs + ceil(V / 8), block 256: a block per long row, then a warp per other one
extern "C" __global__ void __launch_bounds__(256, 2)
    attend(const long long* indptr, const int* indices, const real_t* counts, const storage_t* rows, long long ld,
           const storage_t* own, long long ld_own, storage_t* out, long long ld_out, storage_t* state,
           long long ld_state, const real_t* a, const long long* ids, const long long* clock, unsigned layer,
           unsigned threshold, float keep_scale, int heads, int first_head, int cols, double slope, int fresh, int last,
           int head_lanes, int lanes, const int* long_rows, const int* hubs, int num_long, int num_hubs,
           const unsigned char* order, long long num_rows, int longest) {
  const Heads w = {a, (real_t)slope, {clock, layer, threshold, keep_scale}, heads, first_head, cols, head_lanes};
  const Edges edges = {indptr, indices, counts, rows, ld};
  const Attend x = {edges, own, ld_own, out, ld_out, state, ld_state, ids, fresh, last};
  const Rows all = {long_rows, hubs, num_long, num_hubs, order, num_rows, longest};
  if (all.in_long_block()) {
    attend_row(w, x, long_row(long_rows, hubs, num_hubs), Team<kWarpsOfBoth>{lanes});
  } else {
    const long long row = all.of_warp(indptr);
    if (row >= 0) attend_row(w, x, row, Team<1>{lanes});
  }
}
