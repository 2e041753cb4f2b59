// Text of edges into columns: one edge a line, two ids and up to two numbers, at commas or at blanks; comments after #
// or %. parse_edges  whole lines of `text` -> out[0] sources, out[1] targets int64, out[2], out[3] float64 weights
// (kinds 'w') or
//              int64 types ('t'), each with room for the lines of the text. Lines without fields are skipped. The first
//              line that is no edge ends the work: `bad` is the byte where it begins, -1 if all are edges. `odd` is
//              that of the first edge with an id that is more than its number, -1 without one: 007, +7, -0, or 7#.
// Blanks are those of Latin-1; a carriage return ends a line with the line feed behind it, and nothing alone. Cost: two
// passes over the text in `threads` pieces; about 80 ns a line and thread.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common.h"

namespace {

struct EdgeText {
  const char* text;
  int64_t nbytes;
  void* out[4];
  char kinds[4];  // 'i', 'i', then 'w' or 't'
  int32_t columns, comma;
  int64_t edges, bad, odd;
};

inline bool blank(unsigned char c) {
  return c == ' ' || c == '\t' || c == 11 || c == 12 || (c >= 0x1c && c <= 0x1f) || c == 0x85 || c == 0xa0;
}

inline bool ends(unsigned char c) { return c == '\n' || c == '\r' || c == '#' || c == '%'; }

// Whether nothing stands between the end of the fields and that of the line but a comment and carriage returns.
inline bool closes(const char* p, const char* stop) {
  const char* back = *p == '\n' ? nullptr : static_cast<const char*>(std::memchr(p, '\r', stop - p));
  while (back && back < stop && *back == '\r') ++back;
  return !back || back == stop;
}

// A whole number at p, as long as it fits into 64 bits; null if there is none. *odd is set if its text says more.
inline const char* whole(const char* p, const char* end, int64_t* out, bool* odd) {
  const bool plus = p < end && *p == '+', negative = p < end && *p == '-';
  p += p < end && (*p == '-' || *p == '+');
  const char* first = p;
  uint64_t x = 0;
  for (; p < end && (unsigned char)(*p - '0') < 10; ++p) {
    if (x > (UINT64_MAX - 9) / 10) return nullptr;
    x = 10 * x + (*p - '0');
  }
  if (p == first || x > (uint64_t)INT64_MAX) return nullptr;
  *odd |= plus | (*first == '0' && (negative || p - first > 1)) | (p < end && (*p == '#' || *p == '%'));
  *out = negative ? -(int64_t)x : (int64_t)x;
  return p;
}

constexpr double kTens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                            1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

// A number as correctly rounded as strtod's: of few digits at once (Clinger 1990), others by the library.
inline const char* real(const char* p, const char* end, double* out) {
  const char* start = p;
  const bool negative = p < end && *p == '-';
  p += p < end && (*p == '-' || *p == '+');
  const char* number = p;
  uint64_t digits = 0;
  int count = 0, after = 0;
  for (; p < end && (unsigned char)(*p - '0') < 10 && count < 19; ++p, ++count) digits = 10 * digits + (*p - '0');
  if (p < end && *p == '.')
    for (++p; p < end && (unsigned char)(*p - '0') < 10 && count < 19; ++p, ++count, ++after)
      digits = 10 * digits + (*p - '0');
  const bool stops = p == end || blank(*p) || ends(*p) || *p == ',';
  if (count && stops && digits < (1ull << 53) && after <= 22) {
    const double x = (double)digits / kTens[after];
    *out = negative ? -x : x;
    return p;
  }
  // The library's own reader knows no leading plus, and Python none before a second sign.
  if (number < end && (*number == '+' || *number == '-')) return nullptr;
#if defined(__cpp_lib_to_chars)
  const auto found = std::from_chars(number, end, *out);
  if (found.ec == std::errc()) {
    *out = negative ? -*out : *out;
    return found.ptr;
  }
  if (found.ec != std::errc::result_out_of_range) return nullptr;
#endif
  p = number;
  while (p < end && !blank(*p) && !ends(*p) && *p != ',') ++p;
  const std::string copy(start, p);
  char* stop = nullptr;
  *out = std::strtod(copy.c_str(), &stop);
  const bool hex = copy.find_first_of("xX") != std::string::npos;
  return stop == copy.c_str() + copy.size() && !copy.empty() && !hex ? p : nullptr;
}

// One line from p on: 1 an edge, 0 nothing, -1 neither. *next is the byte after its end, *odd as of `whole`.
inline int line(EdgeText& s, const char* p, const char* end, int64_t edge, const char** next, bool* odd) {
  const char* rest = p;
  bool other = false;  // what types look like is no matter
  int found = 0;
  for (; found < s.columns; ++found) {
    while (p < end && blank(*p)) ++p;
    if (p == end || ends(*p)) break;
    if (s.kinds[found] == 'w')
      p = real(p, end, static_cast<double*>(s.out[found]) + edge);
    else
      p = whole(p, end, static_cast<int64_t*>(s.out[found]) + edge, s.kinds[found] == 'i' ? odd : &other);
    if (!p) break;
    rest = p;
    const char* after = p;
    while (p < end && blank(*p)) ++p;
    const bool last = found + 1 == s.columns;
    if (!last && (s.comma ? p == end || *p != ',' : p == after)) {
      p = nullptr;
      break;
    }
    p += s.comma && !last;
  }
  const bool closed = p && (p == end || ends(*p));
  if (!p) p = rest;
  const char* stop = static_cast<const char*>(std::memchr(p, '\n', end - p));
  *next = stop ? stop + 1 : end;
  if (!closed || (p < end && !closes(p, stop ? stop : end))) return -1;
  return found == s.columns ? 1 : found ? -1 : 0;
}

void parse(EdgeText& s, const char* p, const char* end, int64_t first, int64_t* count, const char** bad,
           const char** odd) {
  int64_t edge = first;
  while (p < end) {
    const char* next;
    bool more = false;
    const int kind = line(s, p, end, edge, &next, &more);
    if (kind < 0) {
      *bad = p;
      break;
    }
    if (more && !*odd) *odd = p;
    edge += kind;
    p = next;
  }
  *count = edge - first;
}

}  // namespace

