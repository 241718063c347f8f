// Python values as the library's options.  Every function names the argument and the value in its error.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ep/buffer.hpp"
#include "interpreter.hpp"

namespace ep::python {

// Throws TypeError for what is no integer, InvalidArgument for what is below 0 or above `most`.
uint64_t read_integer(py::handle value, const char* name, uint64_t most);
inline uint32_t read_u32(py::handle value, const char* name) {
  return static_cast<uint32_t>(read_integer(value, name, ~uint32_t{0}));
}
std::optional<uint32_t> read_optional_u32(py::handle value, const char* name);
std::optional<bool> read_optional_bool(py::handle value, const char* name);
bool read_bool(py::handle value, const char* name);
double read_seconds(py::handle value, const char* name);
std::string read_text(py::handle value, const char* name);

// By name; None is what an unset option is.  Throws InvalidArgument listing the names.
std::optional<Layout> read_layout(py::handle value);
std::optional<Overflow> read_overflow(py::handle value);
std::optional<Ids> read_ids(py::handle value);
std::optional<Outputs> read_outputs(py::handle value);
Quant read_quant(py::handle value);
Mode read_mode(py::handle value);
ScaleLayout read_scale_layout(py::handle value);
const char* name_of(Layout layout);

// None, one event or a list.  Foreign events (torch's) are waited for at once: on CPUs they are complete.
std::vector<Event> read_events(py::handle value);
// None: the buffer's.  torch's streams of the CPU stand for the calling thread.
Stream read_stream(py::handle value);

// None gives an empty list; one tensor or a list.
std::vector<Tensor> read_tensors(py::handle value, const char* name, bool values);

// The arguments of one call that are not None, by name.
class Given {
 public:
  explicit Given(const py::dict& options) : options_(options) {}

  // None when it was not given.
  py::handle operator[](const char* name) {
    PyObject* const value = PyDict_GetItemString(options_.ptr(), name);
    if (value == nullptr) return Py_None;
    read_.at(num_read_++) = name;
    return value;
  }
  // Nothing is left to look for.  REQUIRES: no name is read twice.
  bool all_read() const { return num_read_ == options_.size(); }
  // REQUIRES: all the names of `operation` have been read.  Throws TypeError naming what else was given.
  void require_all_read(const char* operation) const;

 private:
  const py::dict& options_;
  std::array<std::string_view, 32> read_{};  // names that were given and looked at
  size_t num_read_ = 0;
};

// Options of EPBuffer by name; unknown names are TypeErrors.
BufferConfig read_config(const py::dict& options);

}  // namespace ep::python
