// A tensor as the library sees it: a view, with an optional owner that keeps the memory alive.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "ep/version.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

enum class DType : uint8_t {
  kUInt8,
  kInt8,
  kBool,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kComplex64,
  kComplex128,
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E8M0FNU,
  kFloat4E2M1FNx2,
};

// Bytes of one element.
constexpr uint32_t num_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kFloat8E8M0FNU:
    case DType::kFloat4E2M1FNx2:
      return 1;
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kComplex64:
    case DType::kFloat64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

// The name PyTorch gives it, for messages.
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kBool:
      return "bool";
    case DType::kInt16:
      return "int16";
    case DType::kUInt16:
      return "uint16";
    case DType::kInt32:
      return "int32";
    case DType::kUInt32:
      return "uint32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt64:
      return "uint64";
    case DType::kComplex64:
      return "complex64";
    case DType::kComplex128:
      return "complex128";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3FN:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kFloat8E8M0FNU:
      return "float8_e8m0fnu";
    case DType::kFloat4E2M1FNx2:
      return "float4_e2m1fn_x2";
  }
  return "unknown";
}

inline constexpr uint32_t kMaxDims = 8;

// Where memory lives.
enum class DeviceKind : uint8_t { kCPU, kCUDA };
struct DeviceId {
  DeviceKind kind = DeviceKind::kCPU;
  int32_t index = 0;
  friend bool operator==(const DeviceId&, const DeviceId&) = default;
};

// Copying a Tensor copies the view.  An undefined tensor (no dimensions, `defined()` false) stands for
// "not given".  Zero-element tensors may have a null pointer.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kUInt8;
  uint32_t num_dims = 0;
  std::array<int64_t, kMaxDims> shape{};    // elements
  std::array<int64_t, kMaxDims> strides{};  // elements
  DeviceId device{};
  std::shared_ptr<void> owner{};  // keeps `data` alive; empty: the caller does

  bool defined() const { return num_dims != 0; }
  int64_t size(uint32_t dim) const { return shape[dim]; }
  int64_t num_elements() const {
    int64_t n = 1;
    for (uint32_t d = 0; d < num_dims; ++d)
      n *= shape[d];
    return n;
  }

  // A row-major view of `data`.  REQUIRES: at most kMaxDims dimensions.
  static Tensor contiguous(void* data,
                           DType dtype,
                           std::initializer_list<int64_t> shape,
                           std::shared_ptr<void> owner = {}) {
    Tensor t;
    t.data = data;
    t.dtype = dtype;
    for (const int64_t n : shape)
      t.shape[t.num_dims++] = n;
    int64_t stride = 1;
    for (uint32_t d = t.num_dims; d-- > 0;) {
      t.strides[d] = stride;
      stride *= t.shape[d];
    }
    t.owner = std::move(owner);
    return t;
  }
};

}  // namespace ep::inline EP_ABI_NAMESPACE
