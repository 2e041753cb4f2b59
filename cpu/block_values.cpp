// What the drawn in-edges of a block count (feed/edge_values.py): for each entry e of row t
//   value[e] = weight[place[e]] draw[e] f_t, with f_t = degree_t / (sum of the row's draw) if normalised, else 1.
// degree_t counts the vertex's stored in-edges that may be drawn. Drawn by weight, an edge's weight is in its chance:
// value has no weight (where a whole row was taken, draw is the weight), and degree_t is the sum of weights. An own
// entry (column t of row t, under self-loops) is never drawn: its value is its weight, or 1 if it was inserted (place
// -1). No weights: all are 1. Then values_t[i] = value[order[i]], if there is an order. Moves: T rows and E entries
// once, a random line of the store for each weight; drawn by weight, whole rows. Degrees are those that the sampler has
// found: from the store, they took as long as drawing.
#include "common.h"

namespace {

struct BlockValues {
  const int64_t *store_indptr, *ids, *indptr, *place;
  const int32_t *store_indices, *indices;
  const float *weights, *draw;  // or null: all are 1
  const int32_t *degrees, *order;
  void* values_t;
  int64_t rows;
  int32_t self_loops, normalised, by_weight;
};

// Number, or sum of weights, of the in-edges of row t that may be drawn.
inline double degree_of(const BlockValues& b, int64_t t) {
  if (!b.by_weight) return b.degrees[t];
  const int64_t v = b.ids[t], first = b.store_indptr[v], last = b.store_indptr[v + 1];
  double degree = 0;  // in the order of the drawn ones: of a whole row both sums have the same bits
  for (int64_t e = first; e < last; ++e)
    if (!(b.self_loops && b.store_indices[e] == v)) degree += b.weights[e];
  return degree;
}

template <class T>
void block_values(const BlockValues& b, T* out) {
  for (int64_t t = 0; t < b.rows; ++t) {
    const int64_t first = b.indptr[t], last = b.indptr[t + 1];
    double drawn = 0;
    for (int64_t e = first; e < last; ++e)
      if (!(b.self_loops && b.indices[e] == t)) drawn += b.draw ? b.draw[e] : 1;
    const double factor = b.normalised && drawn > 0 ? degree_of(b, t) / drawn : 1;
    for (int64_t e = first; e < last; ++e) {
      const bool own = b.self_loops && b.indices[e] == t;
      const double weight = b.weights && b.place[e] >= 0 && (own || !b.by_weight) ? b.weights[b.place[e]] : 1;
      out[e] = (T)(own ? weight : weight * (b.draw ? b.draw[e] : 1) * factor);
    }
  }
  T* values_t = static_cast<T*>(b.values_t);
  for (int64_t i = 0; b.order && i < b.indptr[b.rows]; ++i) values_t[i] = out[b.order[i]];
}

}  // namespace

MGGCN_EXPORT(mggcn_block_values_f32)(const BlockValues* b, float* out) { block_values(*b, out); }
MGGCN_EXPORT(mggcn_block_values_f64)(const BlockValues* b, double* out) { block_values(*b, out); }
