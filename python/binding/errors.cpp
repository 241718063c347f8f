// ep::Error as the exceptions of ep.errors, with their numbers as attributes.
#include <utility>

#include "bindings.hpp"
#include "ep/error.hpp"

namespace ep::python {

namespace {

template <typename... Attributes>
void raise(const char* type, const Error& error, Attributes... attributes) {
  try {
    const py::object cls = py::module_::import("ep.errors").attr(type);
    const py::object exception = cls(py::str(error.what()), std::move(attributes)...);
    PyErr_SetObject(cls.ptr(), exception.ptr());
  } catch (py::error_already_set& nested) {
    nested.restore();
  }
}

void translate(std::exception_ptr pointer) {
  using py::arg;
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const InvalidArgument& e) {
    raise("InvalidArgument", e);
  } catch (const CapacityError& e) {
    raise("CapacityError", e, arg("rank") = e.rank, arg("needed") = e.needed,
          arg("available") = e.available);
  } catch (const Timeout& e) {
    raise("Timeout", e, arg("peers") = e.peers, arg("phase") = e.phase);
  } catch (const PeerError& e) {
    raise("PeerError", e, arg("peers") = e.peers, arg("reason") = e.reason);
  } catch (const PeerLost& e) {
    raise("PeerLost", e, arg("peers") = e.peers);
  } catch (const Desync& e) {
    raise("Desync", e, arg("field") = e.field, arg("peer") = e.peer, arg("mine") = e.mine,
          arg("theirs") = e.theirs);
  } catch (const Unsupported& e) {
    raise("Unsupported", e);
  } catch (const Interrupted& e) {
    // What the signal's handler raised is still set; else nobody asked Python.
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_KeyboardInterrupt, e.what());
  } catch (const Error& e) {
    raise("Error", e);
  }
}

}  // namespace

void bind_errors() {
  py::register_local_exception_translator(&translate);
}

}  // namespace ep::python
