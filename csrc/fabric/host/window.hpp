// The memory of one rank that others reach: a sealed memfd, mapped shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "fabric/host/fd.hpp"

namespace ep::fabric {

// A mapping.  A forked child inherits it (taking it away would make a stray access of the child a
// crash); the pages stay shared with it.
class Window {
 public:
  Window(std::byte* base, uint64_t num_bytes) : base_(base), num_bytes_(num_bytes) {}
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::byte* base() const { return base_; }
  uint64_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* base_;
  uint64_t num_bytes_;
};

// Address space of `num_bytes`, rounded up to pages, all zero; memory is taken when a page is first
// touched.  It has no name in any file system and can be neither shrunk nor grown, so no peer can
// make an access fault.  Throws CapacityError of `rank`.
Fd create_window_file(uint64_t num_bytes, uint32_t rank);

// Maps a file that create_window_file() made, here or in another process.  Throws CapacityError of
// `rank`, who maps; Error when the file is not such a file of `num_bytes`.
std::shared_ptr<Window> map_window(const Fd& file, uint64_t num_bytes, uint32_t rank);

// Hands a window to the ranks that are threads of the same process; they get the address of this
// object in a message.
//
// State:    the window, until its owner withdraws; how many holders (owner and takers) are still to
//           leave.
// Writers:  the owner makes it and withdraws once; each taker takes once.  All under the mutex.
// Pairing:  the last to leave deletes it, so nobody ever finds a dangling address.  A taker that
//           never takes (its set-up failed in the very message that carried the address) leaves
//           this object behind, empty.
class Handover {
 public:
  static Handover* offer(std::shared_ptr<Window> window, uint32_t num_takers);
  // The window, or null when its owner has given up.
  std::shared_ptr<Window> take();
  void withdraw();

 private:
  Handover(std::shared_ptr<Window> window, uint32_t num_holders);
  ~Handover() = default;
  std::shared_ptr<Window> leave(bool is_owner);

  std::mutex mutex_;
  std::shared_ptr<Window> window_;
  uint32_t num_holders_;
};

}  // namespace ep::fabric
