// A rank's part of a block that ranks share (blocks/shared.py): which columns each rank reads, and the edges of the
// rank's rows, numbered by its own columns and by those that it receives. P ranks, E edges; one thread.
// count: readers, bits [columns, P]: whether a rank has an edge from a column; exchanged int64 [P, P]: columns of rank
//   j that rank i reads, 0 for i = j; columns, edges int64 [P]: those of each rank.
//   Moves: E columns once, a random word of readers for each.
// cut: indices int32 [edges of the rank]: first those from own columns, row by row, then the others, with row pointers
//   near and far int64 [rows of the rank + 1]; entries int32: the place of each among all E; sent int32: own columns
//   that others read, by receiver, then column. Received columns are numbered by sender, then column. gathered: they
//   come behind the own ones, in order, and all edges are in near. places int64, or null: the column of each number.
//   Moves: readers and columns twice, the rank's edges twice, a random number for each.
#include "common.h"

namespace {

struct Share {
  const int64_t* indptr;
  const int32_t* columns_of;
  const uint16_t *of_row, *of_column;
  void* readers;
  int64_t *exchanged, *columns, *edges;
  int64_t* next;  // [2, P], work space
  int32_t* number;
  int64_t *near, *far, *places;
  int32_t *indices, *entries, *sent;
  int64_t num_rows, num_columns;
  int32_t rank, ranks, gathered;
};

// Which ranks read a column, a bit for each. W: of up to 8 ranks a byte, so that more columns stay in the cache.
template <class W>
struct Readers {
  W* words;
  int64_t per_column;
  static constexpr int32_t bits = 8 * sizeof(W);

  explicit Readers(const Share& s) : words((W*)s.readers), per_column((s.ranks + bits - 1) / bits) {}

  bool has(int64_t column, int32_t rank) const { return words[column * per_column + rank / bits] >> (rank % bits) & 1; }

  // Calls f with every rank but `except` that reads a column.
  template <class F>
  void each(int64_t column, int32_t except, F f) const {
    for (int32_t w = 0; w < per_column; ++w) {
      uint64_t left = words[column * per_column + w];
      if (except / bits == w) left &= ~(1ULL << (except % bits));
      for (; left; left &= left - 1) f(w * bits + __builtin_ctzll(left));
    }
  }
};

template <class W>
void count(const Share& s) {
  const int64_t ranks = s.ranks;
  const Readers<W> readers(s);
  for (int64_t i = 0; i < s.num_columns * readers.per_column; ++i) readers.words[i] = 0;
  for (int64_t i = 0; i < ranks * ranks; ++i) s.exchanged[i] = 0;
  for (int64_t i = 0; i < ranks; ++i) s.columns[i] = s.edges[i] = 0;
  for (int64_t r = 0; r < s.num_rows; ++r) {
    const int32_t rank = s.of_row[r];
    const W bit = (W)((W)1 << (rank % readers.bits));
    W* words = readers.words + rank / readers.bits;
    for (int64_t e = s.indptr[r]; e < s.indptr[r + 1]; ++e) words[s.columns_of[e] * readers.per_column] |= bit;
    s.edges[rank] += s.indptr[r + 1] - s.indptr[r];
  }
  for (int64_t c = 0; c < s.num_columns; ++c) {
    const int32_t owner = s.of_column[c];
    ++s.columns[owner];
    readers.each(c, owner, [&](int32_t q) { ++s.exchanged[q * ranks + owner]; });
  }
}

// A received column's number is stored as its complement.
template <class W>
void number_columns(const Share& s) {
  const int64_t ranks = s.ranks, me = s.rank;
  const Readers<W> readers(s);
  int64_t *received = s.next, *sent = s.next + ranks, own = 0, behind = s.columns[me];
  received[0] = sent[0] = 0;
  for (int64_t q = 1; q < ranks; ++q) {
    received[q] = received[q - 1] + s.exchanged[me * ranks + q - 1];
    sent[q] = sent[q - 1] + s.exchanged[(q - 1) * ranks + me];
  }
  // Without branches, which owners dealt at random would mislead every other time: a column that is neither this rank's
  // nor read gets the number of the next one that is.
  for (int64_t c = 0; c < s.num_columns; ++c) {
    const int32_t owner = s.of_column[c], is_own = owner == s.rank, is_read = readers.has(c, s.rank) & !is_own;
    int64_t* next = s.gathered ? &behind : received + owner;
    const int32_t number = s.gathered ? (int32_t)*next : (int32_t)~*next;
    s.number[c] = is_own ? (int32_t)own : number;
    own += is_own;
    *next += is_read;
  }
  for (int64_t c = 0; c < s.num_columns; ++c) {
    const int32_t is_own = s.of_column[c] == s.rank;
    if (s.places && (is_own || (s.gathered && readers.has(c, s.rank)))) s.places[s.number[c]] = c;
    if (is_own && !s.gathered) readers.each(c, s.rank, [&](int32_t q) { s.sent[sent[q]++] = s.number[c]; });
  }
}

void cut(const Share& s) {
  int64_t row = 0;
  s.near[0] = s.far[0] = 0;
  for (int64_t r = 0; r < s.num_rows; ++r) {
    if (s.of_row[r] != s.rank) continue;
    int64_t own = 0;
    const int64_t first = s.indptr[r], last = s.indptr[r + 1];
    for (int64_t e = first; e < last; ++e) own += s.number[s.columns_of[e]] >= 0;
    s.near[row + 1] = s.near[row] + own;
    s.far[row + 1] = s.far[row] + (last - first - own);
    ++row;
  }
  int64_t near = 0, far = s.near[row];
  for (int64_t r = 0; r < s.num_rows; ++r) {
    if (s.of_row[r] != s.rank) continue;
    for (int64_t e = s.indptr[r]; e < s.indptr[r + 1]; ++e) {
      // Without a branch, which owners dealt at random would mislead every other time.
      const int32_t number = s.number[s.columns_of[e]], own = number >= 0;
      const int64_t at = own ? near : far;
      s.indices[at] = own ? number : ~number;
      s.entries[at] = (int32_t)e;
      near += own;
      far += 1 - own;
    }
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_share_count)(const Share* s) {
  if (s->ranks <= 8) {
    count<uint8_t>(*s);
  } else {
    count<uint64_t>(*s);
  }
}

MGGCN_EXPORT(mggcn_share_cut)(const Share* s) {
  if (s->ranks <= 8) {
    number_columns<uint8_t>(*s);
  } else {
    number_columns<uint64_t>(*s);
  }
  cut(*s);
}
