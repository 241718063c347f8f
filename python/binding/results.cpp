#include "results.hpp"

#include "arguments.hpp"
#include "bindings.hpp"
#include "ep/error.hpp"

namespace ep::python {

namespace {

py::object tokens_per_expert(DispatchOutput& self) {
  const auto& counts = self.result().tokens_per_expert;
  return counts ? py::object(py::cast(*counts)) : py::object(py::none());
}

py::object extras(DispatchOutput& self) {
  return self.get("extras", [&] {
    py::list list;
    for (const Tensor& extra : self.result().extras)
      list.append(self.kind().make(extra));
    return list;
  });
}

py::object handle(DispatchOutput& self) {
  return self.get("handle", [&] {
    return py::cast(std::make_shared<PyHandle>(PyHandle{self.result().handle, self.kind()}));
  });
}

void record_stream(DispatchOutput& self, const py::object& stream) {
  self.result().record_stream(read_stream(stream));
}

constexpr NamedTensor kDispatchTensors[] = {
    {"x", &DispatchTensors::x, "[N,H] the received rows; N is exact, or the fixed size."},
    {"scales", &DispatchTensors::scales, "[N,S] or None: scales of x."},
    {"topk_idx", &DispatchTensors::topk_idx,
     "Layout \"rank\": [N,K], -1 in slots of other ranks; \"expert\": [N].  The ids' dtype as "
     "given; -1 in dead rows."},
    {"topk_weights", &DispatchTensors::topk_weights,
     "fp32, [N,K] (0 in slots of other ranks) or [N]; None when none were given."},
    {"num_rows_device", &DispatchTensors::num_rows_device,
     "[1] int32: rows in use, gaps included."},
    {"rows_needed_device", &DispatchTensors::rows_needed_device,
     "[1] int32: the true demand, also where max_rows cut it."},
    {"tokens_per_expert_device", &DispatchTensors::tokens_per_expert_device, "[L] int32."},
    {"expert_offsets", &DispatchTensors::expert_offsets,
     "[L+1] int32: where each local expert's rows start (aligned)."},
    {"rank_offsets", &DispatchTensors::rank_offsets,
     "[R+1] int32: where each source rank's rows start; None with layout \"expert\"."},
    {"source", &DispatchTensors::source,
     "[N,2] int32: source rank and source token; -1 in dead rows."},
    {"status", &DispatchTensors::status, "[1] int32: 0 = good; valid with the outputs."},
};

void bind_dispatch_tensors(py::class_<DispatchOutput>& output) {
  for (const NamedTensor& named : kDispatchTensors) {
    output.def_property_readonly(
        named.name,
        [&named](DispatchOutput& self) { return self.tensor(named.name, named.member); },
        named.doc);
  }
}

void bind_dispatch_output(py::module_& module) {
  py::class_<DispatchOutput> output(module, "DispatchOutput", R"(What EPBuffer.dispatch returns.

Frozen; tensors are made on first access, of the kind (torch, numpy, ...) that x had.  They may be views
of the buffer's window: the memory is given back when the last of them is dropped.)");
  bind_dispatch_tensors(output);
  output
      .def_property_readonly("extras", &extras, "List of [N,...]: the extras that travelled along.")
      .def_property_readonly(
          "num_rows", [](DispatchOutput& self) { return self.result().num_rows; },
          "N, where the host knows it (exact), else None.")
      .def_property_readonly("tokens_per_expert", &tokens_per_expert,
                             "List of L ints, where the host knows them (exact), else None.")
      .def_property_readonly("handle", &handle, "ep.Handle: the routing, for combine and replays.")
      .def_property_readonly(
          "event", [](DispatchOutput& self) { return self.result().event; },
          "ep.Event: the outputs are complete.")
      .def_property_readonly(
          "inputs_done", [](DispatchOutput& self) { return self.result().inputs_done; },
          "ep.Event: the inputs may be overwritten.")
      .def("record_stream", &record_stream, py::arg("stream"),
           "Another stream reads these tensors: their memory is handed out again only after its "
           "work.")
      .def(
          "receive",
          [](DispatchOutput&) -> py::object {
            throw Unsupported(
                "receive() belongs to split=True, which this version does not have; event does");
          },
          "Reserved for split=True: raises Unsupported.")
      .def_property_readonly(
          "lost",
          [](DispatchOutput&) -> py::object {
            throw Unsupported(
                "lost belongs to elastic=True, which this version does not have; PeerLost.peers "
                "does");
          },
          "Reserved for elastic=True: raises Unsupported.");
}

void bind_combine_output(py::module_& module) {
  py::class_<CombineOutput> output(
      module, "CombineOutput", "What EPBuffer.combine returns.  Frozen; tensors on first access.");
  const auto add = [&](const char* name, Tensor CombineResult::*member, const char* doc) {
    output.def_property_readonly(
        name, [name, member](CombineOutput& self) { return self.tensor(name, member); }, doc);
  };
  add("x", &CombineResult::x, "[T,H'] the combined rows.");
  add("topk_weights", &CombineResult::topk_weights,
      "[T,K] fp32: row_weights, back at their tokens; None without row_weights.");
  add("status", &CombineResult::status, "[1] int32: 0 = good; valid with x.");
  output.def_property_readonly(
      "event", [](CombineOutput& self) { return self.result().event; }, "ep.Event: x is complete.");
}

}  // namespace

std::span<const NamedTensor> dispatch_tensors() {
  return kDispatchTensors;
}

void bind_results(py::module_& module) {
  bind_dispatch_output(module);
  bind_combine_output(module);
}

}  // namespace ep::python
