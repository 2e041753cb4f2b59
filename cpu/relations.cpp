// Edges of a drawn block by their relation (feed/relation_means.py, blocks/relation_order.py). Nothing is allocated:
// a batch has planned memory for both.
// relation_means_*  turns what drawn edges count in a sum into weights of means over the in-neighbours of each
//                   relation. For entry e of row t and relation r, in double precision:
//                     mode 0: value / D;  1: value (D / drawn) / D;  2: value (stored / drawn) / D;  3: value / sum
//                   D: degree of the edge's relation at its target; drawn: sum of `draw` (1 each without) of the row's
//                   entries of r; stored: number of the vertex's edges of r in the graph; sum: of the values of r in
//                   the row; 0 where the divisor is 0. Writes the entries' types, and leaves `sums` as it found it,
//                   zero.
// relation_order_*  puts the entries in the order of relation, row and place: a part for each relation and block_rows
//                   of the rows that have some, with row pointers of its own that begin at 0.
// Moves: relation_means the store's types and degrees of each entry, a random line each, mode 2 whole rows of types;
//        relation_order the entries twice.
#include "common.h"

namespace {

struct RelationMeans {
  const int64_t *indptr, *place, *ids, *store_indptr;
  const void* store_types;
  const float *store_degrees, *draw;  // draw: or null, all are 1
  double* sums;                       // (relations,), zero
  int64_t rows, bad;                  // bad: the place of an edge whose type is no relation, -1 if there is none
  int32_t relations, wide, mode;      // wide: types are uint16
};

template <class T, class U>
void means(RelationMeans& m, U* types, T* values) {
  const U* store_types = static_cast<const U*>(m.store_types);
  for (int64_t t = 0; t < m.rows; ++t) {
    const int64_t first = m.indptr[t], last = m.indptr[t + 1];
    for (int64_t e = first; e < last; ++e) {
      types[e] = store_types[m.place[e]];
      if (types[e] >= m.relations) {
        m.bad = m.place[e];
        return;
      }
      if (m.mode == 3) m.sums[types[e]] += values[e];
      if (m.mode == 1 || m.mode == 2) m.sums[types[e]] += m.draw ? m.draw[e] : 1;
    }
    if (m.mode == 2) {  // stored / drawn for each relation that was drawn
      const int64_t v = m.ids[t];
      for (int64_t e = first; e < last; ++e)
        if (m.sums[types[e]] > 0) m.sums[types[e]] = -m.sums[types[e]];
      // A negative sum waits for its factor, which is counted once.
      for (int64_t e = first; e < last; ++e) {
        const double drawn = -m.sums[types[e]];
        if (drawn <= 0) continue;
        int64_t stored = 0;
        for (int64_t s = m.store_indptr[v]; s < m.store_indptr[v + 1]; ++s) stored += store_types[s] == types[e];
        m.sums[types[e]] = (double)stored / drawn;
      }
    }
    for (int64_t e = first; e < last; ++e) {
      const double sum = m.sums[types[e]], degree = m.mode == 3 ? sum : m.store_degrees[m.place[e]];
      double value = values[e];
      if (m.mode == 1) value = (T)(value * (degree / sum));
      if (m.mode == 2) value = (T)(value * sum);
      values[e] = degree != 0 ? (T)(value / degree) : (T)0;
    }
    for (int64_t e = first; e < last; ++e) m.sums[types[e]] = 0;
  }
}

template <class T>
void relation_means(RelationMeans& m, void* types, T* values) {
  if (m.wide) {
    means(m, static_cast<uint16_t*>(types), values);
  } else {
    means(m, static_cast<uint8_t*>(types), values);
  }
}

struct RelationOrder {
  const int64_t* indptr;
  const int32_t* indices;
  const void* types;
  int64_t* work;  // 6 for each relation
  int32_t *rows_out, *indices_out;
  int64_t *pointers, *parts;  // parts: relation, first row and number of rows, first entry, first pointer
  int64_t rows, block_rows, num_parts;
  int32_t relations, wide;
};

template <class T, class U>
void order(RelationOrder& o, const T* values, T* values_out) {
  const U* types = static_cast<const U*>(o.types);
  const int64_t relations = o.relations, block_rows = o.block_rows;
  // Of each relation: entries, rows that have some, and the last of these; first row, first pointer, first part.
  int64_t *cursor = o.work, *count = cursor + relations, *last = count + relations, *first_row = last + relations,
          *first_pointer = first_row + relations, *first_part = first_pointer + relations;
  for (int64_t r = 0; r < relations; ++r) cursor[r] = count[r] = 0, last[r] = -1;
  for (int64_t t = 0; t < o.rows; ++t) {
    for (int64_t e = o.indptr[t]; e < o.indptr[t + 1]; ++e) {
      const U r = types[e];
      ++cursor[r];
      if (last[r] != t) ++count[r], last[r] = t;
    }
  }
  int64_t entries = 0, rows = 0, parts = 0;
  for (int64_t r = 0; r < relations; ++r) {
    const int64_t mine = cursor[r];
    cursor[r] = entries, first_row[r] = rows, first_pointer[r] = rows + parts, first_part[r] = parts;
    entries += mine, rows += count[r], parts += (count[r] + block_rows - 1) / block_rows;
    for (int64_t b = first_part[r]; b < parts; ++b) {
      const int64_t start = (b - first_part[r]) * block_rows, left = count[r] - start;
      int64_t* part = o.parts + 5 * b;
      part[0] = r, part[1] = first_row[r] + start, part[2] = left < block_rows ? left : block_rows;
      part[4] = first_pointer[r] + start + (b - first_part[r]);
    }
    count[r] = 0, last[r] = -1;
  }
  o.num_parts = parts;
  for (int64_t t = 0; t < o.rows; ++t) {
    for (int64_t e = o.indptr[t]; e < o.indptr[t + 1]; ++e) {
      const U r = types[e];
      int64_t* part = o.parts + 5 * (first_part[r] + (count[r] - (last[r] == t)) / block_rows);
      if (last[r] != t) {
        const int64_t place = count[r] % block_rows;
        if (place == 0) part[3] = cursor[r];
        o.rows_out[first_row[r] + count[r]] = (int32_t)t;
        o.pointers[part[4] + place] = cursor[r] - part[3];
        ++count[r], last[r] = t;
      }
      o.indices_out[cursor[r]] = o.indices[e];
      if (values) values_out[cursor[r]] = values[e];
      ++cursor[r];
      o.pointers[part[4] + part[2]] = cursor[r] - part[3];  // of the part's last row it stays
    }
  }
}

template <class T>
void relation_order(RelationOrder& o, const T* values, T* values_out) {
  if (o.wide) {
    order<T, uint16_t>(o, values, values_out);
  } else {
    order<T, uint8_t>(o, values, values_out);
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_relation_means_f32)(RelationMeans* m, void* types, float* values) {
  relation_means(*m, types, values);
}
MGGCN_EXPORT(mggcn_relation_means_f64)(RelationMeans* m, void* types, double* values) {
  relation_means(*m, types, values);
}
MGGCN_EXPORT(mggcn_relation_order_f32)(RelationOrder* o, const float* values, float* out) {
  relation_order(*o, values, out);
}
MGGCN_EXPORT(mggcn_relation_order_f64)(RelationOrder* o, const double* values, double* out) {
  relation_order(*o, values, out);
}
