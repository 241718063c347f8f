#include "arguments.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "ep/error.hpp"
#include "tensors.hpp"

namespace ep::python {

namespace {

std::string shown(py::handle value) {
  return py::repr(value).cast<std::string>();
}

[[noreturn]] void refuse_type(const char* name, py::handle value, const char* wanted) {
  throw py::type_error(std::string(name) + "=" + shown(value) + " is a " +
                       Py_TYPE(value.ptr())->tp_name + "; " + wanted + " is needed");
}

template <typename Enum, size_t kCount>
using Names = std::array<std::pair<std::string_view, Enum>, kCount>;

constexpr Names<Layout, 3> kLayouts = {
    {{"rank", Layout::kRank}, {"expert", Layout::kExpert}, {"batched", Layout::kBatched}}};
constexpr Names<Overflow, 2> kOverflows = {
    {{"raise", Overflow::kRaise}, {"drop", Overflow::kDrop}}};
constexpr Names<Ids, 2> kIds = {{{"local", Ids::kLocal}, {"global", Ids::kGlobal}}};
constexpr Names<Outputs, 3> kOutputs = {
    {{"auto", Outputs::kAuto}, {"window", Outputs::kWindow}, {"caller", Outputs::kCaller}}};
constexpr Names<Quant, 6> kQuants = {{{"fp8_block128", Quant::kFp8Block128},
                                      {"fp8_block128_pow2", Quant::kFp8Block128Pow2},
                                      {"fp8_block128_ue8m0", Quant::kFp8Block128Ue8m0},
                                      {"mxfp8", Quant::kMxFp8},
                                      {"nvfp4", Quant::kNvFp4},
                                      {"int8_row", Quant::kInt8Row}}};
constexpr Names<Mode, 2> kModes = {
    {{"throughput", Mode::kThroughput}, {"latency", Mode::kLatency}}};
constexpr Names<ScaleLayout, 4> kScaleLayouts = {{{"row", ScaleLayout::kRow},
                                                  {"col", ScaleLayout::kCol},
                                                  {"col_ue8m0x4", ScaleLayout::kColUe8m0x4},
                                                  {"swizzle_128x4", ScaleLayout::kSwizzle128x4}}};

template <typename Enum, size_t kCount>
std::optional<Enum> read_name(py::handle value,
                              const char* name,
                              const Names<Enum, kCount>& names) {
  if (value.is_none()) return std::nullopt;
  std::string text = read_text(value, name);
  std::string all;
  for (const auto& [known, choice] : names) {
    if (text == known) return choice;
    all += (all.empty() ? "\"" : ", \"") + std::string(known) + "\"";
  }
  throw InvalidArgument(std::string(name) + "=\"" + text + "\" is none of " + all);
}

std::vector<uint32_t> read_offsets(py::handle value) {
  std::vector<uint32_t> offsets;
  for (const py::handle item : py::iter(value))
    offsets.push_back(read_u32(item, "expert_offsets"));
  return offsets;
}

std::string read_device(py::handle value) {
  if (PyLong_Check(value.ptr()) != 0) return "cuda:" + std::to_string(read_u32(value, "device"));
  return py::str(value);  // "cpu", torch.device("cpu")
}

}  // namespace

uint64_t read_integer(py::handle value, const char* name, uint64_t most) {
  if (PyBool_Check(value.ptr()) != 0) refuse_type(name, value, "an integer");
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) {
    PyErr_Clear();
    refuse_type(name, value, "an integer");
  }
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || result < 0 || static_cast<uint64_t>(result) > most) {
    throw InvalidArgument(std::string(name) + "=" + shown(value) + " is outside [0, " +
                          std::to_string(most) + "]");
  }
  return static_cast<uint64_t>(result);
}

std::optional<uint32_t> read_optional_u32(py::handle value, const char* name) {
  return value.is_none() ? std::nullopt : std::optional(read_u32(value, name));
}

bool read_bool(py::handle value, const char* name) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) {
    PyErr_Clear();
    refuse_type(name, value, "True or False");
  }
  return truth != 0;
}

std::optional<bool> read_optional_bool(py::handle value, const char* name) {
  return value.is_none() ? std::nullopt : std::optional(read_bool(value, name));
}

double read_seconds(py::handle value, const char* name) {
  if (py::hasattr(value, "total_seconds"))
    return value.attr("total_seconds")().cast<double>();  // datetime.timedelta
  const double seconds = PyFloat_AsDouble(value.ptr());
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_type(name, value, "a number of seconds");
  }
  if (!(seconds > 0)) {
    throw InvalidArgument(std::string(name) + "=" + shown(value) +
                          " is not a positive number of seconds");
  }
  return seconds;
}

std::string read_text(py::handle value, const char* name) {
  if (!py::isinstance<py::str>(value)) refuse_type(name, value, "a string");
  return value.cast<std::string>();
}

