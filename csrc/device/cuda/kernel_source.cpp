#include "device/cuda/kernel_source.hpp"

#include "common/text.hpp"

namespace ep::device::cuda {
namespace {

using kernels::Element;
using kernels::Format;
using kernels::KernelKey;
using kernels::KernelOp;
using kernels::LayoutKind;

// How a value is called in a name and written in a source.
struct Spelling {
  const char* name;
  const char* code;
};

Spelling spelling_of(LayoutKind layout) {
  switch (layout) {
    case LayoutKind::kRank:
      return {"rank", "LayoutKind::kRank"};
    case LayoutKind::kExpert:
      return {"expert", "LayoutKind::kExpert"};
  }
  return {};
}

Spelling spelling_of(Element element) {
  switch (element) {
    case Element::kBF16:
      return {"bf16", "Element::kBF16"};
    case Element::kFP16:
      return {"fp16", "Element::kFP16"};
    case Element::kFP32:
      return {"fp32", "Element::kFP32"};
  }
  return {};
}

Spelling spelling_of(Format format) {
  switch (format) {
    case Format::kBytes:
      return {"bytes", "Format::kBytes"};
    case Format::kFp8Block128:
      return {"fp8_block128", "Format::kFp8Block128"};
    case Format::kFp8Block128Pow2:
      return {"fp8_block128_pow2", "Format::kFp8Block128Pow2"};
    case Format::kFp8Block128Ue8m0:
      return {"fp8_block128_ue8m0", "Format::kFp8Block128Ue8m0"};
  }
  return {};
}

// What the kernels differ in: names, header, parameters, and the call.
struct Parts {
  std::string name, function, header, params, configuration;
};

Parts parts_of(const KernelKey& key) {
  switch (key.op) {
    case KernelOp::kDispatch: {
      const Spelling layout = spelling_of(key.dispatch.layout);
      const Spelling format = spelling_of(key.dispatch.format), in = spelling_of(key.dispatch.in);
      return {str("dispatch-", layout.name, "-", format.name, "-", in.name), "dispatch",
              "dispatch.cuh", "DispatchParams",
              str("<DispatchConfig{", layout.code, ", ", format.code, ", ", in.code, "}>")};
    }
    case KernelOp::kCombine: {
      const Spelling layout = spelling_of(key.combine.layout);
      const Spelling in = spelling_of(key.combine.in), out = spelling_of(key.combine.out);
      return {str("combine-", layout.name, "-", in.name, "-", out.name), "combine", "combine.cuh",
              "CombineParams",
              str("<CombineConfig{", layout.code, ", ", in.code, ", ", out.code, "}>")};
    }
    case KernelOp::kRefuse:
      return {"refuse", "refuse", "turns.cuh", "RefuseParams", ""};
    case KernelOp::kClose:
      return {"close", "close", "turns.cuh", "CloseParams", ""};
    case KernelOp::kCopyOut:
      return {"copy_out", "copy_out", "turns.cuh", "CopyOutParams", ""};
  }
  return {};
}

}  // namespace

std::string kernel_name(const KernelKey& key) {
  return parts_of(key).name;
}

std::string kernel_entry(const KernelKey& key) {
  return "ep_" + parts_of(key).function;
}

jit::Unit kernel_unit(const KernelKey& key, const std::string& arch) {
  const Parts parts = parts_of(key);
  jit::Unit unit;
  unit.name = parts.name;
  unit.source = str("#include \"device/cuda/warp.cuh\"\n#include \"kernels/", parts.header,
                    "\"\nusing namespace ep::kernels;\nextern \"C\" __global__ void "
                    "__launch_bounds__(",
                    kMaxBlockThreads, ", 1)\n", kernel_entry(key), "(const __grid_constant__ ",
                    parts.params, " params) {\n  ", parts.function, parts.configuration,
                    "(ep::device::cuda::Warp{}, params);\n}\n");
  unit.arch = arch;
  // combine promises one rounding per operation.
  unit.options = {"-std=c++20", "--fmad=false"};
  unit.headers = &kernel_headers();
  return unit;
}

}  // namespace ep::device::cuda
