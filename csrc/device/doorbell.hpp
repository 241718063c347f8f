// Ringing a doorbell from host code; kernels ring through their Coop.
#pragma once

#include "common/doorbell.hpp"

namespace ep::device {

// Wakes every sleeper.  Call it after the store that a sleeper may wait for.
void ring(Doorbell& doorbell) noexcept;

}  // namespace ep::device