std::optional<Layout> read_layout(py::handle value) {
  return read_name(value, "layout", kLayouts);
}
std::optional<Overflow> read_overflow(py::handle value) {
  return read_name(value, "overflow", kOverflows);
}
std::optional<Ids> read_ids(py::handle value) {
  return read_name(value, "ids", kIds);
}
std::optional<Outputs> read_outputs(py::handle value) {
  return read_name(value, "outputs", kOutputs);
}
Quant read_quant(py::handle value) {
  return read_name(value, "quant", kQuants).value_or(Quant::kNone);
}
Mode read_mode(py::handle value) {
  return read_name(value, "mode", kModes).value_or(Mode::kThroughput);
}
ScaleLayout read_scale_layout(py::handle value) {
  return read_name(value, "scale_layout", kScaleLayouts).value_or(ScaleLayout::kRow);
}

const char* name_of(Layout layout) {
  for (const auto& [name, value] : kLayouts) {
    if (value == layout) return name.data();
  }
  return "unknown";
}

std::vector<Event> read_events(py::handle value) {
  std::vector<Event> events;
  const auto add = [&](py::handle item) {
    if (py::isinstance<Event>(item))
      events.push_back(item.cast<Event>());
    else if (py::hasattr(item, "synchronize"))
      item.attr("synchronize")();
    else
      refuse_type("wait_for", item, "an event (ep.Event or torch's) or a list of them");
  };
  if (value.is_none()) return events;
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    for (const py::handle item : value)
      add(item);
  } else {
    add(value);
  }
  return events;
}

Stream read_stream(py::handle value) {
  if (value.is_none()) return {};
  if (py::isinstance<Stream>(value)) return value.cast<Stream>();
  const std::string type = Py_TYPE(value.ptr())->tp_name;
  const std::string module = py::str(py::type::of(value).attr("__module__"));
  if (!type.ends_with("Stream") || !module.starts_with("torch"))
    refuse_type("stream", value, "an ep.Stream or a torch stream");
  const py::object device = py::getattr(value, "device", py::none());
  const std::string name = device.is_none() ? "cpu" : std::string(py::str(device));
  if (!name.starts_with("cpu"))
    throw InvalidArgument("stream is of " + name + "; the buffer is on cpu");
  return {};
}

std::vector<Tensor> read_tensors(py::handle value, const char* name, bool values) {
  std::vector<Tensor> tensors;
  if (value.is_none()) return tensors;
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    for (const py::handle item : value) {
      const std::string item_name = std::string(name) + "[" + std::to_string(tensors.size()) + "]";
      tensors.push_back(read_tensor(item, item_name.c_str(), values));
    }
  } else {
    tensors.push_back(read_tensor(value, name, values));
  }
  return tensors;
}

void Given::require_all_read(const char* operation) const {
  if (all_read()) return;
  for (const auto& [key, value] : options_) {
    const auto name = key.cast<std::string>();
    if (std::find(read_.begin(), read_.begin() + num_read_, name) == read_.begin() + num_read_) {
      throw py::type_error(std::string(operation) + "() got an unexpected keyword argument '" +
                           name + "'");
    }
  }
}

BufferConfig read_config(const py::dict& options) {
  BufferConfig config;
  constexpr uint64_t kMostBytes = uint64_t{1} << 62;
  for (const auto& [key, value] : options) {
    const auto name = key.cast<std::string>();
    const char* const n = name.c_str();
    // Required, or without a value of None.
    if (name == "num_experts")
      config.num_experts = read_u32(value, n);
    else if (name == "num_topk")
      config.num_topk = read_u32(value, n);
    else if (name == "hidden")
      config.hidden = read_u32(value, n);
    else if (name == "max_tokens_per_rank")
      config.max_tokens_per_rank = read_u32(value, n);
    else if (name == "num_regions")
      config.num_regions = read_u32(value, n);
    else if (name == "max_latency_tokens")
      config.max_latency_tokens = read_u32(value, n);
    else if (name == "elastic")
      config.elastic = read_bool(value, n);
    else if (name == "device")
      config.device = read_device(value);
    else if (name == "outputs")
      config.outputs = read_outputs(value).value_or(Outputs::kAuto);
    else if (value.is_none())
      continue;  // the default
    else if (name == "token_bytes")
      config.token_bytes = read_integer(value, n, kMostBytes);
    else if (name == "output_bytes")
      config.output_bytes = read_integer(value, n, kMostBytes);
    else if (name == "arena_bytes")
      config.arena_bytes = read_integer(value, n, kMostBytes);
    else if (name == "expert_offsets")
      config.expert_offsets = read_offsets(value);
    else if (name == "expert_slot")
      throw Unsupported(
          "expert_slot is reserved: give expert_offsets, or permute topk_idx before dispatch");
    else if (name == "num_sms")
      config.num_sms = read_u32(value, n);
    else if (name == "num_qps")
      config.num_qps = read_u32(value, n);
    else if (name == "ranks_per_node")
      config.ranks_per_node = read_u32(value, n);
    else if (name == "timeout_s")
      config.timeout_s = read_seconds(value, n);
    else
      throw py::type_error("EPBuffer has no argument " + name);
  }
  return config;
}

}  // namespace ep::python
