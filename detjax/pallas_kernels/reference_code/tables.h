// SPDX-License-Identifier: Apache-2.0
// Whether the tables of special functions are there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace detjax {

// The tables are filled by a thread of their own while a program is still being loaded.
enum class Filled : int { kNotYet, kYes, kNever };
inline std::atomic<Filled> filled{Filled::kNotYet};
inline std::mutex filling;
inline std::condition_variable filled_changed;

inline bool wait_for_tables() {
  if (filled.load(std::memory_order_acquire) == Filled::kNotYet) {
    std::unique_lock<std::mutex> lock(filling);
    filled_changed.wait(lock, [] { return filled.load() != Filled::kNotYet; });
  }
  return filled.load() == Filled::kYes;
}

}  // namespace detjax
