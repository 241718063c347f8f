#include "buffer/checks.hpp"

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::buffer {

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (uint32_t d = 0; d < t.num_dims; ++d)
    text += str(d == 0 ? "" : ", ", t.shape[d]);
  return text + "]";
}

void check_given(const Tensor& t, const char* name) {
  if (!t.defined()) throw InvalidArgument(str(name, " is required"));
  if (t.device.kind != DeviceKind::kCPU) {
    throw InvalidArgument(str(name, " is on a CUDA device, the buffer on the CPU"));
  }
  for (uint32_t d = 0; d < t.num_dims; ++d) {
    if (t.shape[d] < 0) throw InvalidArgument(str(name, " has shape ", shape_text(t)));
  }
  if (t.data == nullptr && t.num_elements() != 0)
    throw InvalidArgument(str(name, " has a null pointer"));
}

void check_dims(const Tensor& t, const char* name, uint32_t num_dims) {
  check_given(t, name);
  if (t.num_dims == num_dims) return;
  throw InvalidArgument(
      str(name, " has shape ", shape_text(t), "; ", num_dims, " dimensions are needed"));
}

void check_shape(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  check_dims(t, name, 2);
  if (t.shape[0] == rows && t.shape[1] == columns) return;
  throw InvalidArgument(
      str(name, " has shape ", shape_text(t), "; [", rows, ", ", columns, "] is needed"));
}

void check_unit_column_stride(const Tensor& t, const char* name) {
  const uint32_t last = t.num_dims - 1;
  if (t.shape[last] <= 1 || t.strides[last] == 1 || t.num_elements() == 0) return;
  throw InvalidArgument(str(name, " has column stride ", t.strides[last],
                            "; its columns must be contiguous (stride 1): call .contiguous()"));
}

bool is_compute_dtype(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat32;
}

kernels::Element element_of(DType dtype, const char* name) {
  switch (dtype) {
    case DType::kBFloat16:
      return kernels::Element::kBF16;
    case DType::kFloat16:
      return kernels::Element::kFP16;
    case DType::kFloat32:
      return kernels::Element::kFP32;
    default:
      break;
  }
  throw InvalidArgument(
      str(name, " has dtype ", name_of(dtype), "; bfloat16, float16 or float32 is needed"));
}

DType dtype_of(kernels::Element element) {
  switch (element) {
    case kernels::Element::kBF16:
      return DType::kBFloat16;
    case kernels::Element::kFP16:
      return DType::kFloat16;
    case kernels::Element::kFP32:
      return DType::kFloat32;
  }
  return DType::kFloat32;
}

kernels::Rows rows_view(const Tensor& t) {
  uint64_t columns = 1;
  for (uint32_t d = 1; d < t.num_dims; ++d)
    columns *= static_cast<uint64_t>(t.shape[d]);
  const uint32_t size = num_bytes(t.dtype);
  return {static_cast<const std::byte*>(t.data), t.strides[0] * size,
          static_cast<uint32_t>(columns * size)};
}

kernels::Strided strided_view(const Tensor& t) {
  const uint32_t size = num_bytes(t.dtype);
  const bool matrix = t.num_dims == 2;
  return {static_cast<const std::byte*>(t.data), t.strides[0] * size,
          matrix ? t.strides[1] * static_cast<int64_t>(size) : int64_t{0},
          matrix ? static_cast<uint32_t>(t.shape[1]) : 1u, size};
}

}  // namespace ep::buffer
