// One owner per file descriptor.
#pragma once

#include <utility>

#include <unistd.h>

namespace ep::fabric {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int raw) : raw_(raw) {}
  Fd(Fd&& other) noexcept : raw_(std::exchange(other.raw_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  // Linux frees the number even when close() is interrupted, so it is never tried twice.
  ~Fd() {
    if (raw_ >= 0) ::close(raw_);
  }

  int get() const { return raw_; }
  explicit operator bool() const { return raw_ >= 0; }

 private:
  int raw_ = -1;
};

}  // namespace ep::fabric
