// How ranks meet, from Python.
#include "ep/communicator.hpp"

#include <memory>
#include <string>
#include <utility>

#include "arguments.hpp"
#include "bindings.hpp"
#include "ep/error.hpp"

namespace ep::python {

namespace {

py::bytes to_bytes(std::span<const std::byte> data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

py::list to_list(const std::vector<Communicator::Bytes>& all) {
  py::list list;
  for (const auto& bytes : all)
    list.append(to_bytes(bytes));
  return list;
}

// Gathers through a Python function: (bytes, timeout_s) -> a list of bytes, by rank.
class PythonCommunicator final : public Communicator {
 public:
  PythonCommunicator(uint32_t rank, uint32_t num_ranks, py::object gather, double timeout_s)
      : rank_(rank),
        num_ranks_(num_ranks),
        gather_(share(std::move(gather))),
        timeout_s_(timeout_s) {}

  uint32_t rank() const override { return rank_; }
  uint32_t num_ranks() const override { return num_ranks_; }
  double timeout_s() const override { return timeout_s_; }

  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    const py::gil_scoped_acquire lock;
    const py::object result = py::handle(gather_.get())(to_bytes(mine), timeout_s);
    std::vector<Bytes> all;
    for (const py::handle item : py::iter(result)) {
      const auto view = item.cast<std::string_view>();
      const auto bytes = std::as_bytes(std::span(view.data(), view.size()));
      all.emplace_back(bytes.begin(), bytes.end());
    }
    if (all.size() != num_ranks_) {
      throw InvalidArgument("all_gather gave " + std::to_string(all.size()) + " values for " +
                            std::to_string(num_ranks_) + " ranks");
    }
    return all;
  }

 private:
  const uint32_t rank_, num_ranks_;
  const std::shared_ptr<PyObject> gather_;
  const double timeout_s_;
};

std::shared_ptr<Communicator> make_callbacks(const py::object& rank,
                                             const py::object& num_ranks,
                                             py::object gather,
                                             const py::object& timeout_s) {
  const uint32_t r = read_u32(rank, "rank"), n = read_u32(num_ranks, "num_ranks");
  if (!PyCallable_Check(gather.ptr())) throw py::type_error("all_gather is not callable");
  // Checks rank against num_ranks in the words of the others.
  (void)Communicator::callbacks(r, n,
                                [](auto, double) { return std::vector<Communicator::Bytes>(); });
  const double bound = timeout_s.is_none() ? -1.0 : read_seconds(timeout_s, "timeout_s");
  return std::make_shared<PythonCommunicator>(r, n, std::move(gather), bound);
}

std::vector<std::shared_ptr<Communicator>> make_threads(const py::object& num_ranks) {
  auto ranks = Communicator::threads(read_u32(num_ranks, "num_ranks"));
  for (const auto& rank : ranks)
    rank->interrupt = &signal_raised;
  return ranks;
}

std::shared_ptr<Communicator> make_tcp(const py::object& address,
                                       const py::object& rank,
                                       const py::object& num_ranks,
                                       const py::object& timeout_s) {
  const std::string where = read_text(address, "address");
  const uint32_t r = read_u32(rank, "rank"), n = read_u32(num_ranks, "num_ranks");
  const double bound = read_seconds(timeout_s, "timeout_s");
  return without_lock([&] { return Communicator::tcp(where, r, n, bound, &signal_raised); });
}

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("num_ranks", &Communicator::num_ranks)
      .def_property_readonly("timeout_s",
                             [](const Communicator& self) -> py::object {
                               if (self.timeout_s() < 0) return py::none();
                               return py::float_(self.timeout_s());
                             })
      .def(
          "all_gather",
          [](Communicator& self, const py::bytes& mine, const py::object& timeout_s) {
            const auto view = static_cast<std::string_view>(mine);
            const double bound = read_seconds(timeout_s, "timeout_s");
            return to_list(without_lock([&] {
              return self.all_gather(std::as_bytes(std::span(view.data(), view.size())), bound);
            }));
          },
          py::arg("mine"), py::arg("timeout_s"))
      .def_static("single", &Communicator::single)
      .def_static("threads", &make_threads, py::arg("num_ranks"))
      .def_static("tcp", &make_tcp, py::arg("address"), py::arg("rank"), py::arg("num_ranks"),
                  py::arg("timeout_s"))
      .def_static("callbacks", &make_callbacks, py::arg("rank"), py::arg("num_ranks"),
                  py::arg("all_gather"), py::arg("timeout_s"));
}

}  // namespace ep::python
