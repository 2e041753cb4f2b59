// pack: the pieces of a batch, copied to where they lie on their way to a device, and what fills it up. One call for
// all of them, as a caller that holds a lock (Python's) would wait for it after each.
#include "common.h"

namespace {

// from: [count] elements of `item` bytes; null: each is `value`, of 1 or 8 bytes.
struct Piece {
  char* to;
  const char* from;
  int64_t count, item, value;
};

}  // namespace

MGGCN_EXPORT(mggcn_pack)(const Piece* pieces, int64_t num_pieces) {
  for (int64_t i = 0; i < num_pieces; ++i) {
    const Piece& p = pieces[i];
    if (p.count <= 0) continue;
    if (p.from) {
      memcpy(p.to, p.from, p.count * p.item);
    } else if (p.item == 1) {
      memset(p.to, (int)p.value, p.count);
    } else {
      for (int64_t k = 0; k < p.count; ++k) reinterpret_cast<int64_t*>(p.to)[k] = p.value;
    }
  }
}
