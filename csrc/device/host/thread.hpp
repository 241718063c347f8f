// Starting the library's own threads.
#pragma once

#include <functional>
#include <thread>

namespace ep::device::host {

// A thread that takes no asynchronous signals: they stay with the user's threads, whose handlers
// (Python's) and interrupted system calls expect them.  `name` has at most 15 characters.
// Throws Error when the system has no thread left.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace ep::device::host
