// ep::EPBuffer for Python: arguments are read here, the rest is the library's.
#include "ep/buffer.hpp"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "arguments.hpp"
#include "bindings.hpp"
#include "ep/error.hpp"
#include "outputs.hpp"
#include "results.hpp"
#include "tensors.hpp"

namespace ep::python {

namespace {

constexpr size_t kAlignBytes = 256;

void log_to_python(LogLevel level, std::string_view text) {
  if (!is_running()) return;
  const py::gil_scoped_acquire lock;
  try {
    constexpr const char* kMethods[] = {"debug", "info", "warning"};
    py::module_::import("logging").attr("getLogger")("ep").attr(kMethods[static_cast<int>(level)])(
        "%s", text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("ep's log");
  }
}

// Outputs that are not views of the window come from the array library in use, once one was seen.
struct Allocator {
  std::atomic<const dlpack::ExchangeApi*> exchange{nullptr};

  std::shared_ptr<void> operator()(uint64_t num_bytes) const {
    if (const auto* const api = exchange.load(std::memory_order_acquire))
      return allocate_from(*api, num_bytes);
    const uint64_t size = (num_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    void* const memory = std::aligned_alloc(kAlignBytes, size);
    if (memory == nullptr) throw std::bad_alloc();
    return {memory, &std::free};
  }
};

class Buffer {
 public:
  Buffer(std::shared_ptr<Communicator> group, const py::dict& options) {
    BufferConfig config;
    try {
      config = read_config(options);
    } catch (...) {
      // The other ranks are about to wait for this one: what is plainly wrong ends it for all.
      without_lock([&] {
        try {
          const EPBuffer refused(group, BufferConfig{});
        } catch (const Error&) {
        }
      });
      throw;
    }
    config.log = &log_to_python;
    config.interrupt = &signal_raised;
    config.allocator = [allocator = allocator_](uint64_t bytes) { return (*allocator)(bytes); };
    buffer_ = without_lock([&] { return std::make_shared<EPBuffer>(std::move(group), config); });
  }

  ~Buffer() {
    without_lock([&] { buffer_.reset(); });
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  EPBuffer* operator->() const { return buffer_.get(); }
  EPBuffer* get() const { return buffer_.get(); }

  // Runs a collective call: `read` turns Python's arguments into the library's, with the interpreter's
  // lock; `call` runs without.  Whatever is raised, the turn is spent.
  template <typename Read, typename Call>
  auto collective(Operation operation, Read read, Call call) const {
    const auto args = [&] {
      try {
        return read();
      } catch (...) {
        refuse(operation);
        throw;
      }
    }();
    ++turns_of_thread();
    return without_lock([&] { return call(*buffer_, args); });
  }

  void refuse(Operation operation) const {
    ++turns_of_thread();
    without_lock([&] { buffer_->refuse(operation); });
  }

  void note(const ArrayKind& kind) const {
    if (kind.exchange() != nullptr)
      allocator_->exchange.store(kind.exchange(), std::memory_order_release);
  }

 private:
  std::shared_ptr<Allocator> allocator_ = std::make_shared<Allocator>();
  std::shared_ptr<EPBuffer> buffer_;
};

const PyHandle& read_handle(py::handle value) {
  if (!py::isinstance<PyHandle>(value)) {
    throw py::type_error(std::string("handle is a ") + Py_TYPE(value.ptr())->tp_name +
                         "; an ep.Handle (out.handle) is needed");
  }
  return value.cast<const PyHandle&>();
}

// How and where a call runs, of dispatch and combine alike.
template <typename Args>
void read_launch(Given& given, Args& args) {
  args.wait_for = read_events(given["wait_for"]);
  args.stream = read_stream(given["stream"]);
  args.split = read_optional_bool(given["split"], "split").value_or(false);
  args.num_sms = read_optional_u32(given["num_sms"], "num_sms").value_or(0);
  (void)read_optional_u32(given["num_qps"], "num_qps");  // CPUs have no queue pairs
}

struct DispatchCall {
  DispatchArgs args;
  Handle handle;  // args.handle points here: another thread may drop the caller's
  ArrayKind kind;
  std::optional<GivenOutputs> out;
};

void read_dispatch_options(Given& given, DispatchArgs& args) {
  args.scales = read_optional(given["scales"], "scales");
  args.quant = read_quant(given["quant"]);
  args.scale_layout = read_scale_layout(given["scale_layout"]);
  args.mode = read_mode(given["mode"]);
  if (!given["global_scale"].is_none()) {
    throw Unsupported(
        "global_scale belongs to the reserved format \"nvfp4\"; the formats that exist "
        "(ep.quant.formats()) have none");
  }
  args.layout = read_layout(given["layout"]);
  args.expert_alignment = read_optional_u32(given["expert_alignment"], "expert_alignment");
  args.exact = read_optional_bool(given["exact"], "exact");
  args.max_tokens = read_optional_u32(given["max_tokens"], "max_tokens");
  args.max_rows = read_optional_u32(given["max_rows"], "max_rows");
  args.overflow = read_overflow(given["overflow"]);
  args.extras = read_tensors(given["extras"], "extras", false);
  args.ids = read_ids(given["ids"]);
  args.outputs = read_outputs(given["outputs"]);
  read_launch(given, args);
}

std::unique_ptr<DispatchCall> read_dispatch(const Buffer& buffer, const py::dict& options) {
  auto call = std::make_unique<DispatchCall>();
  DispatchArgs& args = call->args;
  Given given(options);
  const py::handle x = given["x"];
  if (x.is_none()) throw py::type_error("x is missing: a tensor [T,H] is needed");
  call->kind = ArrayKind::of(x, "x");
  buffer.note(call->kind);
  args.x = call->kind.read(x, "x", true);
  args.topk_idx = read_optional(given["topk_idx"], "topk_idx");
  args.topk_weights = read_optional(given["topk_weights"], "topk_weights", true);
  args.async_op = read_optional_bool(given["async_op"], "async_op").value_or(false);
  if (const py::handle handle = given["handle"]; !handle.is_none()) {
    call->handle = read_handle(handle).handle;
    args.handle = &call->handle;
  } else if (!args.topk_idx.defined()) {
    throw py::type_error("topk_idx is missing: a tensor [T,K], or handle=, is needed");
  }
  if (!given.all_read()) {
    const py::handle out = given["out"];
    read_dispatch_options(given, args);
    if (!out.is_none()) call->out.emplace().read(out, *buffer.get(), args);
  }
  given.require_all_read("dispatch");
  return call;
}

struct CombineCall {
  CombineArgs args;
  Handle handle;
  ArrayKind kind;
  py::object out;
};

void read_combine_options(Given& given, CombineCall& call) {
  CombineArgs& args = call.args;
  args.weights = read_optional(given["weights"], "weights", true);
  args.row_weights = read_optional(given["row_weights"], "row_weights");
  args.bias = read_tensors(given["bias"], "bias", true);
  call.out = py::reinterpret_borrow<py::object>(given["out"]);
  if (!call.out.is_none()) args.out = ArrayKind::of(call.out, "out").read_target(call.out, "out");
  args.quant = read_quant(given["quant"]);
  args.ready = read_optional(given["ready"], "ready");
  if (const py::handle dtype = given["out_dtype"]; !dtype.is_none())
    args.out_dtype = dtype_of(dtype, "out_dtype");
  if (const py::handle partial = given["partial"]; !partial.is_none()) {
    const std::string text = read_text(partial, "partial");
    if (text != "same" && text != "fp32")
      throw InvalidArgument("partial=\"" + text + "\" is neither \"same\" nor \"fp32\"");
    args.partial = text == "same" ? Partial::kSame : Partial::kFloat32;
  }
  read_launch(given, args);
}

std::unique_ptr<CombineCall> read_combine(const Buffer& buffer, const py::dict& options) {
  auto call = std::make_unique<CombineCall>();
  call->out = py::none();
  CombineArgs& args = call->args;
  Given given(options);
  const py::handle x = given["x"], handle = given["handle"];
  if (x.is_none()) throw py::type_error("x is missing: a tensor [N,H'] is needed");
  if (handle.is_none())
    throw py::type_error("handle is missing: the out.handle of the dispatch is needed");
  call->kind = ArrayKind::of(x, "x");
  buffer.note(call->kind);
  args.x = call->kind.read(x, "x", true);
  args.async_op = read_optional_bool(given["async_op"], "async_op").value_or(false);
  call->handle = read_handle(handle).handle;
  args.handle = &call->handle;
  if (!given.all_read()) read_combine_options(given, *call);
  given.require_all_read("combine");
  return call;
}

std::unique_ptr<DispatchOutput> dispatch(const Buffer& self, const py::dict& options) {
  ArrayKind kind;
  std::optional<GivenOutputs> given;
  DispatchResult result = self.collective(
      Operation::kDispatch,
      [&] {
        auto call = read_dispatch(self, options);
        kind = call->kind;
        given = std::move(call->out);
        return call;
      },
      [](EPBuffer& buffer, const auto& call) { return buffer.dispatch(call->args); });
  auto output = std::make_unique<DispatchOutput>(std::move(result), std::move(kind));
  if (given) given->give_back(*output);
  return output;
}

py::dict output_spec(const Buffer& self, const py::dict& options) {
  return spec_as_dict(self->output_spec(read_dispatch(self, options)->args));
}

CombineOutput combine(const Buffer& self, const py::dict& options) {
  ArrayKind kind;
  py::object out;
  CombineResult result = self.collective(
      Operation::kCombine,
      [&] {
        auto call = read_combine(self, options);
        kind = call->kind;
        out = std::move(call->out);
        return call;
      },
      [](EPBuffer& buffer, const auto& call) { return buffer.combine(call->args); });
  CombineOutput output(std::move(result), std::move(kind));
  if (!out.is_none()) output.set_x(std::move(out));
  return output;
}

py::object expert_output(const Buffer& self,
                         const py::object& handle,
                         const py::object& hidden,
                         const py::object& dtype) {
  const PyHandle& from = read_handle(handle);
  const Handle copy = from.handle;
  const uint32_t columns = read_optional_u32(hidden, "hidden").value_or(0);
  const DType type = dtype_of(dtype, "dtype");
  return from.kind.make(without_lock([&] { return self->expert_output(copy, columns, type); }));
}

py::tuple routing_layout(const Buffer& self, const py::object& topk_idx) {
  const ArrayKind kind = ArrayKind::of(topk_idx, "topk_idx");
  const RoutingLayout layout = self->routing_layout(kind.read(topk_idx, "topk_idx"));
  return py::make_tuple(kind.make(layout.tokens_per_rank), kind.make(layout.tokens_per_expert),
                        kind.make(layout.is_token_in_rank), kind.make(layout.tokens_per_node));
}

py::tuple bytes_needed(const py::dict& options, const py::object& num_ranks) {
  const Memory memory =
      EPBuffer::bytes_needed(read_config(options), read_u32(num_ranks, "num_ranks"));
  return py::make_tuple(memory.control, memory.staging, memory.arena, memory.total);
}

uint64_t max_rows(const Buffer& self,
                  const py::object& layout,
                  const py::object& max_tokens,
                  const py::object& expert_alignment) {
  return self->max_rows(read_layout(layout).value_or(Layout::kRank),
                        read_optional_u32(max_tokens, "max_tokens"),
                        read_u32(expert_alignment, "expert_alignment"));
}

void bind_calls(py::class_<Buffer>& buffer) {
  buffer.def("dispatch", &dispatch)
      .def("combine", &combine)
      .def("output_spec", &output_spec)
      .def("expert_output", &expert_output)
      .def("routing_layout", &routing_layout)
      .def("refuse",
           [](const Buffer& self, const std::string& operation) {
             self.refuse(operation == "dispatch" ? Operation::kDispatch : Operation::kCombine);
           })
      .def("check", [](const Buffer& self) { without_lock([&] { self->check(); }); })
      .def("abort", [](const Buffer& self,
                       const std::string& reason) { without_lock([&] { self->abort(reason); }); })
      .def("resync",
           [](const Buffer& self) { return without_lock([&] { return self->resync(); }); })
      .def("close", [](const Buffer& self) { without_lock([&] { self->close(); }); })
      .def("abandon", [](const Buffer& self) { self->abandon(); });
}

}  // namespace

void bind_buffer(py::module_& module) {
  py::class_<Buffer> buffer(module, "Buffer");
  buffer.def(py::init<std::shared_ptr<Communicator>, const py::dict&>())
      .def_property_readonly("rank", [](const Buffer& self) { return self->rank(); })
      .def_property_readonly("num_ranks", [](const Buffer& self) { return self->num_ranks(); })
      .def_property_readonly("num_nodes", [](const Buffer& self) { return self->num_nodes(); })
      .def_property_readonly("expert_offsets",
                             [](const Buffer& self) { return self->expert_offsets(); })
      .def_property_readonly("comm_stream", [](const Buffer& self) { return self->comm_stream(); })
      .def_property(
          "num_sms", [](const Buffer& self) { return self->num_sms(); },
          [](const Buffer& self, const py::object& n) {
            self->set_num_sms(read_u32(n, "num_sms"));
          })
      .def_property(
          "timeout_s", [](const Buffer& self) { return self->timeout_s(); },
          [](const Buffer& self, const py::object& s) {
            self->set_timeout_s(read_seconds(s, "timeout_s"));
          })
      .def("memory",
           [](const Buffer& self) {
             const MemoryUse use = self->memory();
             return py::make_tuple(use.used, use.peak, use.largest_free);
           })
      .def("stats",
           [](const Buffer& self) {
             const Stats s = self->stats();
             return py::make_tuple(s.dispatches, s.combines, s.window_outputs, s.caller_outputs,
                                   s.faults);
           })
      .def("max_rows", &max_rows);
  bind_calls(buffer);
  module.def("bytes_needed", &bytes_needed);
  module.def("turns_of_thread", [] { return turns_of_thread(); });
}

}  // namespace ep::python
