// ep.Stream and ep.Event.
#include <memory>
#include <string>

#include <pybind11/operators.h>

#include "arguments.hpp"
#include "bindings.hpp"
#include "ep/error.hpp"
#include "ep/stream.hpp"

namespace ep::python {

namespace {

constexpr double kLookForSignalsEvery_s = 0.05;

// For events without a buffer behind them, whose waits ask nobody for signals.
void wait_with_signals(const Event& event) {
  while (!event.query()) {
    if (signal_raised()) throw Interrupted("the wait was interrupted");
    try {
      event.synchronize(kLookForSignalsEvery_s);
    } catch (const Timeout&) {  // not yet
    }
  }
}

void wait(const Event& event, const py::object& stream) {
  Stream other = read_stream(stream);
  if (other.defined())
    other.wait(event);
  else  // on CPUs the current stream is the calling thread
    without_lock([&] { event.wait(); });
}

void synchronize(const Event& event, const py::object& timeout_s) {
  const double bound = timeout_s.is_none() ? -1.0 : read_seconds(timeout_s, "timeout_s");
  without_lock([&] { event.synchronize(bound); });
}

}  // namespace

void bind_streams(py::module_& module) {
  py::class_<Event>(module, "Event", R"(A point in a stream's work.

``ep.Event()`` is the point now, in the current stream; on CPUs that is the calling thread, so it is
complete.  Events of dispatch and combine also carry that call's deferred fault.)")
      .def(py::init<>())
      .def("wait", &wait, py::arg("stream") = py::none(),
           "The stream (None: the current one; on CPUs the calling thread) goes on when the point "
           "is "
           "reached.  Raises no deferred fault.")
      .def("query", &Event::query, "Has the point been reached?  Neither blocks nor raises.")
      .def("synchronize", &synchronize, py::arg("timeout_s") = py::none(),
           "Blocks until the point is reached and raises, once, what the call behind it deferred.  "
           "Raises ep.Timeout, without effect on the buffer, after timeout_s seconds (None: no "
           "bound).");
  py::class_<Stream, std::shared_ptr<Stream>>(module, "Stream",
                                              R"(An in-order queue of work with a thread of its own.

Args:
    device: only "cpu" in this version.)")
      .def(py::init([](const py::object& device) {
             const std::string name = py::str(device);
             if (name != "cpu" && name != "auto")
               throw Unsupported("ep.Stream on " + name +
                                 ": this version has streams of the CPU only");
             // The last reference waits for what is queued.
             return std::shared_ptr<Stream>(new Stream(Stream::host()), [](Stream* stream) {
               without_lock([&] { delete stream; });
             });
           }),
           py::arg("device") = "cpu")
      .def("record", &Stream::record, "The point after everything queued so far.")
      .def(
          "wait",
          [](Stream& self, const py::object& events) {
            for (const Event& event : read_events(events))
              self.wait(event);
          },
          py::arg("event"),
          "The stream goes on only when the event (or each of a list) is reached.")
      .def(
          "synchronize",
          [](Stream& self) { without_lock([&] { wait_with_signals(self.record()); }); },
          "Blocks until everything queued so far is done.")
      .def(py::self == py::self);
}

}  // namespace ep::python
