// The binary interface of DLPack 1.x: tensors in memory, and the C exchange API.
//
// Written from the published specification (https://dmlc.github.io/dlpack/latest/c_api.html); names and
// order of the fields are that format's.  A type that speaks the exchange API has the attribute
// `__dlpack_c_exchange_api__`, a capsule named kExchangeCapsule around an ExchangeApi.
#pragma once

#include <cstdint>

namespace ep::python::dlpack {

inline constexpr uint32_t kMajor = 1, kMinor = 1;
inline constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

enum DeviceType : int32_t { kCPU = 1, kCUDA = 2, kCUDAHost = 3 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8_e4m3fn = 10,
  kFloat8_e5m2 = 12,
  kFloat8_e8m0fnu = 14,
  kFloat4_e2m1fn = 17,
};

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // elements; null: row-major
  uint64_t byte_offset;
};

// The format before 1.0.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

inline constexpr uint64_t kReadOnly = 1;

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

// Every function returns 0, or -1 with a Python exception set (the allocator: through SetError).
struct ExchangeApi {
  using SetError = void (*)(void* context, const char* kind, const char* message);

  Version version;
  void* previous;
  // Needs no interpreter lock.
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* context, SetError);
  int (*from_object)(void* object, ManagedTensorVersioned** out);
  int (*to_object)(ManagedTensorVersioned* tensor, void** out);
  int (*view_of_object)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace ep::python::dlpack
