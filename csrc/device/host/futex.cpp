#include "device/host/futex.hpp"

#if !defined(__linux__)
#error "device/host sleeps on Linux futexes; port futex_wait and futex_wake_all to this system."
#endif

#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ep::device::host {

namespace {
constexpr uint64_t kNanosPerSecond = 1'000'000'000;
// SYS_futex reads the kernel's old timespec, two longs.
static_assert(sizeof(timespec) == 2 * sizeof(long));
}  // namespace

void futex_wait(uint32_t* word, uint32_t expected, uint64_t timeout_ns) noexcept {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(timeout_ns / kNanosPerSecond);
  timeout.tv_nsec = static_cast<long>(timeout_ns % kNanosPerSecond);
  // The result does not matter: woken, EAGAIN, EINTR and ETIMEDOUT all mean "look again".
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(uint32_t* word) noexcept {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ep::device::host
