// What dispatch and combine return: frozen objects whose tensors are made on first access.
#pragma once

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ep/buffer.hpp"
#include "interpreter.hpp"
#include "tensors.hpp"

namespace ep::python {

// The tensors of a dispatch's result as Python names them; extras, a list, come beside.
struct NamedTensor {
  const char* name;
  Tensor DispatchTensors::*member;
  const char* doc;
};
std::span<const NamedTensor> dispatch_tensors();

// A handle, and the kind of arrays that its tensors are shown as.
struct PyHandle {
  Handle handle;
  ArrayKind kind;
};

// Python objects by name, each made once.  Under the interpreter's lock.
class Made {
 public:
  template <typename Make>
  py::object get(const char* name, Make make) {
    const auto [at, is_new] = objects_.try_emplace(name);
    if (is_new) at->second = make();
    return at->second;
  }

 private:
  std::map<std::string_view, py::object> objects_;
};

class DispatchOutput {
 public:
  DispatchOutput(DispatchResult result, ArrayKind kind)
      : result_(std::move(result)), kind_(std::move(kind)) {}

  const DispatchResult& result() const { return result_; }
  const ArrayKind& kind() const { return kind_; }
  py::object tensor(const char* name, Tensor DispatchTensors::*member) {
    return made_.get(name, [&] { return kind_.make(result_.*member); });
  }
  template <typename Make>
  py::object get(const char* name, Make make) {
    return made_.get(name, make);
  }
  // The caller's own array is given back as it came.
  void set(const char* name, py::object array) {
    made_.get(name, [&] { return std::move(array); });
  }

 private:
  DispatchResult result_;
  ArrayKind kind_;
  Made made_;
};

class CombineOutput {
 public:
  CombineOutput(CombineResult result, ArrayKind kind)
      : result_(std::move(result)), kind_(std::move(kind)) {}

  const CombineResult& result() const { return result_; }
  py::object tensor(const char* name, Tensor CombineResult::*member) {
    return made_.get(name, [&] { return kind_.make(result_.*member); });
  }
  // The caller's own `out` is given back as it came.
  void set_x(py::object x) {
    made_.get("x", [&] { return std::move(x); });
  }

 private:
  CombineResult result_;
  ArrayKind kind_;
  Made made_;
};

}  // namespace ep::python
