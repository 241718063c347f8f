#include "outputs.hpp"

#include <string>

#include "tensors.hpp"

namespace ep::python {

namespace {

constexpr const char* kExtras = "extras";

const NamedTensor* find(const std::string& name) {
  for (const NamedTensor& named : dispatch_tensors()) {
    if (name == named.name) return &named;
  }
  return nullptr;
}

[[noreturn]] void refuse_name(const std::string& name) {
  std::string known;
  for (const NamedTensor& named : dispatch_tensors())
    known += std::string(named.name) + ", ";
  throw py::type_error("out has an entry '" + name + "'; results are " + known + kExtras);
}

Tensor read_target(py::handle array, const std::string& name) {
  return ArrayKind::of(array, name.c_str()).read_target(array, name.c_str());
}

// numpy has no names for these: unsigned integers of their size hold the bits.
void rename_bits(Tensor& given, const Tensor& wanted) {
  const bool is_bits = given.dtype == DType::kUInt8 || given.dtype == DType::kUInt16 ||
                       given.dtype == DType::kBFloat16;
  const bool is_nameless = wanted.dtype == DType::kBFloat16 || wanted.dtype == DType::kUInt16 ||
                           num_bytes(wanted.dtype) == 1;
  if (is_bits && is_nameless && num_bytes(given.dtype) == num_bytes(wanted.dtype))
    given.dtype = wanted.dtype;
}

py::tuple as_tuple(const Tensor& t) {
  py::tuple shape(t.num_dims), strides(t.num_dims);
  for (uint32_t d = 0; d < t.num_dims; ++d) {
    shape[d] = t.shape[d];
    strides[d] = t.strides[d];
  }
  return py::make_tuple(shape, name_of(t.dtype), strides);
}

}  // namespace

void GivenOutputs::read(py::handle out, const EPBuffer& buffer, DispatchArgs& args) {
  if (out.is_none()) return;
  if (!py::isinstance<py::dict>(out)) {
    throw py::type_error(std::string("out is a ") + Py_TYPE(out.ptr())->tp_name +
                         "; a dict of arrays by the names of results is needed");
  }
  const DispatchTensors spec = buffer.output_spec(args);
  for (const auto& [key, array] : py::reinterpret_borrow<py::dict>(out)) {
    const std::string name = py::str(key);
    if (array.is_none()) continue;
    if (name == kExtras) {
      for (const py::handle extra : py::reinterpret_borrow<py::sequence>(array)) {
        const size_t i = args.out.extras.size();
        args.out.extras.push_back(read_target(extra, "out.extras[" + std::to_string(i) + "]"));
        if (i < spec.extras.size()) rename_bits(args.out.extras.back(), spec.extras[i]);
        extras_.append(extra);
      }
      continue;
    }
    const NamedTensor* const named = find(name);
    if (named == nullptr) refuse_name(name);
    Tensor& given = args.out.*named->member;
    given = read_target(array, "out." + name);
    rename_bits(given, spec.*named->member);
    arrays_[named->name] = array;
  }
}

void GivenOutputs::give_back(DispatchOutput& output) const {
  const auto has_rows = [](const py::object& array, const Tensor& made) {
    return array.attr("shape").cast<py::sequence>()[0].cast<int64_t>() == made.shape[0];
  };
  for (const NamedTensor& named : dispatch_tensors()) {
    if (!arrays_.contains(named.name)) continue;
    const py::object array = arrays_[named.name];
    if (has_rows(array, output.result().*named.member)) output.set(named.name, array);
  }
  if (extras_.empty()) return;
  py::list made;
  for (size_t i = 0; i < extras_.size(); ++i) {
    const Tensor& extra = output.result().extras[i];
    const py::object array = extras_[i];
    made.append(has_rows(array, extra) ? array : output.kind().make(extra));
  }
  output.set(kExtras, made);
}

py::dict spec_as_dict(const DispatchTensors& spec) {
  py::dict result;
  for (const NamedTensor& named : dispatch_tensors()) {
    if ((spec.*named.member).defined()) result[named.name] = as_tuple(spec.*named.member);
  }
  py::list extras;
  for (const Tensor& extra : spec.extras)
    extras.append(as_tuple(extra));
  if (!extras.empty()) result[kExtras] = extras;
  return result;
}

}  // namespace ep::python
