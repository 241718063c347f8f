// What the binding needs of the interpreter: its lock, signals, and references that outlive a call.
//
// The interpreter's lock (GIL) is released around every call that may block.  The library's own threads
// never take it: what they drop is put aside and released by the next thread that holds it.
#pragma once

#include <memory>

#include <pybind11/pybind11.h>

namespace ep::python {

namespace py = pybind11;

// A reference that any thread may drop.
std::shared_ptr<PyObject> share(py::object object);

// For `interrupt` callbacks: has a signal handler raised?  The exception stays set in this thread, and
// the translator of ep::Interrupted lets it through.
bool signal_raised();

// False when the interpreter is going down: its lock must not be asked for any more.
bool is_running();

// How many collective turns this thread has spent.  Python code compares it around a call, to know
// whether an exception still has to spend the turn.
uint64_t& turns_of_thread();

// Releases what other threads dropped.  REQUIRES: the interpreter's lock.
void release_dropped();

// Gives the interpreter's lock away for its lifetime.  When the interpreter went down meanwhile, the thread
// stops for ever at the end: it has nowhere to return to, and the process is about to exit.  The thread that
// takes the interpreter down keeps the lock: nobody else wants it any more.
class WithoutLock {
 public:
  WithoutLock() : state_(is_running() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutLock();
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* const state_;
};

// Runs `work`, which may block, without the interpreter's lock.
template <typename Work>
auto without_lock(Work work) {
  release_dropped();
  const WithoutLock released;
  return work();
}

}  // namespace ep::python
