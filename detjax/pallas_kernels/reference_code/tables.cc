// SPDX-License-Identifier: Apache-2.0
// The tables of special functions.
#include "tables.h"

#include "float32.h"

extern "C" {

// Take the tables, [2^23], [2^23] and [2^24] entries from 1.0 on, one after the other, which stay
// where they are. Null where they could not be read: every operation then fails.
void detjax_set_tables(const uint32_t* held) {
  using namespace detjax;
  if (held) tables = {held, held + kOctave, held + 2 * kOctave};
  std::lock_guard<std::mutex> lock(filling);
  filled.store(held ? Filled::kYes : Filled::kNever);
  filled_changed.notify_all();
}
}
