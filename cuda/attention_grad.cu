// The backward passes of attention: weights w of edges u -> v are computed again from m and 1 / l, and the gradient of
// a score is w (kept g_v x_u - d_v) with d_v = g_v z_v by head. attention.cuh has e and the rows.
// attend_sources       out[u, :] (+)= gradients of x_u, and of s_u behind it. rows: what travels backwards; own: what
//                      travelled forwards.
// attend_destinations  out[v, :] (+)= the gradient of t_v or y_v; beside storage [V, D] (+)= that of a, by row, of
//                      GATv2. rows: what travels forwards; own: what travelled backwards.
// in    indptr int64 [V+1], indices int32 [nnz], counts real [nnz] or null, rows storage [N, ...], own storage [V, ...]
// moves per edge 4 bytes of index and the row that travels; per row what is its own and the result
// sums  kEdges edges in flight, groups and warps added in their order: bitwise repeatable, no atomics. Steps as in
//       attention.cu. Gain: docs/notes/0039. Twin: cpu/attention.cpp.
#define MGGCN_BACKWARDS
#include "attention.cuh"

struct Gradient {
  Edges edges;
  const storage_t* own;
  long long ld_own;
  storage_t* out;
  long long ld_out;
  storage_t* beside;
  long long ld_beside;
  const long long* ids;
  int fresh;
};

// What a lane adds up over edges: of its columns, and of its head's score.
struct Sums {
  Pieces rows, values;  // values: of GATv2's a
  real_t score[1];
};

// What a row keeps over its edges. Sources: x, and s of GAT; destinations: g, d, m, 1 / l, and t or y.
struct Own {
  Pieces row, y, weights;
  real_t score, dot, most, inverse;
};

__device__ __forceinline__ Own load_own(const Heads& w, const storage_t* row, const Place& at, bool to_source) {
  Own own = {};
  load_own(row, at, own.row);
  if (kDynamic) load_weights(w, at, own.weights);
  if (kDynamic && !to_source) load_own(row + w.scored(), at, own.y);
  if (!kDynamic) own.score = widen(row[(to_source ? w.width() : w.scored()) + at.head]);
  if (to_source) return own;
  own.dot = widen(row[w.width() + at.head]);
  own.most = widen(row[w.maxima() + at.head]), own.inverse = widen(row[w.maxima() + w.heads + at.head]);
  return own;
}

// sums += the edges in flight, which are entries k, k + step and so on. own: the row in memory, id its number.
template <bool kToSource>
__device__ __forceinline__ void add_edges(const Heads& w, const Gradient& a, const Place& at, const Flight& f,
                                          unsigned k, int step, const Own& mine, const storage_t* own, long long id,
                                          Sums& sums) {
  constexpr bool kSecond = kToSource && kDynamic;  // y travels, too
  Pieces theirs[kEdges], second[kSecond ? kEdges : 1];
  real_t e[kEdges], dot[kEdges], most[kEdges], inverse[kEdges], products[kEdges];
#pragma unroll
  for (int j = 0; j < kEdges; ++j) {
    const storage_t* row = f.row[j];
    load_pieces(row, at, theirs[j]);
    if (kSecond) load_pieces(row + w.scored(), at, second[kSecond ? j : 0]);
    if (!kDynamic) e[j] = widen(row[(kToSource ? w.scored() : w.width()) + at.head]) + mine.score;
    dot[j] = kToSource ? widen(row[w.width() + at.head]) : mine.dot;
    most[j] = kToSource ? widen(row[w.maxima() + at.head]) : mine.most;
    inverse[j] = kToSource ? widen(row[w.maxima() + w.heads + at.head]) : mine.inverse;
  }
  const int numbers = kToSource ? w.maxima() + 2 * w.heads : w.id_forwards();
  const unsigned kept = kDrops ? kept_weights(w, at, f, numbers, id, kToSource) : 0;
#pragma unroll
  for (int j = 0; j < kEdges; ++j) {
    const storage_t* row = f.row[j];
    products[j] = product(w, at, theirs[j], mine.row, row, own);
    if (!kDynamic) continue;
    // q = x + y takes the place of y, or of x, whose product is there.
    Pieces& q = kSecond ? second[kSecond ? j : 0] : theirs[j];
    add_pieces(q, kSecond ? mine.row : mine.y);
    e[j] = score(w, at, mine.weights, q, kSecond ? row + w.scored() : row, kSecond ? own : own + w.scored());
  }
  sum_heads(w, products);
  if (kDynamic) sum_heads(w, e);
#pragma unroll
  for (int j = 0; j < kEdges; ++j) {
    const real_t slope = kDynamic || e[j] > 0 ? (real_t)1 : w.slope;
    const real_t softened = exp_of(rounded_product(slope, e[j]) - most[j]) * inverse[j];
    const real_t weight = j < f.there ? times(a.edges.counts, k + j * step, softened) : (real_t)0;
    const real_t taken = weight * factor(w, kept, j), felt = taken * products[j] - weight * dot[j];
    const Pieces& q = kSecond ? second[kSecond ? j : 0] : theirs[j];
    sums.score[0] += slope * felt;
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (kToSource) sums.rows[p][i] += taken * theirs[j][p][i];
        if (!kDynamic) continue;
        const real_t part = felt * (q[p][i] > 0 ? (real_t)1 : w.slope);
        sums.rows[p][i] += kToSource ? part * mine.weights[p][i] : part;  // destinations: times a in the end
        if (!kToSource) sums.values[p][i] += part * q[p][i];
      }
  }
}

