// A doorbell: how a sleeper learns that a word it polls may have changed.
//
// State:    `generation` counts rings; `sleepers` counts threads that sleep or are about to.
// Writers:  whoever stored a word that somebody may wait for rings afterwards.
// Readers:  a waiter adds itself to `sleepers`, reads `generation`, looks at its word again, and only then
//           sleeps on `generation` (futex); so a ring between look and sleep is never lost.
// Pairing:  the ring's increment (seq_cst) with the waiter's read of `generation` (seq_cst): a waiter that
//           read the new value also sees the word.  A process that dies asleep leaves `sleepers` too high,
//           which costs its peers a system call per ring and nothing else.
// Lives in a window (shared between processes) or in private memory; fresh memory (all zero) is valid.
#pragma once

#include "common/target.hpp"

namespace ep {

struct alignas(64) Doorbell {
  uint32_t generation;
  uint32_t sleepers;
};

}  // namespace ep
