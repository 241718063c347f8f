// How long does NVRTC take for each kernel, beside nvcc for the same source?  Needs no GPU.
//
// Each round compiles every kernel once with each compiler, one after the other; a ratio is the median over
// rounds of the ratio within a round.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <getopt.h>
#include <time.h>

#include "bench/ep_bench/json.hpp"
#include "bench/ep_bench/statistics.hpp"
#include "bench/jit_bench/nvcc.hpp"
#include "device/cuda/kernel_source.hpp"
#include "ep/error.hpp"
#include "jit/compile.hpp"
#include "kernels/all_kernels.hpp"

namespace ep::bench {
namespace {

struct Options {
  std::string nvrtc, nvcc, kernel, json;
  std::vector<std::string> archs = {"sm_90a"};
  int rounds = 3;
};

constexpr const char* kHelp =
    R"(jit-bench: how long does NVRTC take for each kernel, beside nvcc for the same source?

  --arch LIST      architectures, separated by commas (sm_90a)
  --kernel TEXT    only kernels whose name has TEXT in it
  --rounds N       compilations of each kernel (3)
  --nvrtc PATH     this libnvrtc.so instead of the one that is found
  --nvcc PATH      this nvcc instead of the one of PATH or /usr/local/cuda/bin; 'none': without
  --json FILE      write all figures as JSON; '-': to standard output, the table to standard error
  --help           this text
)";

struct Result {
  std::string kernel, arch;
  jit::ResourceUse use;
  size_t cubin_bytes = 0;
  std::vector<double> nvrtc_s, nvrtc_cpu_s, nvcc_s, nvcc_cpu_s, ratios;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');)
    parts.push_back(part);
  return parts;
}

Options parse(int argc, char** argv) {
  static const option kLong[] = {
      {"arch", required_argument, nullptr, 'a'},   {"kernel", required_argument, nullptr, 'k'},
      {"rounds", required_argument, nullptr, 'r'}, {"nvrtc", required_argument, nullptr, 't'},
      {"nvcc", required_argument, nullptr, 'c'},   {"json", required_argument, nullptr, 'j'},
      {"help", no_argument, nullptr, 'h'},         {nullptr, 0, nullptr, 0}};
  Options options;
  for (int c; (c = getopt_long(argc, argv, "", kLong, nullptr)) != -1;) {
    switch (c) {
      case 'a':
        options.archs = split(optarg);
        break;
      case 'k':
        options.kernel = optarg;
        break;
      case 'r':
        options.rounds = std::atoi(optarg);
        if (options.rounds < 1) throw Error(std::string("--rounds ") + optarg + ": at least 1");
        break;
      case 't':
        options.nvrtc = optarg;
        break;
      case 'c':
        options.nvcc = optarg;
        break;
      case 'j':
        options.json = optarg;
        break;
      case 'h':
        std::fputs(kHelp, stdout);
        std::exit(0);
      default:
        throw Error("see --help");
    }
  }
  if (optind != argc) throw Error(std::string(argv[optind]) + ": no such argument; see --help");
  return options;
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

Result measure(const jit::Nvrtc& nvrtc, const Nvcc* nvcc, const jit::Unit& unit, int rounds) {
  Result result{.kernel = unit.name, .arch = unit.arch};
  for (int round = 0; round < rounds; ++round) {
    const double before = cpu_seconds();
    const jit::Kernel kernel = jit::compile(nvrtc, unit);
    result.nvrtc_cpu_s.push_back(cpu_seconds() - before);
    result.use = kernel.use;
    result.cubin_bytes = kernel.cubin.size();
    result.nvrtc_s.push_back(kernel.seconds);
    if (nvcc == nullptr) continue;
    const Seconds seconds = nvcc->compile(unit);
    result.nvcc_s.push_back(seconds.wall);
    result.nvcc_cpu_s.push_back(seconds.cpu);
    result.ratios.push_back(seconds.wall / kernel.seconds);
  }
  return result;
}

void print_head(std::FILE* out, const jit::Nvrtc& nvrtc, const Nvcc* nvcc, int rounds) {
  std::fprintf(out, "NVRTC %s (%s), nvcc %s, %d rounds\n", to_string(nvrtc.version()).c_str(),
               nvrtc.path().c_str(), nvcc == nullptr ? "none" : nvcc->program().c_str(), rounds);
  std::fprintf(out, "%-40s %-8s %8s %15s %8s %8s %8s %8s %5s %7s %6s %9s\n", "kernel", "arch",
               "NVRTC s", "p10-p90", "CPU s", "nvcc s", "CPU s", "nvcc/x", "regs", "spilled",
               "stack", "cubin");
}

void print(std::FILE* out, const Result& r) {
  const Spread nvrtc = spread_of(r.nvrtc_s);
  std::fprintf(out, "%-40s %-8s %8.2f %7.2f-%-7.2f %8.2f ", r.kernel.c_str(), r.arch.c_str(),
               nvrtc.median, nvrtc.p10, nvrtc.p90, median(r.nvrtc_cpu_s));
  if (r.nvcc_s.empty()) {
    std::fprintf(out, "%8s %8s %8s ", "-", "-", "-");
  } else {
    std::fprintf(out, "%8.2f %8.2f %8.2f ", median(r.nvcc_s), median(r.nvcc_cpu_s),
                 median(r.ratios));
  }
  std::fprintf(out, "%5u %7u %6u %9zu\n", r.use.registers,
               r.use.spill_store_bytes + r.use.spill_load_bytes, r.use.stack_bytes, r.cubin_bytes);
  std::fflush(out);
}

std::string to_json(const jit::Nvrtc& nvrtc, const Nvcc* nvcc, const std::vector<Result>& results) {
  Json json;
  json.begin_object();
  json.field("nvrtc", to_string(nvrtc.version()));
  json.field("nvcc", nvcc == nullptr ? std::string() : nvcc->program());
  json.key("kernels").begin_array();
  for (const Result& r : results) {
    json.begin_object();
    json.field("kernel", r.kernel).field("arch", r.arch);
    json.field("registers", r.use.registers).field("stack_bytes", r.use.stack_bytes);
    json.field("spill_store_bytes", r.use.spill_store_bytes);
    json.field("spill_load_bytes", r.use.spill_load_bytes);
    json.field("cubin_bytes", r.cubin_bytes);
    json.field("nvrtc_s", r.nvrtc_s).field("nvrtc_cpu_s", r.nvrtc_cpu_s);
    json.field("nvcc_s", r.nvcc_s).field("nvcc_cpu_s", r.nvcc_cpu_s).end_object();
  }
  json.end_array().end_object();
  return json.text() + "\n";
}

void write(const std::string& name, const std::string& text) {
  std::FILE* file = name == "-" ? stdout : std::fopen(name.c_str(), "w");
  if (file == nullptr || std::fputs(text.c_str(), file) < 0 || std::fflush(file) != 0)
    throw Error("cannot write " + name + ": " + std::strerror(errno));
  if (file != stdout) std::fclose(file);
}

int run(const Options& options) {
  const auto nvrtc = jit::Nvrtc::open(options.nvrtc);
  std::unique_ptr<Nvcc> nvcc;
  if (options.nvcc != "none") {
    const std::string program = find_nvcc(options.nvcc);
    if (!program.empty()) nvcc = std::make_unique<Nvcc>(program, device::cuda::kernel_headers());
  }
  std::FILE* const out = options.json == "-" ? stderr : stdout;
  print_head(out, *nvrtc, nvcc.get(), options.rounds);
  std::vector<Result> results;
  for (const std::string& arch : options.archs) {
    // The first compilation of a process also sets NVRTC up.
    jit::compile(*nvrtc, device::cuda::kernel_unit({kernels::KernelOp::kCopyOut, {}, {}}, arch));
    for (const kernels::KernelKey& key : kernels::kAllKernels) {
      const jit::Unit unit = device::cuda::kernel_unit(key, arch);
      if (unit.name.find(options.kernel) == std::string::npos) continue;
      results.push_back(measure(*nvrtc, nvcc.get(), unit, options.rounds));
      print(out, results.back());
    }
  }
  if (results.empty()) throw Error("--kernel " + options.kernel + ": no kernel is called so");
  if (!options.json.empty()) write(options.json, to_json(*nvrtc, nvcc.get(), results));
  return 0;
}

}  // namespace
}  // namespace ep::bench

int main(int argc, char** argv) {
  try {
    return ep::bench::run(ep::bench::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jit-bench: %s\n", error.what());
    return 1;
  }
}
