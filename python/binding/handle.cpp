// ep.Handle: a header of plain bytes and a fixed list of tensors.
#include "ep/handle.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "arguments.hpp"
#include "bindings.hpp"
#include "ep/error.hpp"
#include "results.hpp"

namespace ep::python {

namespace {

constexpr std::array kNames = {"topk_idx", "topk_weights", "routes", "plan"};
static_assert(kNames.size() == Handle::kNumTensors);

py::bytes header_bytes(const PyHandle& self) {
  const Handle::Header& header = self.handle.header();
  return {reinterpret_cast<const char*>(&header), sizeof header};
}

// Array libraries hardly know uint32: routes and plan are shown as int32, the bits are the same.
Tensor with_dtype(Tensor tensor, DType from, DType to) {
  if (tensor.dtype == from) tensor.dtype = to;
  return tensor;
}

py::list tensors(const PyHandle& self) {
  py::list list;
  for (Tensor tensor : self.handle.tensors()) {
    // Saved-tensor lists want tensors: one without elements stands for "no weights".
    if (!tensor.defined()) {
      tensor = Tensor::contiguous(nullptr, DType::kFloat32, {0, self.handle.header().num_topk});
    }
    list.append(self.kind.make(with_dtype(tensor, DType::kUInt32, DType::kInt32)));
  }
  return list;
}

std::shared_ptr<PyHandle> restore(const py::bytes& header_data, const py::sequence& list) {
  const auto view = static_cast<std::string_view>(header_data);
  Handle::Header header;
  if (view.size() != sizeof header) {
    throw InvalidArgument("header has " + std::to_string(view.size()) + " bytes; a handle's has " +
                          std::to_string(sizeof header));
  }
  std::memcpy(&header, view.data(), sizeof header);
  if (list.size() != kNames.size()) {
    throw InvalidArgument("a handle has " + std::to_string(kNames.size()) + " tensors, not " +
                          std::to_string(list.size()));
  }
  std::array<Tensor, Handle::kNumTensors> tensors;
  ArrayKind kind;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const py::object item = list[i];
    if (i == Handle::kWeights && !header.has_weights) continue;
    kind = ArrayKind::of(item, kNames[i]);
    tensors[i] = kind.read(item, kNames[i]);
    if (i == Handle::kRoutes || i == Handle::kPlan)
      tensors[i] = with_dtype(tensors[i], DType::kInt32, DType::kUInt32);
  }
  return std::make_shared<PyHandle>(PyHandle{Handle::from_tensors(header, tensors), kind});
}

}  // namespace

void bind_handle(py::module_& module) {
  py::class_<PyHandle, std::shared_ptr<PyHandle>>(module, "Handle", py::dynamic_attr(),
                                                  R"(The routing of one dispatch, as a snapshot.

Later edits of the tensors that were dispatched change nothing here.  Combines and replays take it any
number of times, in any order.  It may be pickled, and is good for the buffer that made it.)")
      .def_property_readonly("header", &header_bytes, "bytes: what the host knows of the call.")
      .def_property_readonly("tensors", &tensors,
                             "List of four tensors: topk_idx [T,K], topk_weights [T,K] fp32 ([0,K] "
                             "without weights), routes [T,K,2] int32, plan int32.")
      .def_property_readonly(
          "num_tokens", [](const PyHandle& h) { return h.handle.header().num_tokens; },
          "T of this rank.")
      .def_property_readonly(
          "num_topk", [](const PyHandle& h) { return h.handle.header().num_topk; }, "K.")
      .def_property_readonly(
          "layout", [](const PyHandle& h) { return name_of(h.handle.header().layout); },
          "\"rank\" or \"expert\".")
      .def_property_readonly(
          "exact", [](const PyHandle& h) { return h.handle.header().exact; },
          "Whether the dispatch was of exact size; a replay is too.")
      .def_property_readonly(
          "has_weights", [](const PyHandle& h) { return h.handle.header().has_weights; },
          "Whether topk_weights were dispatched.")
      .def_property_readonly(
          "num_rows_total", [](const PyHandle& h) { return h.handle.header().num_rows_total; },
          "N: rows of the output tensors.")
      .def_static(
          "from_tensors",
          [](const py::object&, const py::bytes& header, const py::sequence& list) {
            return restore(header, list);
          },
          py::arg("buf"), py::arg("header"), py::arg("tensors"),
          "The reverse of header and tensors, for `buf`, the buffer that made the handle.  Raises "
          "InvalidArgument for a header of another size or another number of tensors; what else "
          "they say is checked, with the same error, when the handle is used.")
      .def("__reduce__", [](const py::object& self) {
        const py::object restore_function = py::module_::import("ep._C").attr("_restore_handle");
        return py::make_tuple(restore_function,
                              py::make_tuple(self.attr("header"), self.attr("tensors")));
      });
  module.def("_restore_handle", &restore);
  module.attr("handle_header_bytes") = sizeof(Handle::Header);
}

}  // namespace ep::python
