#include "tensors.hpp"

#include <array>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include <pybind11/numpy.h>

#include "ep/error.hpp"

namespace ep::python {

namespace {

constexpr uint64_t kAllocationAlignBytes = 256;

struct KnownType {
  DType dtype;
  dlpack::DataType dlpack;
  const char* numpy;  // what numpy calls it, or the integer of the same width
};

constexpr std::array kKnownTypes = {
    KnownType{DType::kUInt8, {dlpack::kUInt, 8, 1}, "uint8"},
    KnownType{DType::kInt8, {dlpack::kInt, 8, 1}, "int8"},
    KnownType{DType::kBool, {dlpack::kBool, 8, 1}, "bool"},
    KnownType{DType::kInt16, {dlpack::kInt, 16, 1}, "int16"},
    KnownType{DType::kUInt16, {dlpack::kUInt, 16, 1}, "uint16"},
    KnownType{DType::kInt32, {dlpack::kInt, 32, 1}, "int32"},
    KnownType{DType::kUInt32, {dlpack::kUInt, 32, 1}, "uint32"},
    KnownType{DType::kInt64, {dlpack::kInt, 64, 1}, "int64"},
    KnownType{DType::kUInt64, {dlpack::kUInt, 64, 1}, "uint64"},
    KnownType{DType::kComplex64, {dlpack::kComplex, 64, 1}, "complex64"},
    KnownType{DType::kComplex128, {dlpack::kComplex, 128, 1}, "complex128"},
    KnownType{DType::kFloat64, {dlpack::kFloat, 64, 1}, "float64"},
    KnownType{DType::kFloat32, {dlpack::kFloat, 32, 1}, "float32"},
    KnownType{DType::kFloat16, {dlpack::kFloat, 16, 1}, "float16"},
    KnownType{DType::kBFloat16, {dlpack::kBfloat, 16, 1}, "uint16"},
    KnownType{DType::kFloat8E4M3FN, {dlpack::kFloat8_e4m3fn, 8, 1}, "uint8"},
    KnownType{DType::kFloat8E5M2, {dlpack::kFloat8_e5m2, 8, 1}, "uint8"},
    KnownType{DType::kFloat8E8M0FNU, {dlpack::kFloat8_e8m0fnu, 8, 1}, "uint8"},
    KnownType{DType::kFloat4E2M1FNx2, {dlpack::kFloat4_e2m1fn, 4, 2}, "uint8"},
};

const KnownType& known(DType dtype) {
  for (const KnownType& type : kKnownTypes) {
    if (type.dtype == dtype) return type;
  }
  throw Error("a dtype is missing from kKnownTypes");
}

std::string type_name(py::handle object) {
  return Py_TYPE(object.ptr())->tp_name;
}

[[noreturn]] void refuse_dtype(const char* name, const std::string& dtype) {
  throw InvalidArgument(std::string(name) + " has dtype " + dtype + ", which ep does not carry");
}

void check_dims(const char* name, int64_t num_dims) {
  if (num_dims < 1 || num_dims > kMaxDims) {
    throw InvalidArgument(std::string(name) + " has " + std::to_string(num_dims) +
                          " dimensions; it must have 1 to " + std::to_string(kMaxDims));
  }
}

Tensor from_dlpack(const dlpack::Tensor& source, const char* name, std::shared_ptr<void> owner) {
  check_dims(name, source.num_dims);
  Tensor tensor;
  tensor.owner = std::move(owner);
  tensor.data = static_cast<std::byte*>(source.data) + source.byte_offset;
  const dlpack::DataType type = source.dtype;
  bool found = false;
  for (const KnownType& candidate : kKnownTypes) {
    if (candidate.dlpack.code != type.code || candidate.dlpack.bits != type.bits ||
        candidate.dlpack.lanes != type.lanes)
      continue;
    tensor.dtype = candidate.dtype;
    found = true;
  }
  if (!found) {
    refuse_dtype(name, "(DLPack code " + std::to_string(type.code) + ", " +
                           std::to_string(type.bits) + " bits, " + std::to_string(type.lanes) +
                           " lanes)");
  }
  if (source.device.type != dlpack::kCPU && source.device.type != dlpack::kCUDAHost) {
    if (source.device.type != dlpack::kCUDA) {
      throw InvalidArgument(std::string(name) + " is on a device of DLPack type " +
                            std::to_string(source.device.type) + "; the buffer is on cpu");
    }
    throw InvalidArgument(std::string(name) + " is on cuda:" + std::to_string(source.device.id) +
                          "; the buffer is on cpu");
  }
  tensor.num_dims = static_cast<uint32_t>(source.num_dims);
  int64_t row_major = 1;
  for (uint32_t d = tensor.num_dims; d-- > 0;) {
    tensor.shape[d] = source.shape[d];
    tensor.strides[d] = source.strides != nullptr ? source.strides[d] : row_major;
    row_major *= source.shape[d];
  }
  return tensor;
}

template <typename Managed>
Tensor take(Managed* managed, const char* name) {
  const std::shared_ptr<void> owner(managed, [](void* p) {
    auto* const m = static_cast<Managed*>(p);
    if (m->deleter != nullptr) m->deleter(m);
  });
  if constexpr (requires { managed->version; }) {
    if (managed->version.major != dlpack::kMajor) {
      throw InvalidArgument(std::string(name) + " speaks DLPack " +
                            std::to_string(managed->version.major) + ", ep speaks 1");
    }
  }
  return from_dlpack(managed->tensor, name, owner);
}

Tensor read_capsule(py::handle object, const char* name) {
  py::object capsule;
  try {
    capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 1));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // older producers know no max_version
    capsule = object.attr("__dlpack__")();
  }
  constexpr const char *kVersioned = "dltensor_versioned", *kLegacy = "dltensor";
  if (PyCapsule_IsValid(capsule.ptr(), kVersioned) != 0) {
    void* const managed = PyCapsule_GetPointer(capsule.ptr(), kVersioned);
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    return take(static_cast<dlpack::ManagedTensorVersioned*>(managed), name);
  }
  if (PyCapsule_IsValid(capsule.ptr(), kLegacy) != 0) {
    void* const managed = PyCapsule_GetPointer(capsule.ptr(), kLegacy);
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    return take(static_cast<dlpack::ManagedTensor*>(managed), name);
  }
  throw py::type_error(std::string(name) + ": " + type_name(object) +
                       ".__dlpack__() returned no DLPack capsule");
}

