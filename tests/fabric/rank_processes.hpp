// Ranks for the tests of csrc/fabric: threads of this process, or forked processes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/text.hpp"
#include "ep/communicator.hpp"
#include "ep/error.hpp"
#include "fabric/host/fd.hpp"
#include "fabric/host/socket.hpp"

namespace ep::fabric {

using Bytes = Communicator::Bytes;
using Comm = std::shared_ptr<Communicator>;

inline Bytes bytes_of_text(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}

inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" lacks \"" << part << '"';
}

constexpr double kLongS = 60.0;   // never reached unless a test fails
constexpr double kShortS = 0.3;   // reached on purpose
constexpr double kMarginS = 3.0;  // what a loaded machine may add
constexpr double kNoticeS = 2.0;  // within this an end is noticed

// Not ==, which sanitizers make slow for megabytes.
inline bool is_same(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Rounds of which every rank gets what the others of the same job gave.
inline void expect_text_rounds(Communicator& comm, const std::string& job, int num_rounds) {
  for (int round = 0; round < num_rounds; ++round) {
    const auto text = [&](uint32_t rank) { return bytes_of_text(str(job, ' ', rank, ' ', round)); };
    const std::vector<Bytes> got = comm.all_gather(text(comm.rank()), kLongS);
    ASSERT_EQ(got.size(), comm.num_ranks());
    for (uint32_t rank = 0; rank < got.size(); ++rank)
      ASSERT_EQ(got[rank], text(rank));
  }
}

// A TCP port that nobody else is given while this lives: bound, but not listened at.
class Port {
 public:
  explicit Port(bool ipv6 = false)
      : fd_(::socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), ipv6_(ipv6) {
    const int on = 1;
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_storage address{};
    auto* in4 = reinterpret_cast<sockaddr_in*>(&address);
    auto* in6 = reinterpret_cast<sockaddr_in6*>(&address);
    address.ss_family = ipv6 ? AF_INET6 : AF_INET;
    if (ipv6) in6->sin6_addr = in6addr_loopback;
    if (!ipv6) in4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t num_bytes = ipv6 ? sizeof *in6 : sizeof *in4;
    is_good_ = ::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), num_bytes) == 0;
    ::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &num_bytes);
    number_ = ntohs(ipv6 ? in6->sin6_port : in4->sin_port);
  }

  bool is_good() const { return is_good_; }
  std::string address() const { return str(ipv6_ ? "[::1]:" : "127.0.0.1:", number_); }

 private:
  Fd fd_;
  bool ipv6_, is_good_ = false;
  uint16_t number_ = 0;
};

// Calls fn(rank) in a thread per rank; an exception that leaves it fails the test.
inline void run_threads(uint32_t num_ranks, const std::function<void(uint32_t)>& fn) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&fn, rank] {
      try {
        fn(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
}

// A forked process.  REQUIRES: no other thread runs.
class Child {
 public:
  explicit Child(const std::function<void()>& fn) {
    std::fflush(nullptr);  // or both print what is buffered
    pid_ = ::fork();
    if (pid_ != 0) return;
    int status = 0;
    try {
      fn();
      if (::testing::Test::HasFailure()) status = 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      status = 2;
    }
    std::fflush(nullptr);
    ::_exit(status);
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  ~Child() {
    if (pid_ <= 0) return;
    kill();
    ::waitpid(pid_, nullptr, 0);
  }

  void kill() const { ::kill(pid_, SIGKILL); }
  pid_t pid() const { return pid_; }

  // The exit status; -1 when it was killed, -2 (and it is killed) when it takes longer than
  // `limit_s`.
  int join(double limit_s = 60.0) {
    const Fd process(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    pollfd waiting{process.get(), POLLIN, 0};
    const bool has_ended = ::poll(&waiting, 1, static_cast<int>(limit_s * 1e3)) == 1;
    if (!has_ended) kill();
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    if (!has_ended) return -2;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = -1;
};

// fn(rank) in a process per rank; each must end well.
inline void run_processes(uint32_t num_ranks, const std::function<void(uint32_t)>& fn) {
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < num_ranks; ++rank)
    children.emplace_back([&fn, rank] { fn(rank); });
  for (uint32_t rank = 0; rank < num_ranks; ++rank)
    EXPECT_EQ(children[rank].join(), 0) << "rank " << rank;
}

// One bit between processes, or threads: wait() returns once signal() was called.
class Signal {
 public:
  Signal() {
    int raw[2] = {-1, -1};
    is_good_ = ::pipe2(raw, O_CLOEXEC) == 0;
    read_ = Fd(raw[0]);
    write_ = Fd(raw[1]);
  }
  void signal() const {
    const char byte = 1;
    if (::write(write_.get(), &byte, 1) != 1) ADD_FAILURE() << "pipe";
  }
  void wait() const {
    char byte = 0;
    if (::read(read_.get(), &byte, 1) != 1) ADD_FAILURE() << "pipe";
  }

 private:
  Fd read_, write_;
  bool is_good_ = false;
};

// What grows when something leaks.
struct Census {
  size_t num_fds, num_threads, num_mappings, num_shm_files;
  bool operator==(const Census&) const = default;
};

inline Census take_census() {
  const auto entries = [](const char* folder) {
    std::error_code ignored;
    const std::filesystem::directory_iterator begin(folder, ignored);
    return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
  };
  // Windows only: the allocator and the sanitizers map as they like.
  std::ifstream maps("/proc/self/maps");
  size_t num_mappings = 0;
  for (std::string line; std::getline(maps, line);)
    num_mappings += line.find("ep-window") != line.npos;
  return {entries("/proc/self/fd"), entries("/proc/self/task"), num_mappings, entries("/dev/shm")};
}

// The census once it equals `want`, or as it is after five seconds: a thread that has been joined stays
// in /proc for a moment, until the kernel has taken it off its list.
inline Census settled_census(const Census& want) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  Census census = take_census();
  while (!(census == want) && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
    census = take_census();
  }
  return census;
}

inline std::ostream& operator<<(std::ostream& out, const Census& census) {
  return out << census.num_fds << " fds, " << census.num_threads << " threads, "
             << census.num_mappings << " windows, " << census.num_shm_files << " files in /dev/shm";
}

}  // namespace ep::fabric
