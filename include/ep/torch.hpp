// at::Tensor <-> ep::Tensor, for engines built with libtorch.  Header-only, so it is compiled against
// the caller's libtorch, whichever that is; ep/ep.hpp does not include it, and the library links no
// torch.  No data is copied in either direction.
//
// A tensor may be dropped by a thread of the library, after an asynchronous call.  Where Python holds it
// too, that needs the interpreter's lock: do not hold that lock while you wait for ep.
//
//   ep::DispatchResult rows = buffer.dispatch({.x = ep::from_torch(x), .topk_idx = ep::from_torch(ids)});
//   at::Tensor received = ep::to_torch(rows.x);
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include "ep/error.hpp"
#include "ep/tensor.hpp"
#include "ep/version.hpp"

#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#error \
    "this libtorch has the old std::string (_GLIBCXX_USE_CXX11_ABI=0), ep the new: take one with the C++11 ABI"
#endif

namespace ep::inline EP_ABI_NAMESPACE {

namespace detail::torch_bridge {

struct KnownType {
  DType dtype;
  c10::ScalarType torch;
};

// Visits every pair that this libtorch has: asked of the enumeration itself, since the unsigned
// integers came with 2.3, float8_e8m0fnu with 2.7 and float4_e2m1fn_x2 with 2.8.
template <class S, class Visit>
constexpr void for_each_type(Visit visit) {
  visit(DType::kUInt8, S::Byte);
  visit(DType::kInt8, S::Char);
  visit(DType::kBool, S::Bool);
  visit(DType::kInt16, S::Short);
  visit(DType::kInt32, S::Int);
  visit(DType::kInt64, S::Long);
  visit(DType::kComplex64, S::ComplexFloat);
  visit(DType::kComplex128, S::ComplexDouble);
  visit(DType::kFloat64, S::Double);
  visit(DType::kFloat32, S::Float);
  visit(DType::kFloat16, S::Half);
  visit(DType::kBFloat16, S::BFloat16);
  if constexpr (requires { S::UInt16; }) visit(DType::kUInt16, S::UInt16);
  if constexpr (requires { S::UInt32; }) visit(DType::kUInt32, S::UInt32);
  if constexpr (requires { S::UInt64; }) visit(DType::kUInt64, S::UInt64);
  if constexpr (requires { S::Float8_e4m3fn; }) visit(DType::kFloat8E4M3FN, S::Float8_e4m3fn);
  if constexpr (requires { S::Float8_e5m2; }) visit(DType::kFloat8E5M2, S::Float8_e5m2);
  if constexpr (requires { S::Float8_e8m0fnu; }) visit(DType::kFloat8E8M0FNU, S::Float8_e8m0fnu);
  if constexpr (requires { S::Float4_e2m1fn_x2; })
    visit(DType::kFloat4E2M1FNx2, S::Float4_e2m1fn_x2);
}

// For messages: "Half [3, 128]".
inline std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes();
  return text.str();
}

[[noreturn]] inline void refuse(const char* name, const std::string& why) {
  throw InvalidArgument(std::string(name) + " " + why);
}

inline DeviceId device_of(const at::Tensor& tensor, const char* name) {
  const c10::Device device = tensor.device();
  const auto index = static_cast<int32_t>(device.has_index() ? device.index() : 0);
  if (device.is_cpu()) return {DeviceKind::kCPU, 0};
  if (device.is_cuda()) return {DeviceKind::kCUDA, index};
  refuse(name, "is on " + device.str() + "; ep knows cpu and cuda");
}

// What has no memory of the plain kind, or memory that must not be taken at its word.
inline void check_plain(const at::Tensor& tensor, const char* name) {
  if (tensor.requires_grad() && c10::GradMode::is_enabled()) {
    refuse(name,
           "requires grad, and dispatch and combine record no gradients: call them under "
           "at::NoGradGuard, or give detach()");
  }
  if (tensor.layout() != c10::kStrided)
    refuse(name, "is not a strided tensor but " + describe(tensor) + ", sparse or opaque");
  if (tensor.is_conj() || tensor.is_neg())
    refuse(name, "is a lazy conjugate or negative: give resolve_conj().resolve_neg()");
  if (tensor.dim() < 1 || tensor.dim() > static_cast<int64_t>(kMaxDims)) {
    refuse(name, "has " + std::to_string(tensor.dim()) + " dimensions; it must have 1 to " +
                     std::to_string(kMaxDims));
  }
}

}  // namespace detail::torch_bridge

