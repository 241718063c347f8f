#include "support/ranks.hpp"

#include <cerrno>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ep::test {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

void throw_first(const std::vector<std::string>& failures) {
  for (uint32_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty())
      throw std::runtime_error("rank " + std::to_string(rank) + ": " + failures[rank]);
  }
}

int check(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

struct Child {
  pid_t pid = -1;
  int pipe = -1;  // its failure's text; end of file without a byte: none
};

// The body of a child; never returns.  _exit: the parent's buffers and test state are not ours to
// finish.
[[noreturn]] void run_child(uint32_t rank,
                            uint32_t num_ranks,
                            const std::string& address,
                            int pipe,
                            const RankFunction& function) {
  std::string failure;
  try {
    function(Communicator::tcp(address, rank, num_ranks, 30.0));
    if (::testing::Test::HasFailure()) failure = "expectations failed, see above";
  } catch (...) {
    failure = text_of(std::current_exception());
  }
  std::fflush(nullptr);
  if (!failure.empty() && write(pipe, failure.data(), failure.size()) < 0) _exit(2);
  _exit(failure.empty() ? 0 : 1);
}

std::string failure_of(const Child& child) {
  std::string text;
  char part[512];
  for (ssize_t n = read(child.pipe, part, sizeof part); n > 0;
       n = read(child.pipe, part, sizeof part)) {
    text.append(part, static_cast<size_t>(n));
  }
  close(child.pipe);
  int status = 0;
  check(waitpid(child.pid, &status, 0), "waitpid");
  if (WIFSIGNALED(status)) return text + " ended by signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0 && text.empty())
    return "exit status " + std::to_string(WEXITSTATUS(status));
  return text;
}

}  // namespace

void run_threads(uint32_t num_ranks, const RankFunction& function) {
  const std::vector<std::shared_ptr<Communicator>> group = Communicator::threads(num_ranks);
  std::vector<std::string> failures(num_ranks);
  {
    std::vector<std::jthread> threads;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          function(group[rank]);
        } catch (...) {
          failures[rank] = text_of(std::current_exception());
        }
      });
    }
  }
  throw_first(failures);
}

void run_processes(uint32_t num_ranks, const RankFunction& function) {
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  std::fflush(nullptr);
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    int ends[2];
    check(pipe(ends), "pipe");
    const pid_t pid = check(fork(), "fork");
    if (pid == 0) {
      close(ends[0]);
      for (const Child& other : children)
        close(other.pipe);
      run_child(rank, num_ranks, address, ends[1], function);
    }
    close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  std::vector<std::string> failures;
  for (const Child& child : children)
    failures.push_back(failure_of(child));
  throw_first(failures);
}

uint16_t free_port() {
  const int fd = check(socket(AF_INET, SOCK_STREAM, 0), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  check(bind(fd, reinterpret_cast<const sockaddr*>(&address), length), "bind");
  check(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), "getsockname");
  close(fd);
  return ntohs(address.sin_port);
}

}  // namespace ep::test
