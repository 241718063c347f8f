// One function per file of the binding, in the order in which module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "interpreter.hpp"

namespace ep::python {

void bind_errors();
void bind_communicator(py::module_& module);
void bind_streams(py::module_& module);
void bind_handle(py::module_& module);
void bind_results(py::module_& module);
void bind_buffer(py::module_& module);

}  // namespace ep::python
