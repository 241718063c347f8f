#include "interpreter.hpp"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include <unistd.h>

namespace ep::python {

namespace {

// Dropped by threads that do not hold the interpreter's lock.  Never destroyed: those threads may outlive
// static destruction.
struct Dropped {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

Dropped& dropped() {
  static auto* const instance = new Dropped;
  return *instance;
}

// By the interpreter's main thread, with its lock.
int release_pending(void*) {
  release_dropped();
  return 0;
}

void drop(PyObject* object) {
  if (!is_running()) return;  // the process ends
  if (PyGILState_Check() != 0) {
    Py_DECREF(object);
    return;
  }
  {
    const std::lock_guard lock(dropped().mutex);
    dropped().objects.push_back(object);
    dropped().any.store(true, std::memory_order_relaxed);
  }
  // For programs that make no more calls of ours.  Refused when the queue is full: one of them is ours, or
  // the next call releases it.
  (void)Py_AddPendingCall(&release_pending, nullptr);
}

}  // namespace

void release_dropped() {
  if (!dropped().any.load(std::memory_order_relaxed)) return;
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(dropped().mutex);
    objects.swap(dropped().objects);
    dropped().any.store(false, std::memory_order_relaxed);
  }
  for (PyObject* const object : objects)
    Py_DECREF(object);
}

WithoutLock::~WithoutLock() {
  if (state_ == nullptr) return;
  while (!is_running())
    ::pause();
  PyEval_RestoreThread(state_);
}

std::shared_ptr<PyObject> share(py::object object) {
  return {object.release().ptr(), &drop};
}

bool is_running() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

bool signal_raised() {
  if (!is_running()) return false;
  const py::gil_scoped_acquire lock;
  return PyErr_CheckSignals() != 0;
}

uint64_t& turns_of_thread() {
  thread_local uint64_t turns = 0;
  return turns;
}

}  // namespace ep::python
