// The cache of rows that other ranks own, in a ring of lines (aggregate/history.py; DistGNN-MB, section 3.2). A rank
// reads `halo` such rows, each with a number; number -1: a row that it never caches. One thread, but for history_copy.
// history_store  finds lines for `count` rows that have come, found[i], -1 if a later one of them takes it away again:
// a
//                row that has a line keeps it, a new one takes the oldest place of the ring. Moves: a random word of
//                line_of for each, and of the number that loses its line.
// history_find   found[i] = the line of row numbers[i] if it is at most `life` steps old (-1: of any age), else -1, and
//                missing[places[i]] = 1; missing is 0 for the other sources. Moves: two random words for each.
// history_copy   row to[i] of out = row from[i] of in, zeros for from[i] = -1, nothing for to[i] = -1; null: i itself.
// history_shares out[t] = (sum of |values| of row t) / (that of its entries whose source is not missing), 0 without any
//                left: exactly 1 where nothing is missing. Moves: a row's entries once, a random byte for each.
#include <cmath>

#include "common.h"

namespace {

struct History {
  int32_t *line_of, *number_of;  // [halo] the line of each row, [lines] the row of each line; -1: none
  int64_t* arrived;              // [lines] the step in which its row came
  const int32_t *numbers, *places;
  int32_t* found;
  uint8_t* missing;
  int64_t lines, next, count, sources, step, life, hits;
};

void store(History& h) {
  for (int64_t i = 0; i < h.count; ++i) {
    const int32_t number = h.numbers[i];
    int32_t line = h.line_of[number];
    if (line < 0) {
      line = (int32_t)h.next;
      h.next = h.next + 1 == h.lines ? 0 : h.next + 1;
      if (h.number_of[line] >= 0) h.line_of[h.number_of[line]] = -1;
      h.number_of[line] = number;
      h.line_of[number] = line;
    }
    h.arrived[line] = h.step;
    h.found[i] = line;
  }
  for (int64_t i = 0; i < h.count; ++i)
    if (h.line_of[h.numbers[i]] != h.found[i]) h.found[i] = -1;
}

void find(History& h) {
  memset(h.missing, 0, h.sources);
  h.hits = 0;
  for (int64_t i = 0; i < h.count; ++i) {
    const int32_t number = h.numbers[i];
    const int32_t line = number < 0 ? -1 : h.line_of[number];
    const bool hit = line >= 0 && (h.life < 0 || h.step - h.arrived[line] <= h.life);
    h.found[i] = hit ? line : -1;
    h.missing[h.places[i]] = !hit;
    h.hits += hit;
  }
}

template <class T>
void shares(const int64_t* indptr, const int32_t* indices, const T* values, const uint8_t* missing, T* out,
            int64_t rows) {
  for (int64_t t = 0; t < rows; ++t) {
    double all = 0, left = 0;
    for (int64_t e = indptr[t]; e < indptr[t + 1]; ++e) {
      const double weight = values ? std::abs((double)values[e]) : 1.0;
      all += weight;
      if (!missing[indices[e]]) left += weight;
    }
    out[t] = (T)(left > 0 ? all / left : 0.0);
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_history_store)(History* h) { store(*h); }
MGGCN_EXPORT(mggcn_history_find)(History* h) { find(*h); }

// ld_in, ld_out and row_bytes are bytes.
MGGCN_EXPORT(mggcn_history_copy)(const char* in, int64_t ld_in, const int32_t* from, char* out, int64_t ld_out,
                                 const int32_t* to, int64_t rows, int64_t row_bytes, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t source = from ? from[i] : i, target = to ? to[i] : i;
    if (target < 0) continue;
    if (source < 0) {
      memset(out + target * ld_out, 0, row_bytes);
    } else {
      memcpy(out + target * ld_out, in + source * ld_in, row_bytes);
    }
  }
}

MGGCN_EXPORT(mggcn_history_shares_f32)(const int64_t* indptr, const int32_t* indices, const float* values,
                                       const uint8_t* missing, float* out, int64_t rows) {
  shares(indptr, indices, values, missing, out, rows);
}
MGGCN_EXPORT(mggcn_history_shares_f64)(const int64_t* indptr, const int32_t* indices, const double* values,
                                       const uint8_t* missing, double* out, int64_t rows) {
  shares(indptr, indices, values, missing, out, rows);
}
