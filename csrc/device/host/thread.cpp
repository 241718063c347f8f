#include "device/host/thread.hpp"

#include <string>
#include <system_error>
#include <utility>

#include <pthread.h>
#include <signal.h>

#include "ep/error.hpp"

namespace ep::device::host {

namespace {

// A new thread inherits the mask of its creator, so the creator wears it for that moment.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t mask;
    sigfillset(&mask);
    // Faults of the thread itself must still reach a crash handler.
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&mask, fault);
    }
    pthread_sigmask(SIG_SETMASK, &mask, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_thread(const char* name, std::function<void()> body) {
  const WithoutSignals without_signals;
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& e) {
    throw Error("cannot start the thread " + std::string(name) + ": " + e.what());
  }
}

}  // namespace ep::device::host