DType numpy_dtype(const py::dtype& dtype, const char* name, bool values) {
  if (dtype.byteorder() == '>')
    throw InvalidArgument(std::string(name) + " has a foreign byte order");
  // Extension types (ml_dtypes) go by the name they share with PyTorch.
  const auto text = dtype.attr("name").cast<std::string>();
  if (values && text == "uint16") return DType::kBFloat16;
  for (const KnownType& type : kKnownTypes) {
    if (text == name_of(type.dtype)) return type.dtype;
  }
  refuse_dtype(name, text);
}

Tensor read_numpy(const py::array& array, const char* name, bool values) {
  check_dims(name, array.ndim());
  Tensor tensor;
  tensor.dtype = numpy_dtype(array.dtype(), name, values);
  tensor.num_dims = static_cast<uint32_t>(array.ndim());
  const auto size = static_cast<int64_t>(num_bytes(tensor.dtype));
  for (uint32_t d = 0; d < tensor.num_dims; ++d) {
    tensor.shape[d] = array.shape(d);
    if (array.strides(d) % size != 0) {
      throw InvalidArgument(std::string(name) + " has a stride of " +
                            std::to_string(array.strides(d)) +
                            " bytes, no multiple of its element size");
    }
    tensor.strides[d] = array.strides(d) / size;
  }
  tensor.data = const_cast<void*>(array.data());
  tensor.owner = share(array);
  return tensor;
}

// torch's, by what a tensor says of itself: most say no.
bool records_gradients(py::handle tensor) {
  const py::object requires_grad = py::getattr(tensor, "requires_grad", py::none());
  if (requires_grad.ptr() != Py_True) return false;
  return py::module_::import("torch").attr("is_grad_enabled")().cast<bool>();
}

// A tensor of ours as DLPack hands it over: the deleter drops the owner.
template <typename Managed>
struct Lent {
  Managed managed{};
  Tensor tensor;

