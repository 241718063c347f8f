// Errors of one rank's own that its peers hear of as more than "it refused its arguments".
#pragma once

#include "ep/error.hpp"
#include "layout/record.hpp"

namespace ep::buffer {

// T is more than was declared.
class TooManyTokens : public CapacityError {
  using CapacityError::CapacityError;
};
// The caller's allocator, or the machine, has no memory.
class NoHostMemory : public CapacityError {
  using CapacityError::CapacityError;
};
// No free extent of the arena is large enough.
class NoExtent : public CapacityError {
  using CapacityError::CapacityError;
};

}  // namespace ep::buffer
