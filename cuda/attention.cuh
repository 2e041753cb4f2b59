// What the passes of attention over edges share: which columns a lane has, scores of the edges in flight, their
// weights. A head has C columns, D = H C. An edge u -> v has the score e = LeakyReLU(s_u + t_v) (GAT, Velickovic et al.
// 2018, eq. 3) or e = sum over c of a_c LeakyReLU(x_uc + y_vc) (GATv2, Brody et al. 2022, eq. 7), and its weight is the
// softmax of e over the in-edges of v. Rows that travel forwards are [x (D) | s (H), of GAT | number of u]; backwards,
// of destinations, [g (D) | d (H) | t (H) or y (D) | m (H) | 1 / l (H) | number of v]. Twin: cpu/attention.h.
//
// A group of lanes has one edge at a time, heads of it side by side. A head takes w.lanes lanes (a power of two), each
// with kPieces pieces of 16 bytes, so that a lane has one head, whose sums are butterflies. Options of the compiler
// (mggcn/backend/cuda/neighbours.py): MGGCN_PIECES, MGGCN_DYNAMIC (GATv2), MGGCN_DROPS (dropout of weights),
// MGGCN_TIGHT (pieces are not aligned, or end behind their heads), MGGCN_WIDE (a head has more columns than a warp's
// pieces and takes several tiles).
#pragma once
#include "columns.cuh"
#include "epilogue.cuh"
#include "teams.cuh"
#include "vertex_numbers.cuh"

#ifndef MGGCN_PIECES
#define MGGCN_PIECES 1
#endif
constexpr int kPieces = kVector == 4 ? MGGCN_PIECES : 1;  // float32 alone has registers for two
#ifdef MGGCN_DYNAMIC
constexpr bool kDynamic = true;
#else
constexpr bool kDynamic = false;
#endif
#ifdef MGGCN_DROPS
constexpr bool kDrops = true;
#else
constexpr bool kDrops = false;
#endif

#ifdef MGGCN_WIDE
constexpr bool kWide = true;
#else
constexpr bool kWide = false;
#endif

#ifdef MGGCN_TIGHT
constexpr bool kTight = true;
#else
constexpr bool kTight = false;
#endif
#ifdef MGGCN_BACKWARDS
constexpr bool kBackwards = true;
#else
constexpr bool kBackwards = false;
#endif
// Edges in flight: for what registers suffice without spilling.
constexpr int kEdges = kVector == 4         ? 4 / (kDynamic && kBackwards ? 2 : 1) / (kTight ? 2 : 1)
                       : kDynamic || kDrops ? 1
                                            : 2;

typedef real_t Pieces[kPieces][kVector];

struct Heads {
  const real_t* a;  // [H, C] of GATv2
  real_t slope;
  Dropout dropout;                // of weights: counter (head / 8, number of u, number of v, 2^31 + site)
  int heads, first, cols, lanes;  // heads from `first` on of all that the model has
  __device__ __forceinline__ int width() const { return heads * cols; }
  __device__ __forceinline__ int id_forwards() const { return width() + (kDynamic ? 0 : heads); }
  __device__ __forceinline__ int scored() const { return width() + heads; }  // where t or y begins, backwards
  __device__ __forceinline__ int maxima() const { return scored() + (kDynamic ? width() : heads); }
  __device__ __forceinline__ int tiles_of_head() const {
    const int tile = kPieces * lanes * kVector;
    return kWide ? (cols + tile - 1) / tile : 1;
  }
  __device__ __forceinline__ int tiles(int team_lanes) const {
    const int beside = team_lanes / lanes;
    return (heads + beside - 1) / beside * tiles_of_head();
  }
};

// A row's walk: CSR of fewer than 2^31 entries, and rows that travel.
struct Edges {
  const long long* indptr;  // null: no entries
  const int* indices;
  const real_t* counts;  // parallel edges of an entry; null: one each
  const storage_t* rows;
  long long ld;
};

// What a lane has of a row in a tile: of `head`, pieces from `column` on, of whose columns `left` are the head's. A
// lane without columns or a head of its own (not live) repeats others', which are there to be read.
struct Place {
  int head, column[kPieces], left[kPieces];
  bool live[kPieces], first;  // first: lane of its head
};

__device__ __forceinline__ Place place(const Heads& w, int lane, int lanes, int tile) {
  Place at;
  const int each = w.tiles_of_head(), head = tile / each * (lanes / w.lanes) + lane / w.lanes;
  at.head = head < w.heads ? head : w.heads - 1;
  at.first = head < w.heads && lane % w.lanes == 0;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int first = ((tile % each * kPieces + p) * w.lanes + lane % w.lanes) * kVector;
    at.live[p] = head < w.heads && first < w.cols;
    const int there = first < w.cols ? first : (w.cols - 1) / kVector * kVector;
    at.column[p] = at.head * w.cols + there;
    at.left[p] = w.cols - there;
  }
  return at;
}

// The pieces of a row that an edge reads.
__device__ __forceinline__ void load_pieces(const storage_t* row, const Place& at, Pieces& x) {
#pragma unroll
  for (int p = 0; p < kPieces; ++p) load_piece(row + at.column[p], at.left[p], x[p]);
}

// The same once for a row, wherever it begins.
__device__ __forceinline__ void load_own(const storage_t* row, const Place& at, Pieces& x) {
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const storage_t* from = row + at.column[p];
    load_columns<kVector>(from, at.left[p], ((unsigned long long)from & 15) == 0, x[p]);
  }
}

