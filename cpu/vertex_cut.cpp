// What a vertex cut says of vertices and stored edges, once its edges have parts. N vertices, M cut edges, P parts.
// parts uint64 [N, W], W = ceil(P / 64): bit p of row v says that v lies in part p; owner uint16 [N].
// cut_roots       owner[v] = one of v's parts, drawn by (seed, v). rows[p] += vertices in p; totals += {vertices with
//                 parts, their parts, vertices with two parts or more}. Cost: one pass over N W words.
// cut_isolated    vertices without parts: bounds[p] .. bounds[p + 1] of them, drawn by the seed, go to part p.
// cut_edge_parts  the part of every entry of a chunk of rows, in the store's order; a self-loop lies with its owner.
//                 edge_part [M] by cut edge, start int64 [N + 1] of its rows. kRows: rows of the matrix that was cut;
//                 kSymmetric: the same, of which the upper triangle was cut; kTransposed: rows of its transpose. The
//                 last two find the entries of other rows by moving start[] on: rows must come once each, in order.
#include <algorithm>
#include <cstdint>

#include "common.h"
#include "shuffle.h"

namespace {

enum Matrix : int32_t { kRows = 0, kSymmetric = 1, kTransposed = 2 };
constexpr int64_t kAhead = 16;  // entries between a prefetch and the next use

struct Rows {
  const int64_t* indptr;
  const int32_t* indices;
  int64_t first_row, num_rows;
};

template <class Part>
void edge_parts(const Rows& rows, int32_t matrix, int64_t* start, const Part* edge_part, const uint16_t* owner,
                Part* out) {
  const int64_t nnz = rows.indptr[rows.num_rows];
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const int64_t v = rows.first_row + i;
    int64_t own = start[v];
    for (int64_t e = rows.indptr[i]; e < rows.indptr[i + 1]; ++e) {
      if (matrix != kRows) {
        if (e + 2 * kAhead < nnz) __builtin_prefetch(start + rows.indices[e + 2 * kAhead], 1);
        if (e + kAhead < nnz) __builtin_prefetch(edge_part + start[rows.indices[e + kAhead]]);
      }
      const int32_t u = rows.indices[e];
      if (u == v)
        out[e] = (Part)owner[v];
      else if (matrix == kRows || (matrix == kSymmetric && u > v))
        out[e] = edge_part[own++];
      else
        out[e] = edge_part[start[u]++];
    }
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_cut_roots)(const uint64_t* parts, int64_t num_vertices, int32_t words, uint64_t seed,
                              uint16_t* owner, int64_t* rows, int64_t* totals) {
  const uint64_t key = stream(seed, 2);
  for (int64_t v = 0; v < num_vertices; ++v) {
    const uint64_t* mine = parts + v * words;
    int64_t count = 0;
    for (int32_t w = 0; w < words; ++w) count += __builtin_popcountll(mine[w]);
    if (!count) continue;
    int64_t left = (int64_t)(((unsigned __int128)hash64(key + v) * count) >> 64);
    for (int32_t w = 0; w < words; ++w)
      for (uint64_t set = mine[w]; set; set &= set - 1, --left) {
        const int p = 64 * w + __builtin_ctzll(set);
        rows[p] += 1;
        if (left == 0) owner[v] = (uint16_t)p;
      }
    totals[0] += 1;
    totals[1] += count;
    totals[2] += count > 1;
  }
}

MGGCN_EXPORT(mggcn_cut_isolated)(uint64_t* parts, int64_t num_vertices, int32_t words, const int64_t* bounds,
                                 int32_t num_parts, uint64_t seed, uint16_t* owner) {
  const uint64_t count = bounds[num_parts];
  const Shuffle shuffle(count, stream(seed, 3));
  uint64_t next = 0;
  for (int64_t v = 0; v < num_vertices; ++v) {
    uint64_t any = 0;
    for (int32_t w = 0; w < words; ++w) any |= parts[v * words + w];
    if (any) continue;
    uint64_t place = shuffle(next++);
    while (place >= count) place = shuffle(place);
    const int64_t p = std::upper_bound(bounds, bounds + num_parts + 1, (int64_t)place) - bounds - 1;
    owner[v] = (uint16_t)p;
    parts[v * words + p / 64] |= (uint64_t)1 << (p % 64);
  }
}

MGGCN_EXPORT(mggcn_cut_edge_parts)(const int64_t* indptr, const int32_t* indices, int64_t first_row, int64_t num_rows,
                                   int32_t matrix, int64_t* start, const void* edge_part, int32_t wide,
                                   const uint16_t* owner, void* out) {
  const Rows rows{indptr, indices, first_row, num_rows};
  if (wide)
    edge_parts(rows, matrix, start, static_cast<const uint16_t*>(edge_part), owner, static_cast<uint16_t*>(out));
  else
    edge_parts(rows, matrix, start, static_cast<const uint8_t*>(edge_part), owner, static_cast<uint8_t*>(out));
}
