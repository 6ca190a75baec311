// SPDX-License-Identifier: Apache-2.0
// The tables of special functions.
#include <sys/mman.h>

#include <new>

#include "float32.h"
#include "tables.h"

namespace detjax {
namespace {

// Memory of large pages, where the system has them: inputs of a table are anywhere in it.
uint32_t* new_table(size_t count) {
  const auto page = std::align_val_t(size_t(1) << 21);
  void* held = ::operator new(count * sizeof(uint32_t), page);
#ifdef MADV_HUGEPAGE
  madvise(held, count * sizeof(uint32_t), MADV_HUGEPAGE);
#endif
  return static_cast<uint32_t*>(held);
}

void tell_filled(Filled state) {
  std::lock_guard<std::mutex> lock(filling);
  filled.store(state);
  filled_changed.notify_all();
}

}  // namespace
}  // namespace detjax

extern "C" {

// Fill the tables, [2^23], [2^23] and [2^24] entries from 1.0 on, by the steps between neighbours.
// Null where they could not be read: every operation then fails.
void detjax_set_tables(const int8_t* ex2, const int8_t* rcp, const int8_t* rsqrt) {
  if (detjax::tables.ex2) return;
  if (!ex2) return detjax::tell_filled(detjax::Filled::kNever);
  const int8_t* steps[] = {ex2, rcp, rsqrt};
  uint32_t* held[3];
  for (int i = 0; i < 3; ++i) {
    const size_t count = (i == 2 ? 2 : 1) * detjax::kOctave;
    held[i] = detjax::new_table(count);
    uint32_t entry = 0x3f800000u;
    for (size_t j = 0; j < count; ++j) held[i][j] = entry += uint32_t(int32_t(steps[i][j]));
  }
  detjax::tables = {held[0], held[1], held[2]};
  detjax::tell_filled(detjax::Filled::kYes);
}
}
