// What the passes over edges share: edges grouped by one of their ends, operands of vertices and edges, column tiles.
// Rows are the destinations (place == null), whose entry k is edge k; or the sources, whose entry k is the edge at
// place place[k] of its destination's row. Operands of edges have their rows in that order, or at edge_ids of it if
// given.
#pragma once
#include "common.h"

// What runs for every edge must not be a call: its tile would go through memory.
#define MGGCN_INLINE inline __attribute__((always_inline))

namespace {

struct EdgeRows {
  int64_t num_chunks;
  const int64_t* chunks;    // [num_chunks + 1] rows of about equal work, handed out dynamically
  const int64_t* indptr;    // [rows + 1]
  const int32_t* ends;      // [E] the other end of each entry
  const int32_t* place;     // [E] or null
  const int64_t* starts;    // [N + 1] indptr of the destinations' rows, if place is given
  const int32_t* edge_ids;  // [E] or null
};

enum Of : int32_t { kSource = 0, kDestination = 1, kEdge = 2 };

template <class T>
struct Operand {
  const T* rows;  // row-major, rows of ld
  int64_t ld;
  int32_t of;      // Of: whose row an edge reads
  int32_t narrow;  // one column that stands for all
};

MGGCN_INLINE int64_t destination_of(const EdgeRows& r, int64_t row, int64_t k) { return r.place ? r.ends[k] : row; }

MGGCN_INLINE int64_t place_of(const EdgeRows& r, int64_t row, int64_t k) {
  return r.place ? r.place[k] : k - r.indptr[row];
}

MGGCN_INLINE int64_t edge_id_of(const EdgeRows& r, int64_t k) {
  const int64_t e = r.place ? r.starts[r.ends[k]] + r.place[k] : k;
  return r.edge_ids ? r.edge_ids[e] : e;
}

// The row of an operand that entry k of a row reads.
template <class T>
MGGCN_INLINE const T* operand_row(const Operand<T>& x, const EdgeRows& r, int64_t row, int64_t k) {
  const int64_t i = x.of == kEdge ? edge_id_of(r, k) : (x.of == kSource) == (r.place == nullptr) ? r.ends[k] : row;
  return x.rows + i * x.ld;
}

// Lanes: how columns are taken, a vector or one at a time; `flags` are what a comparison gives, as wide as a lane.
template <class T>
struct VectorLanes : Vector<T> {
  static constexpr int width = Vector<T>::width;
  typedef typename Vector<T>::type type;
  typedef decltype(type{} < type{}) flags;
  typedef int32_t places __attribute__((vector_size(4 * width)));
  typedef int32_t loose_places __attribute__((vector_size(4 * width), aligned(4), may_alias));
  static MGGCN_INLINE flags spread(int32_t place) { return flags{} + place; }
  static MGGCN_INLINE flags load_places(const int32_t* p) {
    return __builtin_convertvector((places) * reinterpret_cast<const loose_places*>(p), flags);
  }
  static MGGCN_INLINE void store_places(int32_t* p, flags v) {
    *reinterpret_cast<loose_places*>(p) = __builtin_convertvector(v, places);
  }
  static MGGCN_INLINE T sum(type v) {
    T total = 0;
    for (int i = 0; i < width; ++i) total += v[i];
    return total;
  }
};

template <class T>
struct OneLane {
  static constexpr int width = 1;
  typedef T type;
  typedef int32_t flags;
  static MGGCN_INLINE T load(const T* p) { return *p; }
  static MGGCN_INLINE void store(T* p, T v) { *p = v; }
  static MGGCN_INLINE T fill(T x) { return x; }
  static MGGCN_INLINE int32_t spread(int32_t place) { return place; }
  static MGGCN_INLINE int32_t load_places(const int32_t* p) { return *p; }
  static MGGCN_INLINE void store_places(int32_t* p, int32_t v) { *p = v; }
  static MGGCN_INLINE T sum(T v) { return v; }
};

// x[0 .. K) = the lanes of an operand's row from `column` on.
template <class L, int K, class T>
MGGCN_INLINE void load_tile(const T* row, bool narrow, int64_t column, typename L::type (&x)[K]) {
  if (narrow) {
    const typename L::type one = L::fill(*row);
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) x[i] = one;
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) x[i] = L::load(row + column + i * L::width);
  }
}

// Calls tile(lanes, count, first column) for tiles that cover the columns: four vectors, one, four columns, one.
template <class T, class Tile>
inline void for_tiles(int64_t cols, const Tile& tile) {
  constexpr int width = VectorLanes<T>::width;
  int64_t column = 0;
  for (; cols - column >= 4 * width; column += 4 * width) tile.template run<VectorLanes<T>, 4>(column);
  for (; cols - column >= width; column += width) tile.template run<VectorLanes<T>, 1>(column);
  for (; cols - column >= 4; column += 4) tile.template run<OneLane<T>, 4>(column);
  for (; column < cols; ++column) tile.template run<OneLane<T>, 1>(column);
}

}  // namespace
