// A rank's part of a block that ranks share (blocks/shared.py): which columns each rank reads, and the edges of the
// rank's rows, numbered by its own columns and by those that it receives. P ranks, E edges; one thread, so no order is
// left open. count: readers uint64 [columns, words]: bit q of a column's words is set if rank q has an edge from it;
// exchanged int64
//   [P, P]: columns of rank j that rank i reads, 0 for i = j; columns, edges int64 [P]: those of each rank.
//   Moves: E columns once, a random word of readers for each.
// cut: indices int32 [edges of the rank]: first those from own columns, row by row, then the others, with row pointers
// near
//   and far int64 [rows of the rank + 1] of each; entries int32: the place of each among all E; sent int32: own columns
//   that others read, by receiver, then column. Received columns are numbered by sender, then column; gathered: they
//   come behind the own ones, as columns come, and all edges are in near. places int64, or null: the column of each
//   number. Moves: readers once, the rank's rows twice.
#include "common.h"

namespace {

struct Share {
  const int64_t* indptr;
  const int32_t* columns_of;
  const uint16_t *of_row, *of_column;
  uint64_t* readers;
  int64_t *exchanged, *columns, *edges;
  int64_t* next;  // [2, P], work space
  int32_t* number;
  int64_t *near, *far, *places;
  int32_t *indices, *entries, *sent;
  int64_t num_rows, num_columns;
  int32_t rank, ranks, words, gathered;
};

// Calls f with every rank but `except` that reads a column.
template <class F>
inline void each_reader(const Share& s, int64_t column, int32_t except, F f) {
  for (int32_t w = 0; w < s.words; ++w) {
    uint64_t bits = s.readers[column * s.words + w];
    if (except / 64 == w) bits &= ~(1ULL << (except % 64));
    for (; bits; bits &= bits - 1) f(w * 64 + __builtin_ctzll(bits));
  }
}

void count(const Share& s) {
  const int64_t ranks = s.ranks;
  for (int64_t i = 0; i < s.num_columns * s.words; ++i) s.readers[i] = 0;
  for (int64_t i = 0; i < ranks * ranks; ++i) s.exchanged[i] = 0;
  for (int64_t i = 0; i < ranks; ++i) s.columns[i] = s.edges[i] = 0;
  for (int64_t r = 0; r < s.num_rows; ++r) {
    const uint64_t bit = 1ULL << (s.of_row[r] % 64);
    uint64_t* word = s.readers + s.of_row[r] / 64;
    for (int64_t e = s.indptr[r]; e < s.indptr[r + 1]; ++e) word[(int64_t)s.columns_of[e] * s.words] |= bit;
    s.edges[s.of_row[r]] += s.indptr[r + 1] - s.indptr[r];
  }
  for (int64_t c = 0; c < s.num_columns; ++c) {
    const int32_t owner = s.of_column[c];
    ++s.columns[owner];
    each_reader(s, c, owner, [&](int32_t q) { ++s.exchanged[q * ranks + owner]; });
  }
}

void number_columns(const Share& s) {
  const int64_t ranks = s.ranks, me = s.rank;
  int64_t *received = s.next, *sent = s.next + ranks, own = 0, behind = s.columns[me];
  received[0] = sent[0] = 0;
  for (int64_t q = 1; q < ranks; ++q) {
    received[q] = received[q - 1] + s.exchanged[me * ranks + q - 1];
    sent[q] = sent[q - 1] + s.exchanged[(q - 1) * ranks + me];
  }
  for (int64_t c = 0; c < s.num_columns; ++c) {
    const int32_t owner = s.of_column[c];
    if (owner == me) {
      if (!s.gathered) each_reader(s, c, me, [&](int32_t q) { s.sent[sent[q]++] = (int32_t)own; });
      s.number[c] = (int32_t)own++;
    } else if (s.readers[c * s.words + me / 64] >> (me % 64) & 1) {
      s.number[c] = (int32_t)(s.gathered ? behind++ : received[owner]++);
    } else {
      continue;
    }
    if (s.places && (owner == me || s.gathered)) s.places[s.number[c]] = c;
  }
}

void cut(const Share& s) {
  number_columns(s);
  int64_t row = 0;
  s.near[0] = s.far[0] = 0;
  for (int64_t r = 0; r < s.num_rows; ++r) {
    if (s.of_row[r] != s.rank) continue;
    int64_t own = 0;
    const int64_t first = s.indptr[r], last = s.indptr[r + 1];
    for (int64_t e = first; e < last; ++e) own += s.gathered || s.of_column[s.columns_of[e]] == s.rank;
    s.near[row + 1] = s.near[row] + own;
    s.far[row + 1] = s.far[row] + (last - first - own);
    ++row;
  }
  int64_t near = 0, far = s.near[row];
  for (int64_t r = 0; r < s.num_rows; ++r) {
    if (s.of_row[r] != s.rank) continue;
    for (int64_t e = s.indptr[r]; e < s.indptr[r + 1]; ++e) {
      const int32_t c = s.columns_of[e];
      const int64_t at = s.gathered || s.of_column[c] == s.rank ? near++ : far++;
      s.indices[at] = s.number[c];
      s.entries[at] = (int32_t)e;
    }
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_share_count)(const Share* s) { count(*s); }
MGGCN_EXPORT(mggcn_share_cut)(const Share* s) { cut(*s); }
