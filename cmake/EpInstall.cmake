# Installs the library, its headers and the package that find_package(ep) reads.

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ep")

install(TARGETS ep EXPORT ep-targets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/ep" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp")
install(EXPORT ep-targets NAMESPACE ep:: DESTINATION "${package_dir}")

file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/ep-config.cmake" @ONLY CONTENT [[
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/ep-targets.cmake")
]])
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ep-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/ep-config.cmake" "${PROJECT_BINARY_DIR}/ep-config-version.cmake"
        DESTINATION "${package_dir}")
