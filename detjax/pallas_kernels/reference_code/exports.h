// SPDX-License-Identifier: Apache-2.0
// How XLA gets an operation: by its name, and once the tables are there.
#pragma once

#include "calls.h"
#include "tables.h"

namespace detjax {

// An operation that begins when the tables are there.
template <class... Args>
auto with_tables(ffi::Error (*operation)(Args...)) {
  return [operation](Args... args) -> ffi::Error {
    if (wait_for_tables()) return operation(args...);
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "the tables of special functions could not be read: detjax is not whole");
  };
}

}  // namespace detjax

#define DETJAX_POOL ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
#define DETJAX_EXPORT(name, binding) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(detjax_##name, with_tables(name), binding)
