// The wait of a host thread: one Backoff with a deadline and an interrupt.
#pragma once

#include <cstdint>
#include <functional>

#include "common/doorbell.hpp"
#include "common/function_ref.hpp"
#include "device/device.hpp"
#include "ep/config.hpp"

namespace ep::device::host {

// Device::wait of the host target; its contract is there.
WaitResult wait_on(Doorbell& doorbell,
                   FunctionRef<bool()> ready,
                   uint64_t deadline_ns,
                   const std::function<bool()>& interrupt,
                   const WaitPolicy& policy);

}  // namespace ep::device::host