  static Managed* make(const Tensor& tensor) {
    auto* const lent = new Lent{{}, tensor};
    lent->managed.context = lent;
    lent->managed.deleter = [](Managed* m) { delete static_cast<Lent*>(m->context); };
    if constexpr (requires { lent->managed.version; })
      lent->managed.version = {dlpack::kMajor, dlpack::kMinor};
    dlpack::Tensor& out = lent->managed.tensor;
    out.data = tensor.data;
    out.device = {dlpack::kCPU, 0};
    out.num_dims = static_cast<int32_t>(tensor.num_dims);
    out.dtype = known(tensor.dtype).dlpack;
    out.shape = lent->tensor.shape.data();
    out.strides = lent->tensor.strides.data();
    return &lent->managed;
  }
};

template <typename Managed>
py::object lend_capsule(const Tensor& tensor, const char* name) {
  Managed* const managed = Lent<Managed>::make(tensor);
  PyObject* const capsule = PyCapsule_New(managed, name, [](PyObject* self) {
    // Renamed by whoever took the tensor over.
    const char* const now = PyCapsule_GetName(self);
    if (now == nullptr || std::string_view(now).starts_with("used_")) return;
    auto* const mine = static_cast<Managed*>(PyCapsule_GetPointer(self, now));
    mine->deleter(mine);
  });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

// For libraries without the exchange API: an object that speaks __dlpack__.
class Array {
 public:
  explicit Array(Tensor tensor) : tensor_(std::move(tensor)) {}

  py::object dlpack(const py::object& max_version) const {
    const bool versioned =
        !max_version.is_none() && max_version.cast<py::tuple>()[0].cast<int>() >= 1;
    return versioned ? lend_capsule<dlpack::ManagedTensorVersioned>(tensor_, "dltensor_versioned")
                     : lend_capsule<dlpack::ManagedTensor>(tensor_, "dltensor");
  }

 private:
  Tensor tensor_;
};

py::object make_numpy(const Tensor& tensor) {
  const auto size = static_cast<py::ssize_t>(num_bytes(tensor.dtype));
  std::vector<py::ssize_t> shape, strides;
  for (uint32_t d = 0; d < tensor.num_dims; ++d) {
    shape.push_back(tensor.shape[d]);
    strides.push_back(tensor.strides[d] * size);
  }
  auto* const owner = new std::shared_ptr<void>(tensor.owner);
  const py::capsule base(owner, [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  return py::array(py::dtype(known(tensor.dtype).numpy), shape, strides, tensor.data, base);
}

// The exchange API of a type; null when it has none.
const dlpack::ExchangeApi* exchange_of(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;  // under the interpreter's lock
  static const dlpack::ExchangeApi* last = nullptr;
  if (type == last_type) return last;
  const py::object capsule =
      py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) return nullptr;
  const auto* const api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule));
  if (api == nullptr) throw py::error_already_set();
  if (api->version.major != dlpack::kMajor) return nullptr;
  Py_INCREF(type);  // or another type could take its address
  Py_XDECREF(last_type);
  last_type = type;
  return last = api;
}

}  // namespace

ArrayKind ArrayKind::of(py::handle object, const char* name) {
  ArrayKind kind;
  if (const auto* const exchange = exchange_of(Py_TYPE(object.ptr()))) {
    kind.way_ = Way::kExchange;
    kind.exchange_ = exchange;
    return kind;
  }
  // Without numpy in the process nothing is an array of numpy's.
  const bool has_numpy = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy") != nullptr;
  if (has_numpy && py::isinstance<py::array>(object)) return kind;
  if (!py::hasattr(object, "__dlpack__")) {
    throw py::type_error(std::string(name) + " is a " + type_name(object) +
                         "; a tensor (torch, numpy, or anything with __dlpack__) is needed");
  }
  kind.way_ = Way::kCapsule;
  if (py::hasattr(object, "__array_namespace__"))
    kind.from_dlpack_ = share(object.attr("__array_namespace__")().attr("from_dlpack"));
  return kind;
}

Tensor ArrayKind::read(py::handle object, const char* name, bool values) const {
  switch (way_) {
    case Way::kNumPy:
      return read_numpy(py::reinterpret_borrow<py::array>(object), name, values);
    case Way::kExchange: {
      dlpack::ManagedTensorVersioned* managed = nullptr;
      if (records_gradients(object)) {
        throw InvalidArgument(std::string(name) +
                              " requires grad: use ep.functional, or torch.no_grad()");
      }
      if (exchange_->from_object(object.ptr(), &managed) != 0) throw py::error_already_set();
      return take(managed, name);
    }
    case Way::kCapsule:
      return read_capsule(object, name);
  }
  return {};
}

