#include "jit/nvrtc.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>

#include <dlfcn.h>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::jit {
namespace {

using Result = int;  // 0: good
struct ProgramData;
using Program = ProgramData*;

constexpr const char* kRemedy =
    "; NVRTC 13.0 or newer is needed: pip install nvidia-cuda-nvrtc (torch built for CUDA 13 "
    "brings it)";

std::string folder_of_this_library() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&nvrtc_places), &info) == 0 ||
      info.dli_fname == nullptr) {
    return {};
  }
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? std::string(".") : file.substr(0, slash);
}

void* open_library(const std::string& path) {
  const std::vector<std::string> places =
      path.empty() ? nvrtc_places(folder_of_this_library()) : std::vector<std::string>{path};
  std::string tried;
  for (const std::string& place : places) {
    if (void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += str(tried.empty() ? "" : "; ", dlerror());
  }
  throw Unsupported(str("no NVRTC to compile kernels with (", tried, ")", kRemedy));
}

template <typename F>
void look_up(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (function == nullptr) throw Unsupported(str("NVRTC lacks ", name, kRemedy));
}

std::string resolved_path(const void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

}  // namespace

struct Nvrtc::Api {
  explicit Api(void* library) {
    look_up(library, "nvrtcGetErrorString", get_error_string);
    look_up(library, "nvrtcVersion", get_version);
    look_up(library, "nvrtcGetNumSupportedArchs", get_num_archs);
    look_up(library, "nvrtcGetSupportedArchs", get_archs);
    look_up(library, "nvrtcCreateProgram", create);
    look_up(library, "nvrtcDestroyProgram", destroy);
    look_up(library, "nvrtcCompileProgram", compile);
    look_up(library, "nvrtcGetProgramLogSize", get_log_size);
    look_up(library, "nvrtcGetProgramLog", get_log);
    look_up(library, "nvrtcGetPTXSize", get_ptx_size);
    look_up(library, "nvrtcGetPTX", get_ptx);
    look_up(library, "nvrtcGetCUBINSize", get_cubin_size);
    look_up(library, "nvrtcGetCUBIN", get_cubin);
  }

  void check(Result result, const char* call) const {
    if (result != 0) throw Error(str("NVRTC: ", call, ": ", get_error_string(result)));
  }

  // What a pair of NVRTC's calls, size and content, gives.
  std::vector<char> content(Result (*get_size)(Program, size_t*),
                            Result (*get)(Program, char*),
                            Program program) const {
    size_t size = 0;
    check(get_size(program, &size), "size of a result");
    std::vector<char> bytes(size);
    if (size != 0) check(get(program, bytes.data()), "a result");
    return bytes;
  }
  std::string text(Result (*get_size)(Program, size_t*),
                   Result (*get)(Program, char*),
                   Program program) const {
    const std::vector<char> bytes = content(get_size, get, program);
    return std::string(bytes.begin(), std::find(bytes.begin(), bytes.end(), '\0'));
  }

  const char* (*get_error_string)(Result);
  Result (*get_version)(int*, int*);
  Result (*get_num_archs)(int*);
  Result (*get_archs)(int*);
  Result (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  Result (*destroy)(Program*);
  Result (*compile)(Program, int, const char* const*);
  Result (*get_log_size)(Program, size_t*);
  Result (*get_log)(Program, char*);
  Result (*get_ptx_size)(Program, size_t*);
  Result (*get_ptx)(Program, char*);
  Result (*get_cubin_size)(Program, size_t*);
  Result (*get_cubin)(Program, char*);
};

std::string to_string(NvrtcVersion version) {
  return str(version.major, '.', version.minor);
}

std::vector<std::string> nvrtc_places(const std::string& beside) {
  // A wheel's folders: <site-packages>/ep/<this library> beside <site-packages>/nvidia/cu13/lib.
  return {"libnvrtc.so.13", beside + "/../nvidia/cu13/lib/libnvrtc.so.13"};
}

Nvrtc::Nvrtc(const std::string& path) : api_(std::make_unique<Api>(open_library(path))) {
  api_->check(api_->get_version(&version_.major, &version_.minor), "nvrtcVersion");
  path_ = resolved_path(reinterpret_cast<const void*>(api_->get_version));
  if (version_.major < kOldestMajor) {
    throw Unsupported(str(path_, " is NVRTC ", to_string(version_), kRemedy));
  }
}

Nvrtc::~Nvrtc() = default;

std::shared_ptr<const Nvrtc> Nvrtc::open(const std::string& path) {
  return std::shared_ptr<const Nvrtc>(new Nvrtc(path));
}

bool Nvrtc::knows(std::string_view arch) const {
  constexpr std::string_view kPrefix = "sm_";
  if (!arch.starts_with(kPrefix)) return false;
  arch.remove_prefix(kPrefix.size());
  if (arch.ends_with('a') || arch.ends_with('f')) arch.remove_suffix(1);
  int number = 0;
  const auto [end, error] = std::from_chars(arch.data(), arch.data() + arch.size(), number);
  if (error != std::errc{} || end != arch.data() + arch.size()) return false;
  int count = 0;
  api_->check(api_->get_num_archs(&count), "nvrtcGetNumSupportedArchs");
  std::vector<int> numbers(static_cast<size_t>(count));
  api_->check(api_->get_archs(numbers.data()), "nvrtcGetSupportedArchs");
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

Nvrtc::Output Nvrtc::compile(const Job& job) const {
  std::vector<const char*> names, texts, options;
  if (job.headers != nullptr) {
    for (const Header& header : job.headers->headers) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
  }
  for (const std::string& option : job.options)
    options.push_back(option.c_str());

  Program program = nullptr;
  api_->check(api_->create(&program, job.source.c_str(), job.name.c_str(),
                           static_cast<int>(names.size()), texts.data(), names.data()),
              "nvrtcCreateProgram");
  const auto destroy = [this](Program p) { api_->destroy(&p); };
  const std::unique_ptr<ProgramData, decltype(destroy)> owner(program, destroy);

  Output output;
  const auto start = std::chrono::steady_clock::now();
  const Result result = api_->compile(program, static_cast<int>(options.size()), options.data());
  output.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  output.log = api_->text(api_->get_log_size, api_->get_log, program);
  output.good = result == 0;
  if (!output.good) {
    output.error = api_->get_error_string(result);
    return output;
  }
  output.ptx = api_->text(api_->get_ptx_size, api_->get_ptx, program);
  const std::vector<char> cubin = api_->content(api_->get_cubin_size, api_->get_cubin, program);
  const auto* bytes = reinterpret_cast<const std::byte*>(cubin.data());
  output.cubin.assign(bytes, bytes + cubin.size());
  return output;
}

}  // namespace ep::jit
