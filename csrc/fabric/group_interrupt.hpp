// Lends a communicator another interrupt for the length of some calls.
#pragma once

#include <functional>
#include <utility>

#include "ep/communicator.hpp"

namespace ep::fabric {

// While it lives, the group's waits ask `interrupt`; an empty one leaves them the group's own.
class GroupInterrupt {
 public:
  GroupInterrupt(Communicator& group, std::function<bool()> interrupt)
      : group_(group), own_(group.interrupt) {
    if (interrupt) group_.interrupt = std::move(interrupt);
  }
  ~GroupInterrupt() { group_.interrupt = std::move(own_); }
  GroupInterrupt(const GroupInterrupt&) = delete;
  GroupInterrupt& operator=(const GroupInterrupt&) = delete;

 private:
  Communicator& group_;
  std::function<bool()> own_;
};

}  // namespace ep::fabric
