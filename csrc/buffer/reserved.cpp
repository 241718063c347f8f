#include "buffer/reserved.hpp"

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::buffer {

void check_reserved(const DispatchArgs& args) {
  constexpr const char* kQuants[] = {"quant=mxfp8", "quant=nvfp4", "quant=int8_row"};
  constexpr const char* kScaleLayouts[] = {"scale_layout=row", "scale_layout=col",
                                           "scale_layout=col_ue8m0x4",
                                           "scale_layout=swizzle_128x4"};
  const auto refuse = [](const char* what, const char* instead) {
    throw Unsupported(str(what, " is not supported by this version; ", instead));
  };
  if (args.mode != Mode::kThroughput) refuse("mode=latency", "mode=throughput is");
  if (args.layout == Layout::kBatched) refuse("layout \"batched\"", "\"rank\" and \"expert\" are");
  if (args.quant >= Quant::kMxFp8) {
    refuse(kQuants[static_cast<int>(args.quant) - static_cast<int>(Quant::kMxFp8)],
           "the fp8_block128 formats are");
  }
  if (args.scale_layout != ScaleLayout::kRow)
    refuse(kScaleLayouts[static_cast<int>(args.scale_layout)], "\"row\" is");
  if (args.split) refuse("split=true", "async_op=true is");
}

void check_reserved(const CombineArgs& args) {
  const auto refuse = [](const char* what) {
    throw Unsupported(str("combine: in this version ", what));
  };
  if (args.split) refuse("split=true is not supported; async_op=true is");
  if (args.ready.defined()) refuse("ready is not supported; wait_for is");
  if (args.quant != Quant::kNone) refuse("quant is not supported; 16-bit rows are");
}

}  // namespace ep::buffer