__device__ __forceinline__ void load_weights(const Heads& w, const Place& at, Pieces& a) {
#pragma unroll
  for (int p = 0; p < kPieces; ++p)
#pragma unroll
    for (int i = 0; i < kVector; ++i) a[p][i] = kDynamic && i < at.left[p] ? w.a[at.column[p] + i] : (real_t)0;
}

// The entries of a row that a group has in flight. Behind the end it repeats the last one, which counts nothing.
struct Flight {
  int there;  // how many of them
  const storage_t* row[kEdges];
};

// next = where the entries from k on lead to; their indices are read a step ahead, so that rows need not wait for them.
template <int kWarps>
__device__ __forceinline__ void look_ahead(const Edges& e, const Team<kWarps>& team, unsigned k, unsigned end,
                                           int (&next)[kEdges]) {
#pragma unroll
  for (int j = 0; j < kEdges; ++j, k += team.groups()) next[j] = e.indices[k < end ? k : end - 1];
}

template <int kWarps>
__device__ __forceinline__ Flight flight(const Edges& e, const Team<kWarps>& team, unsigned k, unsigned end,
                                         int (&next)[kEdges]) {
  Flight f;
  f.there = 0;
#pragma unroll
  for (int j = 0; j < kEdges; ++j) {
    f.there += k + j * team.groups() < end;
    f.row[j] = e.rows + next[j] * e.ld;
  }
  look_ahead(e, team, k + kEdges * team.groups(), end, next);
  return f;
}

// The first entry of this lane's warp; the group's is group_of_warp further. All lanes of a warp walk alike.
template <int kWarps>
__device__ __forceinline__ unsigned first_entry(const Team<kWarps>& team, unsigned begin) {
  return begin + team.warp() * (32 / team.lanes);
}

__device__ __forceinline__ int group_of_warp(int lanes) { return (int)threadIdx.x % 32 / lanes; }

// Sums of all lanes of a head, in each of them; of all edges in flight side by side.
__device__ __forceinline__ void sum_heads(const Heads& w, real_t (&x)[kEdges]) {
  for (int step = w.lanes / 2; step; step /= 2)
#pragma unroll
    for (int j = 0; j < kEdges; ++j) x[j] += __shfl_xor_sync(kFullWarp, x[j], step);
}

// A lane's part of the product of its head of x and y, whose rows these are: read again where a head has several tiles.
__device__ __forceinline__ real_t product(const Heads& w, const Place& at, const Pieces& x, const Pieces& y,
                                          const storage_t* row_x, const storage_t* row_y) {
  real_t sum = 0;
  if constexpr (kWide) {
    for (int c = (int)threadIdx.x % 32 + at.head * w.cols; c < (at.head + 1) * w.cols; c += 32)
      sum += widen(row_x[c]) * widen(row_y[c]);
  } else {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      real_t part = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) part += x[p][i] * y[p][i];
      sum += at.live[p] ? part : (real_t)0;
    }
  }
  return sum;
}

// x += y.
__device__ __forceinline__ void add_pieces(Pieces& x, const Pieces& y) {
#pragma unroll
  for (int i = 0; i < kPieces * kVector; ++i) x[i / kVector][i % kVector] += y[i / kVector][i % kVector];
}

// A lane's part of GATv2's score of its head: of a and LeakyReLU(q), with q the sum of two rows.
__device__ __forceinline__ real_t score(const Heads& w, const Place& at, const Pieces& a, const Pieces& q,
                                        const storage_t* row_x, const storage_t* row_y) {
  real_t sum = 0;
  if constexpr (kWide) {
    for (int c = (int)threadIdx.x % 32 + at.head * w.cols; c < (at.head + 1) * w.cols; c += 32) {
      const real_t each = widen(row_x[c]) + widen(row_y[c]);
      sum += w.a[c] * (each > 0 ? each : w.slope * each);
    }
  } else {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      real_t part = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) part += a[p][i] * (q[p][i] > 0 ? q[p][i] : w.slope * q[p][i]);
      sum += at.live[p] ? part : (real_t)0;
    }
  }
  return sum;
}

// Bit j: whether dropout keeps the weight of edge j of the lane's head. `column` of the rows in flight has the numbers
// of their vertices, `mine` is the row's. A head's lanes, which are kEdges or more, share the edges among them.
__device__ __forceinline__ unsigned kept_weights(const Heads& w, const Place& at, const Flight& f, int column,
                                                 long long mine, bool to_source) {
  const int lane = (int)threadIdx.x % 32, own = lane % kEdges, head = w.first + at.head;
  const storage_t* row = f.row[0];
#pragma unroll
  for (int j = 1; j < kEdges; ++j) row = own == j ? f.row[j] : row;
  const long long other = (long long)number_of(row[column]);
  const long long source = to_source ? mine : other, destination = to_source ? other : mine;
  const long long both = (long long)((unsigned long long)(unsigned)destination << 32 | (unsigned)source);
  const int found = kept(philox(w.dropout, both, (unsigned)head / 8), head, w.dropout.threshold);
  unsigned all = 0;
#pragma unroll
  for (int j = 0; j < kEdges; ++j) all |= (unsigned)__shfl_sync(kFullWarp, found, lane - own + j) << j;
  return all;
}

// The factor of dropout of edge j, from kept_weights.
__device__ __forceinline__ real_t factor(const Heads& w, unsigned kept, int j) {
  return !kDrops ? (real_t)1 : kept >> j & 1u ? (real_t)w.dropout.keep_scale : (real_t)0;
}

// A weight of entry k times its parallel edges; counts null: as it is, to the bit.
__device__ __forceinline__ real_t times(const real_t* counts, unsigned k, real_t weight) {
  return counts ? weight * counts[k] : weight;
}
