// Sleeping on a 32-bit word, across processes.  Doorbells live in memory that processes share, so
// these are the shared futexes (not FUTEX_PRIVATE_FLAG), which the kernel keys by the page behind
// the address.
#pragma once

#include <cstdint>

namespace ep::device::host {

// Sleeps while *word == expected, at most `timeout_ns`.  May return early for any reason (a signal,
// a wake meant for another word): the caller looks again.
void futex_wait(uint32_t* word, uint32_t expected, uint64_t timeout_ns) noexcept;

// Wakes everybody who sleeps on `word`.
void futex_wake_all(uint32_t* word) noexcept;

}  // namespace ep::device::host
