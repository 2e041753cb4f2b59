// What the passes over edges share: edges grouped by one of their ends, and operands.
// Rows are the destinations (place == null), whose entry k is edge k; or the sources, whose entry k is the edge at
// place place[k] of its destination's row. Operands of edges have their rows in that order, or at edge_ids of it if
// given. Twin: cpu/edges.h.
#pragma once
#include "columns.cuh"
#include "teams.cuh"

enum Of { kSource = 0, kDestination = 1, kEdge = 2 };

struct EdgeRows {
  const long long* indptr;  // [rows + 1]
  const int* ends;          // [E] the other end of each entry
  const int* place;         // [E] or null
  const long long* starts;  // [N + 1] indptr of the destinations' rows, if place is given
  const int* edge_ids;      // [E] or null
};

struct Operand {
  const storage_t* rows;
  long long ld;
  int of;      // Of: whose row an edge reads
  int narrow;  // one column that stands for all
};

__device__ __forceinline__ long long edge_id_of(const EdgeRows& r, long long k) {
  const long long e = r.place ? r.starts[r.ends[k]] + r.place[k] : k;
  return r.edge_ids ? r.edge_ids[e] : e;
}

// x = the columns from `column` on of the row of an operand that entry k of a row reads; 0 beyond the last.
__device__ __forceinline__ void load_operand(const Operand& o, const EdgeRows& r, long long row, long long k,
                                             int column, int cols, real_t (&x)[kVector]) {
  const long long i = o.of == kEdge ? edge_id_of(r, k) : (o.of == kSource) == (r.place == nullptr) ? r.ends[k] : row;
  const storage_t* p = o.rows + i * o.ld;
  if (!o.narrow) {
    load_columns<kVector>(p + column, cols - column, rows_aligned(o.rows, o.ld), x);
    return;
  }
  const real_t one = widen(*p);
#pragma unroll
  for (int d = 0; d < kVector; ++d) x[d] = one;
}
