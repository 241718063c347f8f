#include "jit/compile.hpp"

#include <cstdint>
#include <sstream>
#include <utility>

#include "common/text.hpp"

namespace ep::jit {
namespace {

// FNV-1a with 128 bits: no two of the few thousand units that ever exist share a key by accident.
class Hash {
 public:
  // Texts are told apart by their lengths, so that moving a byte from one to the next changes the hash.
  Hash& add(std::string_view text) {
    uint64_t size = text.size();
    for (int i = 0; i < 8; ++i, size >>= 8)
      add_byte(static_cast<uint8_t>(size));
    for (const char c : text)
      add_byte(static_cast<uint8_t>(c));
    return *this;
  }

  std::string hex() const {
    std::string text;
    for (int shift = 124; shift >= 0; shift -= 4)
      text += "0123456789abcdef"[static_cast<uint32_t>(state_ >> shift) & 15];
    return text;
  }

 private:
  __extension__ using Word = unsigned __int128;

  void add_byte(uint8_t byte) { state_ = (state_ ^ byte) * kPrime; }

  static constexpr Word kPrime = (Word{1} << 88) + 0x13B;
  Word state_ = (Word{0x6C62272E07BB0142} << 64) + 0x62B821756295C58D;
};

std::string numbered(const std::string& source) {
  std::istringstream lines(source);
  std::string text;
  int number = 0;
  for (std::string line; std::getline(lines, line);)
    text += str(++number, "\t", line, "\n");
  return text;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words)
    text += (text.empty() ? "" : " ") + word;
  return text;
}

}  // namespace

std::vector<std::string> options_of(const Unit& unit) {
  std::vector<std::string> options = {"-arch=" + unit.arch, "--ptxas-options=-v",
                                      "--no-source-include"};
  options.insert(options.end(), unit.options.begin(), unit.options.end());
  return options;
}

std::string key_of(const Unit& unit, NvrtcVersion compiler) {
  Hash hash;
  hash.add(unit.source).add(to_string(compiler));
  hash.add(unit.headers == nullptr ? std::string_view{} : unit.headers->hash);
  for (const std::string& option : options_of(unit))
    hash.add(option);
  return hash.hex();
}

Kernel compile(const Nvrtc& nvrtc, const Unit& unit) {
  const std::string compiler = "NVRTC " + to_string(nvrtc.version());
  if (!nvrtc.knows(unit.arch)) {
    throw Unsupported(str(compiler, " (", nvrtc.path(), ") does not know ", unit.arch));
  }
  const std::vector<std::string> options = options_of(unit);
  Nvrtc::Output output = nvrtc.compile({unit.name + ".cu", unit.source, options, unit.headers});
  if (!output.good) {
    throw CompileError(
        str(compiler, " does not compile ", unit.name, " (", output.error, "), options ",
            joined(options), "\n", output.log, "\nThe source is:\n", numbered(unit.source)),
        output.log);
  }
  Kernel kernel;
  kernel.use = parse_ptxas_log(output.log);
  kernel.cubin = std::move(output.cubin);
  kernel.ptx = std::move(output.ptx);
  kernel.log = std::move(output.log);
  kernel.seconds = output.seconds;
  return kernel;
}

}  // namespace ep::jit