MGGCN_EXPORT(mggcn_parse_edges)(EdgeText* s, int32_t threads) {
  const int pieces = std::max<int64_t>(1, std::min<int64_t>(threads, s->nbytes >> 16));
  const char *text = s->text, *end = text + s->nbytes;
  std::vector<const char*> starts(pieces + 1, end), bad(pieces, nullptr), odd(pieces, nullptr);
  std::vector<int64_t> first(pieces + 1, 0), counts(pieces, 0);
  starts[0] = text;
  for (int k = 1; k < pieces; ++k) {
    const char* at = std::max(starts[k - 1], text + s->nbytes / pieces * k);
    const char* stop = static_cast<const char*>(std::memchr(at, '\n', end - at));
    starts[k] = stop ? stop + 1 : end;
  }
#pragma omp parallel for num_threads(pieces) schedule(static, 1)
  for (int k = 0; k < pieces; ++k) first[k + 1] = std::count(starts[k], starts[k + 1], '\n') + (k + 1 == pieces);
  for (int k = 0; k < pieces; ++k) first[k + 1] += first[k];
#pragma omp parallel for num_threads(pieces) schedule(static, 1)
  for (int k = 0; k < pieces; ++k) parse(*s, starts[k], starts[k + 1], first[k], &counts[k], &bad[k], &odd[k]);
  s->edges = 0;
  s->bad = s->odd = -1;
  for (int k = 0; k < pieces; ++k) {
    for (int c = 0; c < s->columns; ++c) {
      int64_t* column = static_cast<int64_t*>(s->out[c]);
      if (first[k] != s->edges) std::memmove(column + s->edges, column + first[k], 8 * counts[k]);
    }
    s->edges += counts[k];
    if (odd[k] && s->odd < 0) s->odd = odd[k] - text;
    if (bad[k]) {
      s->bad = bad[k] - text;
      break;
    }
  }
}
