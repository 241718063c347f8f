// ep._C: the C++ library for the Python package.  Its names are private to the package.
#include "bindings.hpp"
#include "ep/version.hpp"
#include "tensors.hpp"

PYBIND11_MODULE(_C, module) {
  using namespace ep::python;
  module.attr("version") = ep::version();
  bind_errors();
  bind_tensors(module);
  bind_communicator(module);
  bind_streams(module);
  bind_handle(module);
  bind_results(module);
  bind_buffer(module);
}
