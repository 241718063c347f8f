# Checks that run as part of a build or of ctest.

# ep_check_headers(<target> <root> <folder>...)
# Builds one unit per header (*.hpp, *.cuh) below the folders, which are relative to <root>; the
# unit includes the header twice and nothing else.  Globbed, so that no header escapes.  Left out
# are ptx/, device instructions that NVRTC compiles, simd_*, built once per instruction set, and
# ep/torch.hpp, which needs a libtorch (tests/install).
function(ep_check_headers target root)
  set(units "")
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE headers RELATIVE "${root}" CONFIGURE_DEPENDS
         "${root}/${folder}/*.hpp" "${root}/${folder}/*.cuh")
    list(FILTER headers EXCLUDE REGEX "/ptx/|/simd_|^ep/torch.hpp$")
    foreach(header IN LISTS headers)
      string(MAKE_C_IDENTIFIER "${header}" id)
      set(unit "${CMAKE_CURRENT_BINARY_DIR}/headers/${id}.cpp")
      file(CONFIGURE OUTPUT "${unit}" CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
      list(APPEND units "${unit}")
    endforeach()
  endforeach()
  if(NOT units)
    return()
  endif()
  add_library(${target} OBJECT ${units})
  ep_set_options(${target})
  target_compile_options(${target} PRIVATE -O0 -g0)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include"
                                               "${PROJECT_SOURCE_DIR}/csrc")
endfunction()

# ep_add_compile_fail_test(<name> <source>)
# The source must compile as it is, and must not with -DEP_EXPECT_FAILURE, so it cannot rot.
function(ep_add_compile_fail_test name source)
  set(command "${CMAKE_CXX_COMPILER}" -std=c++20 -fsyntax-only -I "${PROJECT_SOURCE_DIR}/include"
              -I "${PROJECT_SOURCE_DIR}/csrc" "${CMAKE_CURRENT_SOURCE_DIR}/${source}")
  add_test(NAME compile_fail.${name}.compiles COMMAND ${command})
  add_test(NAME compile_fail.${name}.fails COMMAND ${command} -DEP_EXPECT_FAILURE)
  set_tests_properties(compile_fail.${name}.fails PROPERTIES WILL_FAIL TRUE)
  set_tests_properties(compile_fail.${name}.compiles compile_fail.${name}.fails PROPERTIES LABELS unit)
endfunction()
