# Installs the library, its headers and the package that find_package(ep) reads.  Nothing in it names
# a folder of the build: what was installed may be moved.  `cmake --install ... --component devel`
# installs this and nothing else.

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ep")

install(TARGETS ep EXPORT ep-targets
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT devel)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/ep" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        COMPONENT devel FILES_MATCHING PATTERN "*.hpp")
install(EXPORT ep-targets NAMESPACE ep:: DESTINATION "${package_dir}" COMPONENT devel)

file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/ep-config.cmake" @ONLY CONTENT [[
if(NOT CMAKE_CXX_COMPILER)
  set(${CMAKE_FIND_PACKAGE_NAME}_FOUND FALSE)
  set(${CMAKE_FIND_PACKAGE_NAME}_NOT_FOUND_MESSAGE
      "ep is a C++ library: enable_language(CXX) before find_package(ep)")
  return()
endif()
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/ep-targets.cmake")
]])
# Before 1.0 a minor version may change the interface: find_package(ep 0.1) takes 0.1.x only.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ep-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/ep-config.cmake" "${PROJECT_BINARY_DIR}/ep-config-version.cmake"
        DESTINATION "${package_dir}" COMPONENT devel)
