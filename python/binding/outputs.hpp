// dispatch(out=): results in arrays that the caller brings.
#pragma once

#include <memory>

#include "ep/buffer.hpp"
#include "interpreter.hpp"
#include "results.hpp"

namespace ep::python {

// A mapping from names of results to arrays; extras to a list of them.
class GivenOutputs {
 public:
  // Reads `out` (None: nothing is given) into args.out; the other arguments have been read.
  // Throws TypeError for names that are no results, and what the arrays' own reading throws.
  void read(py::handle out, const EPBuffer& buffer, DispatchArgs& args);

  // The result's arrays are the given objects, where these have just as many rows.
  void give_back(DispatchOutput& output) const;

 private:
  py::dict arrays_;  // by name, without extras
  py::list extras_;
};

// {name: (shape, dtype's name, strides)} of what dispatch(args) would make; extras: a list.
py::dict spec_as_dict(const DispatchTensors& spec);

}  // namespace ep::python