// The dtype of the same name.  Throws InvalidArgument for one that ep does not carry (quantised
// types, the fnuz forms of fp8, bit types).
inline DType from_torch(c10::ScalarType type, const char* name = "tensor") {
  std::optional<DType> found;
  detail::torch_bridge::for_each_type<c10::ScalarType>([&](DType dtype, c10::ScalarType torch) {
    if (torch == type) found = dtype;
  });
  if (!found) {
    detail::torch_bridge::refuse(
        name, std::string("has dtype ") + c10::toString(type) + ", which ep does not carry");
  }
  return *found;
}

// Throws Unsupported where this libtorch is too old to know the dtype.
inline c10::ScalarType to_torch(DType dtype) {
  std::optional<c10::ScalarType> found;
  detail::torch_bridge::for_each_type<c10::ScalarType>([&](DType known, c10::ScalarType torch) {
    if (known == dtype) found = torch;
  });
  if (!found) {
    throw Unsupported(std::string("this libtorch has no ") + name_of(dtype) +
                      "; a newer one does, or view the rows as uint8");
  }
  return *found;
}

// A view of `tensor`, whatever its strides, that keeps its storage alive.  An undefined tensor gives
// an undefined one: "not given".  `name` is what messages call it.
// Throws InvalidArgument when it requires grad with grad mode on; is on neither a CPU nor a CUDA
// device; is sparse, a lazy conjugate or negative; has no dimension or more than kMaxDims; or is of a
// dtype that ep does not carry.
inline Tensor from_torch(const at::Tensor& tensor, const char* name = "tensor") {
  if (!tensor.defined()) return {};
  detail::torch_bridge::check_plain(tensor, name);
  Tensor view;
  view.dtype = from_torch(tensor.scalar_type(), name);
  view.device = detail::torch_bridge::device_of(tensor, name);
  view.num_dims = static_cast<uint32_t>(tensor.dim());
  for (uint32_t d = 0; d < view.num_dims; ++d) {
    view.shape[d] = tensor.size(d);
    view.strides[d] = tensor.stride(d);
  }
  view.data = tensor.data_ptr();
  view.owner = std::make_shared<at::Tensor>(tensor);
  return view;
}

// A view of `tensor` with its strides, on its device; its storage holds the tensor's owner, so rows in
// a buffer's window stay mapped while torch has them.  The reverse of "not given" is an undefined
// tensor.  Without an owner the memory is the caller's to keep.
// Throws Unsupported as to_torch(DType) does.
inline at::Tensor to_torch(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const bool on_cpu = tensor.device.kind == DeviceKind::kCPU;
  const c10::Device device =
      on_cpu ? c10::Device(c10::kCPU)
             : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(tensor.device.index));
  const auto options = at::TensorOptions().dtype(to_torch(tensor.dtype)).device(device);
  return at::from_blob(
      tensor.data, at::IntArrayRef(tensor.shape.data(), tensor.num_dims),
      at::IntArrayRef(tensor.strides.data(), tensor.num_dims),
      [owner = tensor.owner](void*) mutable { owner.reset(); }, options, device);
}

// For BufferConfig::allocator: outputs and handles come from torch's CPU allocator, where its profiler
// sees them.  `allocator` must outlive what was allocated; null: torch's own at the time of the call.
inline std::function<std::shared_ptr<void>(uint64_t)> torch_allocator(
    c10::Allocator* allocator = nullptr) {
  return [allocator](uint64_t bytes) -> std::shared_ptr<void> {
    constexpr uint64_t kAlign = 256;  // BufferConfig asks for it; torch gives 64
    try {
      c10::Allocator* const from = allocator != nullptr ? allocator : c10::GetCPUAllocator();
      const auto block = std::make_shared<c10::DataPtr>(from->allocate(bytes + kAlign - 1));
      const auto address = reinterpret_cast<uintptr_t>(block->get());
      const uint64_t skipped = (kAlign - address % kAlign) % kAlign;
      return {block, static_cast<std::byte*>(block->get()) + skipped};
    } catch (const std::exception&) {  // c10::Error: not enough memory
      throw std::bad_alloc();
    }
  };
}

}  // namespace ep::inline EP_ABI_NAMESPACE
