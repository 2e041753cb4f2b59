// stream  one pass over the rows of a graph: every vertex goes to one of P parts, for good, when its row comes.
//         It goes to the part of the highest score: entries that lead to vertices of that part, less penalty *
//         sqrt(load of the part / per_vertex), of those that stay within `limit`; if none does, to the least loaded.
//         Equal scores: the least loaded, then the first. A vertex loads a part with per_row + its entries.
// in      Chunk: rows of A, and of A^T if it is another matrix; in order, from the first vertex on
// in/out  owner uint16 [N], kNone where a row has not come yet; load int64 [P], 0 at first; scratch: count int64 [P] of
//         zeros, cost double [P] of zeros, met uint16 [P]
// Cost    a read of the owner for each entry, and of P loads for each vertex that the least loaded part takes. One
//         thread: a vertex's part depends on all before it. Every instruction set gives the same bits.
// Source  Fennel: Tsourakakis et al., WSDM 2014, with gamma 1.5.
#include <cmath>
#include <cstdint>

#include "common.h"
#include "locality.h"

namespace {

constexpr uint16_t kNone = 0xFFFF;

struct Stream {
  uint16_t* owner;
  int64_t* load;
  int64_t* count;
  double* cost;
  uint16_t* met;
  int64_t num_parts, per_row, limit;
  double penalty, per_vertex;
};

inline int64_t least_loaded(const Stream& s) {
  int64_t least = 0;
  for (int64_t p = 1; p < s.num_parts; ++p)
    if (s.load[p] < s.load[least]) least = p;
  return least;
}

// Whether part p comes before part q for a vertex that both have room for.
inline bool better(const Stream& s, int64_t p, int64_t q) {
  const double here = (double)s.count[p] - s.cost[p], there = (double)s.count[q] - s.cost[q];
  if (here != there) return here > there;
  return s.load[p] != s.load[q] ? s.load[p] < s.load[q] : p < q;
}

}  // namespace

MGGCN_EXPORT(mggcn_stream)(const Chunk* chunk, Stream* stream) {
  const Stream s = *stream;
  int64_t least = least_loaded(s);
  for (int64_t i = 0; i < chunk->num_rows; ++i) {
    const int64_t v = chunk->first_row + i;
    int64_t num = 0;
    chunk->each(i, 1, [&](int32_t u) {
      const uint16_t p = s.owner[u];
      if (p == kNone) return;
      if (s.count[p]++ == 0) s.met[num++] = p;
    });
    const int64_t weight = s.per_row + chunk->entries(i);
    // Of the parts without neighbours the least loaded is the best one; where it is full, all are.
    int64_t best = least;
    for (int64_t k = 0; k < num; ++k)
      if (s.load[s.met[k]] + weight <= s.limit && better(s, s.met[k], best)) best = s.met[k];
    for (int64_t k = 0; k < num; ++k) s.count[s.met[k]] = 0;
    s.owner[v] = (uint16_t)best;
    s.load[best] += weight;
    s.cost[best] = s.penalty * std::sqrt((double)s.load[best] / s.per_vertex);
    if (best == least) least = least_loaded(s);
  }
}
