// The twins of EPBuffer's calls that return a Status.
#include "ep/status.hpp"

#include "ep/buffer.hpp"

namespace ep {

Status Status::current() noexcept {
  Status status;
  status.thrown_ = std::current_exception();
  // What is caught by reference is the object that thrown_ keeps, not a copy of it (Itanium C++ ABI 2.4).
  try {
    throw;
  } catch (const Error& error) {
    status.error_ = &error;
    status.message_ = error.what();
  } catch (const std::exception& error) {
    status.message_ = error.what();
  } catch (...) {
    status.message_ = "an exception that is no std::exception";
  }
  return status;
}

void Status::raise() const {
  if (thrown_ != nullptr) std::rethrow_exception(thrown_);
}

namespace {

template <typename Call>
Status status_of(Call call) noexcept {
  try {
    call();
    return {};
  } catch (...) {
    return Status::current();
  }
}

}  // namespace

Status EPBuffer::try_create(std::shared_ptr<Communicator> group,
                            const BufferConfig& config,
                            std::optional<EPBuffer>& result) noexcept {
  return status_of([&] { result = EPBuffer(std::move(group), config); });
}

Status EPBuffer::try_dispatch(const DispatchArgs& args, DispatchResult& result) noexcept {
  return status_of([&] { dispatch(args, result); });
}

Status EPBuffer::try_combine(const CombineArgs& args, CombineResult& result) noexcept {
  return status_of([&] { combine(args, result); });
}

Status EPBuffer::try_expert_output(const Handle& handle,
                                   uint32_t hidden,
                                   DType dtype,
                                   Tensor& result) noexcept {
  return status_of([&] { result = expert_output(handle, hidden, dtype); });
}

Status EPBuffer::try_check() noexcept {
  return status_of([&] { check(); });
}

Status EPBuffer::try_resync(uint64_t& result) noexcept {
  return status_of([&] { result = resync(); });
}

}  // namespace ep
