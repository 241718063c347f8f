// Small checks shared by dispatch and combine: each throws InvalidArgument with names and numbers.
#pragma once

#include <string>

#include "ep/tensor.hpp"
#include "kernels/config.hpp"
#include "kernels/params.hpp"

namespace ep::buffer {

std::string shape_text(const Tensor& t);

void check_given(const Tensor& t, const char* name);
void check_dims(const Tensor& t, const char* name, uint32_t num_dims);
void check_shape(const Tensor& t,
                 const char* name,
                 int64_t rows,
                 int64_t columns);  // [rows, columns]
void check_unit_column_stride(const Tensor& t, const char* name);

bool is_compute_dtype(DType dtype);  // bf16, fp16, fp32
// REQUIRES: is_compute_dtype(); throws otherwise, naming `name`.
kernels::Element element_of(DType dtype, const char* name);
DType dtype_of(kernels::Element element);

// Views for kernels.  REQUIRES: two dimensions (strided_view takes one as [N,1]).
kernels::Rows rows_view(const Tensor& t);
kernels::Strided strided_view(const Tensor& t);

}  // namespace ep::buffer
