// The rows of a hop: where they lie in the store, which of their edges are never drawn, and where drawn ones go.
#pragma once
#include <algorithm>

#include "draws.h"
#include "frontier.h"

namespace {

// How a hop's neighbours are chosen; `Mode` of mggcn/blocks/sampler.py.
enum Mode : int32_t { kUniform, kReplace, kWeight, kLaborHop, kLaborOne };

struct Candidate {  // of a weighted draw: the smallest keys are drawn
  double key;
  uint32_t place;
  bool operator<(const Candidate& other) const { return key != other.key ? key < other.key : place < other.place; }
};

struct TypeDraw {  // what is drawn of one type of edges of a row
  uint32_t degree, seen, taken, next;
  int64_t fanout, first;  // first: where its picks begin
};

struct Sample {
  // The store, read in place: indptr [num_vertices + 1], indices [num_edges], and weights and one of the types where
  // used.
  const int64_t* indptr;
  const int32_t* indices;
  const float* weights;
  const uint8_t* types8;
  const uint16_t* types16;
  const int64_t* left_out;  // [num_left_out] target << 32 | source, ascending
  Frontier* frontier;
  // Room for one row: [the fan-outs' sum], [a power of two, twice the largest fan-out at least], [num_types].
  Candidate* picks;
  uint32_t* seen;
  TypeDraw* types;
  // The block: indptr_out [rows + 1], the others [edges]; places (-1: an own entry that the store lacks) and values may
  // be null. Transposed: indptr_t [sources + 1], the others [edges].
  int64_t* indptr_out;
  int32_t* columns;
  int64_t* places;
  float* values;
  int64_t* indptr_t;
  int32_t *indices_t, *order;
  int32_t* degrees;       // [rows] stored entries of each but its own: those that may be drawn, or are left out
  const uint16_t* owner;  // [num_vertices] the rank of each vertex, or null: rows of others than `rank` draw nothing
  int64_t num_edges, num_left_out, max_sources, max_edges, rows, sources, edges, at;
  int64_t first_leaf;  // the rows before it, the seeds, are drawn around whoever owns them
  DrawKey key;
  int32_t num_types, mode, self_loops, status, rank;
};

struct Row {
  int64_t start;
  uint32_t id, stored;     // entries in the store
  uint32_t own, own_span;  // where entries of the vertex itself are, or would be; these are never drawn (self_loops)
  uint32_t degree;         // entries that may be drawn
  const int64_t *left_out, *left_out_end;
};

inline bool whole(const Row& r) { return r.degree == r.stored; }

// Calls segment(lo, hi) for each stretch of entries that may be drawn, and own() where the own entry belongs, in order.
template <class Segment, class Own>
inline void walk(const Sample& s, const Row& r, Segment segment, Own own) {
  const int32_t* row = s.indices + r.start;
  uint32_t at = 0;
  bool owes = s.self_loops;
  const auto pay = [&] {
    segment(at, r.own);
    own();
    at = r.own + r.own_span;
    owes = false;
  };
  for (const int64_t* pair = r.left_out; pair != r.left_out_end; ++pair) {
    const int32_t source = (int32_t)*pair;
    if (s.self_loops && source == (int32_t)r.id) continue;
    if (owes && source > (int32_t)r.id) pay();
    const uint32_t lo = (uint32_t)(std::lower_bound(row + at, row + r.stored, source) - row);
    uint32_t hi = lo;
    while (hi < r.stored && row[hi] == source) ++hi;
    if (hi == lo) continue;
    segment(at, lo);
    at = hi;
  }
  if (owes) pay();
  segment(at, r.stored);
}

constexpr int kRows = 64;  // rows that are looked up together

// Where the vertices themselves stand in their rows: a binary search in all rows at once, whose reads do not wait for
// each other.
inline void find_own(const Sample& s, Row* rows, int count) {
  uint32_t left[kRows], most = 0;
  for (int i = 0; i < count; ++i) {
    rows[i].own = 0;
    left[i] = rows[i].stored;
    most = std::max(most, left[i]);
  }
  for (; most; most /= 2)
    for (int i = 0; i < count; ++i) {
      if (!left[i]) continue;
      const uint32_t half = left[i] / 2;
      const bool less = s.indices[rows[i].start + rows[i].own + half] < (int32_t)rows[i].id;
      rows[i].own += less ? half + 1 : 0;
      left[i] = less ? left[i] - half - 1 : half;
    }
  for (int i = 0; i < count; ++i) {
    Row& r = rows[i];
    while (r.own + r.own_span < r.stored && s.indices[r.start + r.own + r.own_span] == (int32_t)r.id) ++r.own_span;
    r.degree -= r.own_span;
  }
}

// Look up rows first .. first + count - 1 of the hop. False for row pointers that cannot be: the store is damaged.
inline bool look_up(Sample& s, int64_t first, int count, Row* rows) {
  constexpr int64_t kAhead = 24, kMost = (int64_t)1 << 31;
  const int64_t* ids = s.frontier->ids;
  for (int i = 0; i < count; ++i) {
    __builtin_prefetch(s.indptr + ids[std::min(first + i + kAhead, s.rows - 1)]);
    const int64_t v = ids[first + i], start = s.indptr[v], stop = s.indptr[v + 1];
    if (start < 0 || stop < start || stop > s.num_edges || stop - start >= kMost) {
      s.status = kPointers;
      s.at = v;
      return false;
    }
    const bool leaf = s.owner && first + i >= s.first_leaf && s.owner[v] != s.rank;
    const uint32_t stored = leaf ? 0 : (uint32_t)(stop - start);
    rows[i] = Row{start, (uint32_t)v, stored, 0, 0, stored, nullptr, nullptr};
  }
  if (s.self_loops) find_own(s, rows, count);
  for (int i = 0; i < count; ++i) s.degrees[first + i] = (int32_t)rows[i].degree;
  for (int i = 0; i < count && s.num_left_out; ++i) {
    Row& r = rows[i];
    const int64_t* end = s.left_out + s.num_left_out;
    r.left_out = std::lower_bound(s.left_out, end, (int64_t)r.id << 32);
    r.left_out_end = r.left_out;
    while (r.left_out_end != end && *r.left_out_end >> 32 == r.id) ++r.left_out_end;
    if (r.left_out == r.left_out_end) continue;
    r.degree = 0;
    walk(s, r, [&](uint32_t lo, uint32_t hi) { r.degree += hi - lo; }, [] {});
  }
  return true;
}

// The drawn edges: places are collected and prefetched, their neighbours read together: many reads are in flight.
class Drawn {
 public:
  explicit Drawn(Sample& s) : s_(s) {}

