#include "device/doorbell.hpp"

#include <atomic>

#include "device/host/futex.hpp"

namespace ep::device {

void ring(Doorbell& doorbell) noexcept {
  // seq_cst on both lines: either the waiter's read of `generation` comes after this increment, and
  // it sees the word that was stored before; or it comes before, and so does its registration, and
  // the load below sees a sleeper.
  std::atomic_ref<uint32_t>{doorbell.generation}.fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref<uint32_t>{doorbell.sleepers}.load(std::memory_order_seq_cst) != 0) {
    host::futex_wake_all(&doorbell.generation);
  }
}

}  // namespace ep::device
