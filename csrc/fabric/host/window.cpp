#include "fabric/host/window.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/math.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/host/socket.hpp"

namespace ep::fabric {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t round_up_to_pages(uint64_t num_bytes) {
  return align_up(num_bytes, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
}

uint64_t soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  return limit.rlim_cur;
}

CapacityError no_window(uint32_t rank,
                        uint64_t num_bytes,
                        uint64_t available,
                        const std::string& why) {
  return CapacityError(str("rank ", rank, " cannot make a window of ", num_bytes, " bytes: ", why),
                       rank, num_bytes, available);
}

}  // namespace

Window::~Window() {
  ::munmap(base_, round_up_to_pages(num_bytes_));
}

Fd create_window_file(uint64_t num_bytes, uint32_t rank) {
  // Beyond this limit ftruncate() does not fail but kills the process with SIGXFSZ.
  const uint64_t limit = std::min<uint64_t>(soft_limit(RLIMIT_FSIZE), uint64_t{1} << 62);
  if (num_bytes > limit) throw no_window(rank, num_bytes, limit, "above RLIMIT_FSIZE or 2^62");
  Fd file(::memfd_create("ep-window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) {
    if (errno == EMFILE || errno == ENFILE) throw descriptor_shortage(rank, errno);
    throw no_window(rank, num_bytes, 0, str("memfd_create: ", errno_text(errno)));
  }
  if (::ftruncate(file.get(), static_cast<off_t>(round_up_to_pages(num_bytes))) != 0) {
    throw no_window(rank, num_bytes, 0, str("ftruncate: ", errno_text(errno)));
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
    throw no_window(rank, num_bytes, 0, str("F_ADD_SEALS: ", errno_text(errno)));
  }
  return file;
}

std::shared_ptr<Window> map_window(const Fd& file, uint64_t num_bytes, uint32_t rank) {
  const uint64_t map_bytes = round_up_to_pages(num_bytes);
  struct stat info {};
  const bool is_ours = ::fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode) &&
                       static_cast<uint64_t>(info.st_size) == map_bytes &&
                       (::fcntl(file.get(), F_GET_SEALS) & kSeals) == kSeals;
  if (!is_ours) {
    throw Error(str("rank ", rank, " was passed a file of ", info.st_size,
                    " bytes that is not a sealed window of ", map_bytes));
  }
  void* base =
      ::mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (base == MAP_FAILED) {
    const std::string why =
        str(errno == ENOMEM ? "out of memory: " : "", "mmap: ", errno_text(errno));
    const uint64_t limit = soft_limit(RLIMIT_AS);
    throw no_window(rank, num_bytes, limit < num_bytes ? limit : 0, why);
  }
  // A core dump of every rank's window helps nobody.
  (void)::madvise(base, map_bytes, MADV_DONTDUMP);
  return std::make_shared<Window>(static_cast<std::byte*>(base), num_bytes);
}

Handover::Handover(std::shared_ptr<Window> window, uint32_t num_holders)
    : window_(std::move(window)), num_holders_(num_holders) {}

Handover* Handover::offer(std::shared_ptr<Window> window, uint32_t num_takers) {
  return new Handover(std::move(window), num_takers + 1);
}

std::shared_ptr<Window> Handover::take() {
  return leave(/*is_owner=*/false);
}

void Handover::withdraw() {
  leave(/*is_owner=*/true);
}

std::shared_ptr<Window> Handover::leave(bool is_owner) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Window> window = is_owner ? std::exchange(window_, nullptr) : window_;
  const bool is_last = --num_holders_ == 0;
  lock.unlock();
  if (is_last) delete this;
  return window;
}

}  // namespace ep::fabric
