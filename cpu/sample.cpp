// sample_batch: the hops of a batch, on one thread: its bits depend on nothing but the store, the draws' names and the
// seeds [count]. One call for all, as a caller that holds a lock (Python's) would wait for it after each.
// take_seeds  numbers a batch's first vertices: distinct, in 0 .. num_vertices - 1.
// draw_hop    draws in-neighbours of the first `rows` vertices of the frontier (Mode; fan-out -1: all of them), and
//             numbers the new ones behind those that are there, in order of first occurrence.
// transpose_hop  its transpose (transpose.h): entries of a column in order of the rows; order[i] is the place in
//             the hop of entry i. Of the first `transposed` hops.
// sample_rows     draws a hop around any rows, the first `rows` ids of the frontier: columns are ids, none is numbered.
// number_columns  numbers a hop that was drawn elsewhere: its targets, then the ids of its edges, in place.
// Arrays and the status are described in sample_rows.h: the frontier's is of the seeds, a hop's its own, and what ends
// a batch leaves later hops as they were. Nothing is written behind an end, nothing allocated. Bound: a line of indptr
// for a row; of indices (0.7) and of the table (0.3 to 1) for an edge (docs/notes/0034).
#include "sample_rows.h"
#include "transpose.h"

namespace {

constexpr int kLaneFanout = 64;  // Floyd on lanes costs f^2: above, rows are drawn one by one

inline uint32_t type_at(const Sample& s, int64_t place) {
  return s.types8 ? s.types8[place] : s.types16 ? s.types16[place] : 0;
}

// Calls each(type, entry) for every entry of a stretch. A type without a fan-out ends the hop.
template <class Each>
inline void each_entry(Sample& s, const Row& r, uint32_t lo, uint32_t hi, Each each) {
  for (uint32_t e = lo; e < hi; ++e) {
    const uint32_t type = type_at(s, r.start + e);
    if (type >= (uint32_t)s.num_types) {
      s.status = kType;
      s.at = r.start + e;
      return;
    }
    each(s.types[type], e);
  }
}

inline void count_types(Sample& s, const Row& r) {
  for (int t = 0; t < s.num_types; ++t) s.types[t].degree = s.types[t].seen = s.types[t].taken = s.types[t].next = 0;
  if (s.num_types == 1) {
    s.types[0].degree = r.degree;
    return;
  }
  walk(
      s, r, [&](uint32_t lo, uint32_t hi) { each_entry(s, r, lo, hi, [](TypeDraw& t, uint32_t) { ++t.degree; }); },
      [] {});
}

// The ranks that are drawn of one type, ascending, at the front of its picks.
inline void draw_ranks(const Sample& s, const Row& r, int type) {
  TypeDraw& t = s.types[type];
  const bool replace = s.mode == kReplace;
  const uint32_t f = (uint32_t)t.fanout;
  uint32_t* ranks = (uint32_t*)(s.picks + t.first);
  t.taken = replace ? (t.degree ? f : 0) : std::min(t.degree, f);
  if (!replace && t.degree <= f) {
    for (uint32_t k = 0; k < t.taken; ++k) ranks[k] = k;
    return;
  }
  RowWords words(s.key, r.id, (uint32_t)type);
  uint32_t size = 1;
  while (size < 2 * f) size *= 2;
  if (!replace) std::fill(s.seen, s.seen + size, ~0u);
  // Whether a number is drawn for the first time.
  const auto fresh = [&](uint32_t number) {
    for (uint32_t i = number * 0x9E3779B1u;; ++i) {
      uint32_t& entry = s.seen[i & (size - 1)];
      if (entry == number) return false;
      if (entry != ~0u) continue;
      entry = number;
      return true;
    }
  };
  for (uint32_t k = 0; k < t.taken; ++k) {
    const uint32_t last = t.degree - (replace ? 1 : f - k);
    ranks[k] = below(words[k], last + 1);
    if (replace || fresh(ranks[k])) continue;
    ranks[k] = last;  // Floyd's algorithm: never drawn before
    fresh(last);
  }
  std::sort(ranks, ranks + t.taken);
}

inline void uniform_row(Sample& s, Drawn& out, const Row& r) {
  count_types(s, r);
  for (int t = 0; t < s.num_types; ++t)
    if (s.types[t].fanout >= 0) draw_ranks(s, r, t);
  const TypeDraw& only = s.types[0];
  if (s.num_types == 1 && only.fanout >= 0)
    return put_ranks(s, out, r, (const uint32_t*)(s.picks + only.first), 1, only.taken);
  const auto put = [&](TypeDraw& t, uint32_t e) {
    const uint32_t rank = t.seen++, before = t.next;
    const uint32_t* ranks = (const uint32_t*)(s.picks + t.first);
    while (t.fanout >= 0 && t.next < t.taken && ranks[t.next] == rank) ++t.next;
    if (t.fanout < 0 || t.next > before) out.put(r.start + e, t.fanout < 0 ? 1.0f : (float)(t.next - before));
  };
  walk(s, r, [&](uint32_t lo, uint32_t hi) { each_entry(s, r, lo, hi, put); }, [&] { put_own(out, r); });
}

// A-ES (Efraimidis and Spirakis 2006) with exponential keys, word e for entry e of the row: the f smallest keys. The
// value of an edge is its weight where all of its row and type with a weight are taken (nothing is random), else 1.
inline void weighted_row(Sample& s, Drawn& out, const Row& r) {
  for (int t = 0; t < s.num_types; ++t) s.types[t].degree = s.types[t].taken = s.types[t].next = 0;
  RowWords words(s.key, r.id, 0);
  const auto offer = [&](TypeDraw& t, uint32_t e) {
    if (!t.fanout) return;
    const float weight = s.weights[r.start + e];
    if (!(weight >= 0.0f && weight < __builtin_inff())) {
      s.status = kWeightValue;
      s.at = r.start + e;
      return;
    }
    if (weight == 0.0f || t.fanout < 0) return;
    ++t.degree;
    Candidate* heap = s.picks + t.first;
    const Candidate mine{exponential(words[e]) / (double)weight, e};
    if (t.taken == t.fanout) {
      if (!(mine < heap[0])) return;
      std::pop_heap(heap, heap + t.taken--);
    }
    heap[t.taken++] = mine;
    std::push_heap(heap, heap + t.taken);
  };
  walk(s, r, [&](uint32_t lo, uint32_t hi) { each_entry(s, r, lo, hi, offer); }, [] {});
  for (int t = 0; t < s.num_types; ++t) {
    Candidate* heap = s.picks + s.types[t].first;
    std::sort(heap, heap + s.types[t].taken, [](const Candidate& a, const Candidate& b) { return a.place < b.place; });
  }
  const auto put = [&](TypeDraw& t, uint32_t e) {
    const bool drawn = t.next < t.taken && s.picks[t.first + t.next].place == e;
    t.next += drawn;
    const bool all = t.fanout < 0 || t.degree == t.taken;
    if (drawn || t.fanout < 0) out.put(r.start + e, all ? s.weights[r.start + e] : 1.0f);
  };
  walk(s, r, [&](uint32_t lo, uint32_t hi) { each_entry(s, r, lo, hi, put); }, [&] { put_own(out, r); });
}

// The entries of each type with those that are left out: what the drawn ones stand for.
inline void count_stored(Sample& s, const Row& r) {
  if (s.num_types == 1) {
    s.types[0].seen = r.stored - r.own_span;
    return;
  }
  if (r.left_out == r.left_out_end) {
    for (int t = 0; t < s.num_types; ++t) s.types[t].seen = s.types[t].degree;
    return;
  }
  Row all = r;
  all.left_out_end = all.left_out;
  walk(
      s, all, [&](uint32_t lo, uint32_t hi) { each_entry(s, r, lo, hi, [](TypeDraw& t, uint32_t) { ++t.seen; }); },
      [] {});
}

// LABOR-0 (Balin and Catalyurek, NeurIPS 2023): an edge is taken if the number of its source is below f / degree, the
// degree without edges that are left out; its value is that with them over f, or over the degree where that is less.
inline void labor_row(Sample& s, Drawn& out, const Row& r, const VertexNumbers& numbers) {
  count_types(s, r);
  count_stored(s, r);
  const int32_t* row = s.indices + r.start;
  const auto all = [](const TypeDraw& t) { return t.fanout < 0 || t.degree <= t.fanout; };
  const auto bound = [&](const TypeDraw& t) {
    return all(t) ? (uint64_t)1 << 32 : ((uint64_t)t.fanout << 32) / t.degree;
  };
  const auto value = [&](const TypeDraw& t) {
    return (float)t.seen / (float)(all(t) ? std::max<int64_t>(t.degree, 1) : t.fanout);
  };
  const uint64_t only_bound = bound(s.types[0]);
  const float only_value = value(s.types[0]);
  const auto segment = [&](uint32_t lo, uint32_t hi) {
    for (uint32_t e = lo; e < hi; e += kPhiloxLanes) {
      const uint32_t count = std::min<uint32_t>(hi - e, kPhiloxLanes);
      uint32_t sources[kPhiloxLanes] = {}, number[kPhiloxLanes];
      memcpy(sources, row + e, 4 * count);
      Eight::store(number, numbers(Eight::load(sources)));
      if (s.num_types == 1)
        for (uint32_t l = 0; l < count; ++l) out.put_if(number[l] < only_bound, r.start + e + l, only_value);
      else
        each_entry(s, r, e, e + count,
                   [&](TypeDraw& t, uint32_t at) { out.put_if(number[at - e] < bound(t), r.start + at, value(t)); });
    }
  };
  walk(s, r, segment, [&] { put_own(out, r); });
}

// Eight rows at a time, for small fan-outs of one type.
template <bool kReplace>
inline void lane_rows(const Sample& s, Drawn& out, const Row* rows, int count, int64_t* indptr_out) {
  const int f = (int)s.types[0].fanout;
  uint32_t words[kLaneFanout + 3][kPhiloxLanes], picks[kLaneFanout][kPhiloxLanes];
  for (int first = 0; first < count; first += kPhiloxLanes) {
    const int lanes = std::min(count - first, kPhiloxLanes);
    uint32_t ids[kPhiloxLanes] = {}, degrees[kPhiloxLanes] = {};
    for (int l = 0; l < lanes; ++l) {
      ids[l] = rows[first + l].id;
      degrees[l] = rows[first + l].degree;
    }
    words_of_rows(s.key, ids, f, words);
    draw_rows<kReplace>(words, degrees, f, picks);
    for (int l = 0; l < lanes; ++l) {
      indptr_out[first + l] = out.count();
      const Row& r = rows[first + l];
      const int taken = kReplace ? (degrees[l] ? f : 0) : (int)std::min<uint32_t>(degrees[l], f);
      if (!kReplace && !s.self_loops && whole(r))
        out.put_row(r.start, &picks[0][l], kPhiloxLanes, taken);
      else
        put_ranks(s, out, r, &picks[0][l], kPhiloxLanes, taken);
    }
  }
}

void draw(Sample& s) {
  Drawn out(s);
  const VertexNumbers numbers(s.key, s.mode == kLaborOne);
  const bool uniform = s.mode == kUniform || s.mode == kReplace;
  const bool lanes = uniform && s.num_types == 1 && s.types[0].fanout > 0 && s.types[0].fanout <= kLaneFanout;
  Row rows[kRows];
  for (int64_t first = 0; first < s.rows && s.status == kDone; first += kRows) {
    const int count = (int)std::min<int64_t>(kRows, s.rows - first);
    int64_t* indptr_out = s.indptr_out + first;
    if (!look_up(s, first, count, rows)) return;
    if (lanes && s.mode == kReplace) {
      lane_rows<true>(s, out, rows, count, indptr_out);
    } else if (lanes) {
      lane_rows<false>(s, out, rows, count, indptr_out);
    } else {
      for (int i = 0; i < count && s.status == kDone; ++i) {
        if (i + 8 < count) __builtin_prefetch(s.indices + rows[i + 8].start);
        indptr_out[i] = out.count();
        if (uniform)
          uniform_row(s, out, rows[i]);
        else if (s.mode == kWeight)
          weighted_row(s, out, rows[i]);
        else
          labor_row(s, out, rows[i], numbers);
      }
    }
  }
  out.read();
  s.edges = s.indptr_out[s.rows] = out.count();
}

void take_seeds(Frontier* f, const int64_t* seeds, int64_t count) {
  f->base += (uint32_t)f->rows;
  if (f->base > ~0u - (uint64_t)f->capacity) {
    if (f->direct) memset(f->direct, 0, 4 * f->num_vertices);
    if (f->hashed) memset(f->hashed, 0, (size_t)8 << f->hash_bits);
    f->base = 1;
  }
  f->rows = 0;
  f->status = kDone;
  for (f->at = 0; f->at < count; ++f->at) {
    const int64_t id = seeds[f->at];
    if (id < 0 || id >= f->num_vertices) {
      f->status = kSeed;
      return;
    }
    const int64_t n = f->direct ? Direct(*f).claim((uint32_t)id, f->rows) : Hashed(*f).claim((uint32_t)id, f->rows);
    if (n < f->rows) {
      f->status = kTwice;
      return;
    }
    f->ids[f->rows++] = id;
  }
}

void draw_hop(Sample* s) {
  s->status = kDone;
  draw(*s);
  if (s->status != kDone) return;
  Frontier& f = *s->frontier;
  const bool done = f.direct ? number(f, Direct(f), s->columns, s->edges, s->max_sources)
                             : number(f, Hashed(f), s->columns, s->edges, s->max_sources);
  s->sources = f.rows;
  if (done) return;
  s->status = f.status;
  s->at = f.at;
}

void transpose_hop(Sample* s) {
  int32_t *rows = s->indices_t, *order = s->order;
  transpose(s->indptr_out, s->columns, s->rows, s->sources, s->indptr_t, [&](int64_t to, int64_t row, int64_t edge) {
    rows[to] = (int32_t)row;
    order[to] = (int32_t)edge;
  });
}

}  // namespace

MGGCN_EXPORT(mggcn_sample_batch)(Frontier* f, const int64_t* seeds, int64_t count, Sample* hops, int num_hops,
                                 int transposed) {
  take_seeds(f, seeds, count);
  for (int hop = 0; hop < num_hops && f->status == kDone; ++hop) {
    Sample* s = hops + hop;
    s->rows = f->rows;
    draw_hop(s);
    if (s->status != kDone) return;
    if (hop < transposed) transpose_hop(s);
  }
}

MGGCN_EXPORT(mggcn_sample_rows)(Sample* s) {
  s->status = kDone;
  draw(*s);
}

MGGCN_EXPORT(mggcn_number_columns)(Frontier* f, const int64_t* targets, int64_t count, int32_t* columns, int64_t edges,
                                   int64_t max_sources) {
  take_seeds(f, targets, count);
  if (f->status != kDone) return;
  if (f->direct) {
    number(*f, Direct(*f), columns, edges, max_sources);
  } else {
    number(*f, Hashed(*f), columns, edges, max_sources);
  }
}
