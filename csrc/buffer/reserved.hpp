// Names that exist for later versions.
#pragma once

#include "ep/buffer.hpp"

namespace ep::buffer {

// Throw Unsupported naming what is asked for and what would do.
void check_reserved(const DispatchArgs& args);
void check_reserved(const CombineArgs& args);

}  // namespace ep::buffer
