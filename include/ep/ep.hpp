// The public C++ interface of ep: expert-parallel dispatch and combine.
#pragma once

#include "ep/buffer.hpp"
#include "ep/combine.hpp"
#include "ep/communicator.hpp"
#include "ep/config.hpp"
#include "ep/dispatch.hpp"
#include "ep/error.hpp"
#include "ep/handle.hpp"
#include "ep/status.hpp"
#include "ep/stream.hpp"
#include "ep/tensor.hpp"
#include "ep/version.hpp"
