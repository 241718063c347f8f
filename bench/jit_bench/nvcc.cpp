#include "bench/jit_bench/nvcc.hpp"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ep/error.hpp"

extern char** environ;

namespace ep::bench {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  if (!(file << text).flush()) throw Error("cannot write " + path.string());
}

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

struct Exit {
  int status;
  double cpu_seconds;
};

// Runs the program to its end; what it prints goes to `log`.
Exit run(const std::vector<std::string>& command, const std::string& log) {
  std::vector<char*> arguments;
  for (const std::string& word : command)
    arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t pid = 0;
  const int failed =
      posix_spawnp(&pid, command[0].c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) throw Error(command[0] + ": " + std::strerror(failed));
  int status = 0;
  rusage usage{};
  while (wait4(pid, &status, 0, &usage) < 0) {
    if (errno != EINTR) throw Error(std::string("wait4: ") + std::strerror(errno));
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128,
          seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime)};
}

bool is_program(const std::string& name) {
  try {
    return run({name, "--version"}, "/dev/null").status == 0;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string find_nvcc(const std::string& wanted) {
  if (!wanted.empty()) {
    if (!is_program(wanted)) throw Error("--nvcc " + wanted + ": no such program");
    return wanted;
  }
  for (const char* program : {"nvcc", "/usr/local/cuda/bin/nvcc"}) {
    if (is_program(program)) return program;
  }
  return {};
}

Nvcc::Nvcc(std::string program, const jit::HeaderBundle& headers) : program_(std::move(program)) {
  std::string pattern = (fs::temp_directory_path() / "jit-bench-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw Error("cannot make a folder " + pattern);
  folder_ = pattern;
  for (const jit::Header& header : headers.headers) {
    const fs::path file = fs::path(folder_) / header.name;
    fs::create_directories(file.parent_path());
    write_file(file, header.text);
  }
}

Nvcc::~Nvcc() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

Seconds Nvcc::compile(const jit::Unit& unit) const {
  const fs::path folder = folder_, source = folder / "unit.cu", log = folder / "log";
  write_file(source, unit.source);
  std::vector<std::string> command = {program_, "-cubin", "-arch=" + unit.arch};
  command.insert(command.end(), unit.options.begin(), unit.options.end());
  command.insert(command.end(), {"-I" + folder_, "-o", folder / "unit.cubin", source});
  const auto start = std::chrono::steady_clock::now();
  const Exit exit = run(command, log);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (exit.status != 0)
    throw Error(program_ + " does not compile " + unit.name + ":\n" + read_file(log));
  return {seconds, exit.cpu_seconds};
}

}  // namespace ep::bench
