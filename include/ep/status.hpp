// The outcome of a call that does not throw.
#pragma once

#include <exception>

#include "ep/error.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

// Copying shares the error.  Nothing of it allocates or throws, but raise().
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;  // good

  // REQUIRES: inside a catch block.  What is being handled.
  static Status current() noexcept;

  bool ok() const noexcept { return thrown_ == nullptr; }
  ErrorKind kind() const noexcept {
    if (error_ != nullptr) return error_->kind();
    return ok() ? ErrorKind::kNone : ErrorKind::kError;
  }
  // "ok", or the error's text.  Valid as long as the status or a copy of it.
  const char* message() const noexcept { return message_; }
  // By kind() a CapacityError, Timeout...; null when ok(), and for what is no ep::Error (std::bad_alloc).
  const Error* error() const noexcept { return error_; }
  // Throws the error; does nothing when ok().
  void raise() const;

 private:
  std::exception_ptr thrown_{};  // keeps what the two below point into
  const Error* error_ = nullptr;
  const char* message_ = "ok";
};

}  // namespace ep::inline EP_ABI_NAMESPACE
