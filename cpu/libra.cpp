// Libra (Xie et al. 2014; DistGNN, section 5.1): the edges are dealt to P parts in one pass. N vertices, M cut edges.
// libra_edges   one chunk of rows of a CSR -> cut edges: every {u, v} once (v > u) if symmetric, else every entry; no
//               self-loops. start int64 [N + 1], dst int32 [M], degree uint32 [N], row_at int32: row of edge 16 j.
// libra_assign  positions [first, last) of the order: at each lies edge k = position or, if shuffled, shuffle(position)
//               (none if k >= M). {u, v} goes to the least loaded of: the parts that u and v share; else the parts of
//               the end with fewer edges; else the parts of the one end that has any; else all. A part with `limit`
//               edges takes no more, and counts nowhere. Equal loads and degrees: drawn by (seed, k). typed: parallel
//               edges, which lie side by side, go where the first of them goes.
//               parts uint64 [N, W]: bit p of row v says that v lies in part p. W = ceil(P / 64), P <= 1024.
// Cost: about 6 cache misses an edge (edge, row, both degrees, both sets), started up to kBatch edges ahead of use.
#include <algorithm>
#include <cstdint>

#include "common.h"
#include "shuffle.h"

namespace {

constexpr int kBatch = 128, kTieBits = 10;  // P <= 2^kTieBits
constexpr int kRowStep = 16;                // edges between two entries of row_at; 64: a quarter slower (cnr_2000)

struct CutEdges {
  int64_t* start;
  int32_t* dst;
  int32_t* row_at;
  uint32_t* degree;
  int64_t num_edges, num_loops;  // so far
};

struct Libra {
  const int64_t* start;
  const int32_t* dst;
  const int32_t* row_at;
  const uint32_t* degree;
  uint64_t* parts;
  void* edge_part;  // [M] uint8, or uint16 if wide
  int64_t* load;    // [P] edges of each part
  uint64_t* open;   // [W] parts with fewer than `limit` edges
  int64_t num_edges, limit;
  uint64_t seed;
  int32_t words, wide, shuffled, typed;
};

// The last row that starts at k or before: a search without branches to guess.
inline int64_t row_of(const Libra& s, int64_t k) {
  const int32_t* at = s.row_at + k / kRowStep;
  const int64_t* base = s.start + at[0] + 1;
  for (int64_t left = at[1] - at[0]; left > 0;) {
    const int64_t half = (left + 1) / 2;
    base += half & -(int64_t)(base[half - 1] <= k);
    left -= half;
  }
  return base - s.start - 1;
}

// The part for an edge with ends of part sets a and b, `lower_a` if a's end has fewer edges. Parts of equal load are
// ordered by number xor `tie`: any two of them win equally often.
template <int kWords>
inline int64_t choose(const Libra& s, const uint64_t* a, const uint64_t* b, bool lower_a, uint64_t tie) {
  const int words = kWords ? kWords : s.words;
  uint64_t in_a = 0, in_b = 0, in_both = 0;
  for (int w = 0; w < words; ++w) {
    in_a |= a[w] & s.open[w];
    in_b |= b[w] & s.open[w];
    in_both |= a[w] & b[w] & s.open[w];
  }
  const bool take_a = !in_b || (in_a && lower_a);
  int64_t best = INT64_MAX;
  for (int w = 0; w < words; ++w) {
    uint64_t set = s.open[w];
    if (in_both)
      set &= a[w] & b[w];
    else if (in_a || in_b)
      set &= take_a ? a[w] : b[w];
    for (; set; set &= set - 1) {
      const uint64_t p = 64 * w + __builtin_ctzll(set);
      best = std::min(best, (int64_t)((uint64_t)s.load[p] << kTieBits | (p ^ tie)));
    }
  }
  return (best & ((1 << kTieBits) - 1)) ^ (int64_t)tie;
}

template <int kWords, class Part>
void assign_batch(const Libra& s, const int64_t* edges, int count, uint64_t key) {
  const int words = kWords ? kWords : s.words;
  Part* edge_part = static_cast<Part*>(s.edge_part);
  int64_t u[kBatch], v[kBatch];
  for (int i = 0; i < count; ++i) __builtin_prefetch(s.start + s.row_at[edges[i] / kRowStep]);
  for (int i = 0; i < count; ++i) {
    u[i] = row_of(s, edges[i]);
    v[i] = s.dst[edges[i]];
    for (const int64_t x : {u[i], v[i]}) {
      __builtin_prefetch(s.degree + x);
      for (int w = 0; w < words; w += 8) __builtin_prefetch(s.parts + x * words + w, 1);
    }
  }
  for (int i = 0; i < count; ++i) {
    if (s.typed && edges[i] > s.start[u[i]] && s.dst[edges[i] - 1] == v[i]) continue;
    const uint64_t drawn = hash64(key + edges[i]);
    uint64_t *a = s.parts + u[i] * words, *b = s.parts + v[i] * words;
    const uint32_t degree_a = s.degree[u[i]], degree_b = s.degree[v[i]];
    const bool lower_a = degree_a != degree_b ? degree_a < degree_b : drawn >> 63;
    const int64_t p = choose<kWords>(s, a, b, lower_a, drawn & ((1 << kTieBits) - 1));
    const uint64_t bit = (uint64_t)1 << (p % 64);
    a[p / 64] |= bit;
    b[p / 64] |= bit;
    int64_t k = edges[i];
    do {
      edge_part[k] = (Part)p;
      ++s.load[p];
    } while (s.typed && ++k < s.start[u[i] + 1] && s.dst[k] == v[i]);
    if (s.load[p] >= s.limit) s.open[p / 64] &= ~bit;
  }
}

template <int kWords, class Part>
void assign(const Libra& s, int64_t first, int64_t last) {
  const Shuffle shuffle(s.num_edges, stream(s.seed, 0));
  const uint64_t key = stream(s.seed, 1);
  int64_t edges[kBatch];
  int count = 0;
  for (int64_t position = first; position < last; ++position) {
    const int64_t k = s.shuffled ? (int64_t)shuffle(position) : position;
    edges[count] = k;
    __builtin_prefetch(s.dst + k);
    __builtin_prefetch(s.row_at + k / kRowStep);
    __builtin_prefetch(static_cast<Part*>(s.edge_part) + k, 1);
    count += k < s.num_edges;
    if (count < kBatch) continue;
    assign_batch<kWords, Part>(s, edges, count, key);
    count = 0;
  }
  assign_batch<kWords, Part>(s, edges, count, key);
}

}  // namespace

MGGCN_EXPORT(mggcn_libra_edges)(const int64_t* indptr, const int32_t* indices, int64_t first_row, int64_t num_rows,
                                int32_t symmetric, CutEdges* out) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t u = first_row + i;
    for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e) {
      const int32_t v = indices[e];
      out->num_loops += v == u;
      if (v == u) continue;
      out->degree[u] += 1;
      if (!symmetric) out->degree[v] += 1;
      if (symmetric && v < u) continue;
      if (out->num_edges % kRowStep == 0) out->row_at[out->num_edges / kRowStep] = (int32_t)u;
      out->dst[out->num_edges++] = v;
    }
    out->start[u + 1] = out->num_edges;
  }
}

MGGCN_EXPORT(mggcn_libra_assign)(const Libra* s, int64_t first, int64_t last) {
  if (s->words == 1)
    assign<1, uint8_t>(*s, first, last);
  else if (!s->wide)
    assign<0, uint8_t>(*s, first, last);
  else
    assign<0, uint16_t>(*s, first, last);
}