// rows[row, :] = x, or += it, in the columns of a lane.
__device__ __forceinline__ void store(storage_t* rows, long long ld, long long row, const Heads& w, const Place& at,
                                      bool fresh, Pieces& x) {
  const bool vectors = rows_aligned(rows, ld) && w.cols % kVector == 0;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (!at.live[p]) continue;
    storage_t* to = rows + row * ld + at.column[p];
    real_t before[kVector] = {};
    if (!fresh) load_columns<kVector>(to, at.left[p], vectors, before);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[p][i] += before[i];
    store_columns<kVector>(to, at.left[p], vectors, x[p]);
  }
}

template <bool kToSource, int kWarps>
__device__ __forceinline__ void gradient_of_row(const Heads& w, const Gradient& a, long long row,
                                                const Team<kWarps>& team) {
  constexpr bool kColumns = kToSource || kDynamic;  // destinations of GAT have scores alone, the same in all tiles
  const unsigned begin = (unsigned)a.edges.indptr[row], end = (unsigned)a.edges.indptr[row + 1];
  const storage_t* own = a.own + row * a.ld_own;
  const int each = w.tiles_of_head();
  for (int tile = 0; tile < w.tiles(team.lanes); tile += kColumns ? 1 : each) {
    const Place at = place(w, team.lane(), team.lanes, tile);
    const Own mine = load_own(w, own, at, kToSource);
    Sums sums = {};
    int next[kEdges];
    unsigned k = first_entry(team, begin);
    if (k < end) look_ahead(a.edges, team, k + group_of_warp(team.lanes), end, next);
    for (; k < end; k += kEdges * team.groups()) {
      const unsigned entry = k + group_of_warp(team.lanes);
      const Flight f = flight(a.edges, team, entry, end, next);
      add_edges<kToSource>(w, a, at, f, entry, team.groups(), mine, own, kDrops ? a.ids[row] : 0, sums);
    }
    if (kColumns) add_team<kWarps, kPieces * kVector>(team, &sums.rows[0][0]);
    if (kDynamic && !kToSource) add_team<kWarps, kPieces * kVector>(team, &sums.values[0][0]);
    if (!kDynamic) add_team<kWarps, 1>(team, sums.score);
    if (team.group()) continue;
    if (kDynamic && !kToSource) {
#pragma unroll
      for (int i = 0; i < kPieces * kVector; ++i)
        sums.rows[i / kVector][i % kVector] *= mine.weights[i / kVector][i % kVector];
    }
    if (kColumns) store(a.out, a.ld_out, row, w, at, a.fresh, sums.rows);
    if (kDynamic && !kToSource) store(a.beside, a.ld_beside, row, w, at, a.fresh, sums.values);
    if (kDynamic || !at.first || tile % each) continue;
    storage_t* to = a.out + row * a.ld_out + (kToSource ? w.width() : 0) + at.head;
    *to = narrow(a.fresh ? sums.score[0] : widen(*to) + sums.score[0]);
  }
}

template <bool kToSource>
__device__ __forceinline__ void gradient_of_rows(const Heads& w, const Gradient& a, const Rows& all, int lanes) {
  if (all.in_long_block()) {
    gradient_of_row<kToSource>(w, a, long_row(all.long_rows, all.hubs, all.num_hubs), Team<kWarpsOfBoth>{lanes});
  } else {
    const long long row = all.of_warp(a.edges.indptr);
    if (row >= 0) gradient_of_row<kToSource>(w, a, row, Team<1>{lanes});
  }
}

// grid  num_long + num_hubs + ceil(V / 8), block 256: a block per long row, then a warp per other one
extern "C" __global__ void __launch_bounds__(256, 2)
    attend_sources(const long long* indptr, const int* indices, const real_t* counts, const storage_t* rows,
                   long long ld, const storage_t* own, long long ld_own, storage_t* out, long long ld_out,
                   const real_t* a, const long long* ids, const long long* clock, unsigned layer, unsigned threshold,
                   float keep_scale, int heads, int first_head, int cols, double slope, int fresh, int head_lanes,
                   int lanes, const int* long_rows, const int* hubs, int num_long, int num_hubs,
                   const unsigned char* order, long long num_rows, int longest) {
  const Heads w = {a, (real_t)slope, {clock, layer, threshold, keep_scale}, heads, first_head, cols, head_lanes};
  const Gradient x = {{indptr, indices, counts, rows, ld}, own, ld_own, out, ld_out, nullptr, 0, ids, fresh};
  const Rows all = {long_rows, hubs, num_long, num_hubs, order, num_rows, longest};
  gradient_of_rows<true>(w, x, all, lanes);
}

// grid  num_long + num_hubs + ceil(V / 8), block 256: a block per long row, then a warp per other one
extern "C" __global__ void __launch_bounds__(256, 2)
    attend_destinations(const long long* indptr, const int* indices, const real_t* counts, const storage_t* rows,
                        long long ld, const storage_t* own, long long ld_own, storage_t* out, long long ld_out,
                        storage_t* beside, long long ld_beside, const real_t* a, const long long* ids,
                        const long long* clock, unsigned layer, unsigned threshold, float keep_scale, int heads,
                        int first_head, int cols, double slope, int fresh, int head_lanes, int lanes,
                        const int* long_rows, const int* hubs, int num_long, int num_hubs, const unsigned char* order,
                        long long num_rows, int longest) {
  const Heads w = {a, (real_t)slope, {clock, layer, threshold, keep_scale}, heads, first_head, cols, head_lanes};
  const Gradient x = {{indptr, indices, counts, rows, ld}, own, ld_own, out, ld_out, beside, ld_beside, ids, fresh};
  const Rows all = {long_rows, hubs, num_long, num_hubs, order, num_rows, longest};
  gradient_of_rows<false>(w, x, all, lanes);
}