Tensor ArrayKind::read_target(py::handle object, const char* name) const {
  // torch knows no read-only tensors, and DLPack producers refuse to lend them without a flag.
  if (way_ == Way::kNumPy && !py::reinterpret_borrow<py::array>(object).writeable())
    throw InvalidArgument(std::string(name) + " is a read-only array");
  return read(object, name, true);
}

py::object ArrayKind::make(const Tensor& tensor) const {
  if (!tensor.defined()) return py::none();
  switch (way_) {
    case Way::kNumPy:
      return make_numpy(tensor);
    case Way::kExchange: {
      void* object = nullptr;
      auto* const managed = Lent<dlpack::ManagedTensorVersioned>::make(tensor);
      if (exchange_->to_object(managed, &object) != 0) throw py::error_already_set();
      return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
    }
    case Way::kCapsule: {
      const py::object array = py::cast(Array(tensor));
      return from_dlpack_ ? py::handle(from_dlpack_.get())(array) : array;
    }
  }
  return py::none();
}

Tensor read_tensor(py::handle object, const char* name, bool values) {
  return ArrayKind::of(object, name).read(object, name, values);
}

Tensor read_optional(py::handle object, const char* name, bool values) {
  return object.is_none() ? Tensor{} : read_tensor(object, name, values);
}

std::shared_ptr<void> allocate_from(const dlpack::ExchangeApi& exchange, uint64_t num_bytes) {
  auto size = static_cast<int64_t>(num_bytes + kAllocationAlignBytes - 1);
  int64_t stride = 1;
  dlpack::Tensor prototype{};
  prototype.device = {dlpack::kCPU, 0};
  prototype.num_dims = 1;
  prototype.dtype = {dlpack::kUInt, 8, 1};
  prototype.shape = &size;
  prototype.strides = &stride;
  dlpack::ManagedTensorVersioned* managed = nullptr;
  const auto ignore = [](void*, const char*, const char*) {};  // it has no memory: what else
  if (exchange.allocate(&prototype, &managed, nullptr, ignore) != 0) throw std::bad_alloc();
  const std::shared_ptr<void> owner = take(managed, "the allocator's tensor").owner;
  const auto address =
      reinterpret_cast<uintptr_t>(managed->tensor.data) + managed->tensor.byte_offset;
  const uintptr_t aligned = (address + kAllocationAlignBytes - 1) & ~(kAllocationAlignBytes - 1);
  return {owner, reinterpret_cast<void*>(aligned)};
}

DType dtype_of(py::handle dtype, const char* name) {
  std::string text;
  if (py::isinstance<py::str>(dtype))
    text = dtype.cast<std::string>();
  else if (py::hasattr(dtype, "__name__"))  // numpy.float32
    text = py::str(dtype.attr("__name__"));
  else
    text = py::str(dtype);  // torch.float32, numpy.dtype("float32")
  if (text.starts_with("torch.")) text = text.substr(6);
  constexpr std::array<std::pair<const char*, DType>, 5> kShort = {{{"bf16", DType::kBFloat16},
                                                                    {"fp16", DType::kFloat16},
                                                                    {"half", DType::kFloat16},
                                                                    {"fp32", DType::kFloat32},
                                                                    {"float", DType::kFloat32}}};
  for (const auto& [alias, value] : kShort) {
    if (text == alias) return value;
  }
  for (const KnownType& type : kKnownTypes) {
    if (text == name_of(type.dtype)) return type.dtype;
  }
  throw InvalidArgument(
      std::string(name) + "=" + text +
      " is no dtype that ep knows; \"bfloat16\", \"float16\", \"float32\" are some");
}

void bind_tensors(py::module_& module) {
  py::class_<Array>(module, "Array", "A tensor for libraries that take __dlpack__ only.")
      .def(
          "__dlpack__",
          [](const Array& self, const py::object&, const py::object& max_version, const py::object&,
             const py::object&) { return self.dlpack(max_version); },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
      .def("__dlpack_device__",
           [](const Array&) { return py::make_tuple(int32_t{dlpack::kCPU}, 0); });
}

}  // namespace ep::python
