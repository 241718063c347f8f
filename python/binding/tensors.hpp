// Arrays of Python libraries as ep::Tensor, and back.
#pragma once

#include <memory>

#include "dlpack_abi.hpp"
#include "ep/tensor.hpp"
#include "interpreter.hpp"

namespace ep::python {

// Which library an array belongs to, and so how to make another of its kind.
class ArrayKind {
 public:
  ArrayKind() = default;  // numpy's, where there is one

  // Throws TypeError naming the argument and the type.
  static ArrayKind of(py::handle object, const char* name);

  // Reads the array.  The result keeps its memory alive; any thread may drop it.  `values`: these are
  // numbers to compute with, so numpy's uint16 are bit patterns of bfloat16.
  // Throws TypeError or InvalidArgument naming the argument, also for a tensor that requires grad while
  // gradients are recorded: the buffer's operations would cut its graph in silence.
  Tensor read(py::handle object, const char* name, bool values = false) const;
  // The same for an array to write into; a read-only one is an InvalidArgument.
  Tensor read_target(py::handle object, const char* name) const;

  // An array of this kind that views the tensor; None for an undefined one.
  // numpy has no bfloat16 and no 8-bit floats: uint16 and uint8 with the same bits.
  py::object make(const Tensor& tensor) const;

  const dlpack::ExchangeApi* exchange() const { return exchange_; }

 private:
  enum class Way : uint8_t {
    kNumPy,     // the buffer interface
    kExchange,  // the C exchange API of the array's type
    kCapsule,   // __dlpack__
  };
  Way way_ = Way::kNumPy;
  const dlpack::ExchangeApi* exchange_ = nullptr;
  std::shared_ptr<PyObject> from_dlpack_{};  // kCapsule: of the array's namespace, if it has one
};

// What reads or makes arrays of whatever kind comes.
Tensor read_tensor(py::handle object, const char* name, bool values = false);
// As above; None gives an undefined tensor.
Tensor read_optional(py::handle object, const char* name, bool values = false);

// Memory from the array library that speaks `exchange`, aligned to 256 bytes.  Needs no lock.
std::shared_ptr<void> allocate_from(const dlpack::ExchangeApi& exchange, uint64_t num_bytes);

// "bfloat16", torch.bfloat16, numpy.dtype("float32"), numpy.float32 ...
DType dtype_of(py::handle dtype, const char* name);

void bind_tensors(py::module_& module);

}  // namespace ep::python