  int64_t count() const { return read_ + waiting_; }

  // An entry at a place of the store; -1 - id: an own entry that the store lacks.
  inline void put(int64_t place, float value) {
    if (place >= 0) __builtin_prefetch(s_.indices + place);
    put_if(true, place, value);
  }
  // No branch depends on `wanted`, but in a full block.
  inline void put_if(bool wanted, int64_t place, float value) {
    if (count() == s_.max_edges) {
      if (wanted) s_.status = kEdges;
      return;
    }
    if (waiting_ == kWaiting) read();
    place_[waiting_] = place;
    if (s_.values) s_.values[count()] = value;
    waiting_ += wanted;
  }
  // The entries at start + ranks[k stride], k < taken <= kWaiting, without values: what most batches are made of.
  inline void put_row(int64_t start, const uint32_t* ranks, int stride, int taken) {
    if (count() + taken > s_.max_edges) {
      s_.status = kEdges;
      return;
    }
    if (waiting_ + taken > kWaiting) read();
    for (int k = 0; k < taken; ++k) {
      place_[waiting_ + k] = start + ranks[k * stride];
      __builtin_prefetch(s_.indices + place_[waiting_ + k]);
    }
    waiting_ += taken;
  }
  void read() {
    for (int i = 0; i < waiting_; ++i)
      s_.columns[read_ + i] = (int32_t)(place_[i] < 0 ? -1 - place_[i] : s_.indices[place_[i]]);
    for (int i = 0; i < waiting_ && s_.places; ++i) s_.places[read_ + i] = std::max(place_[i], (int64_t)-1);
    read_ += waiting_;
    waiting_ = 0;
  }

 private:
  static constexpr int kWaiting = 256;  // a few hundred lines: they stay in the first cache
  Sample& s_;
  int64_t read_ = 0, place_[kWaiting];
  int waiting_ = 0;
};

// All entries of the vertex itself: of a graph that keeps repeated edges these may be several.
inline void put_own(Drawn& out, const Row& r) {
  if (!r.own_span) return out.put(-1 - (int64_t)r.id, 1.0f);
  for (uint32_t e = 0; e < r.own_span; ++e) out.put(r.start + r.own + e, 1.0f);
}

// Put the edges that stand at the ascending ranks (ranks[i stride], i < taken) among those that may be drawn; equal
// ranks are one edge, whose value is their count.
inline void put_ranks(const Sample& s, Drawn& out, const Row& r, const uint32_t* ranks, int stride, int64_t taken) {
  int64_t i = 0;
  uint32_t before = 0;
  const auto segment = [&](uint32_t lo, uint32_t hi) {
    const uint32_t end = before + hi - lo;
    while (i < taken && ranks[i * stride] < end) {
      const uint32_t rank = ranks[i * stride];
      const int64_t first = i++;
      while (i < taken && ranks[i * stride] == rank) ++i;
      out.put(r.start + lo + (rank - before), (float)(i - first));
    }
    before = end;
  };
  if (!s.self_loops && whole(r))
    segment(0, r.stored);
  else
    walk(s, r, segment, [&] { put_own(out, r); });
}

}  // namespace
