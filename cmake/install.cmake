# Headers, library and the package that find_package(kda) reads.
include(CMakePackageConfigHelpers)

set(KDA_PACKAGE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/kda")

install(
  TARGETS kda
  EXPORT kdaTargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
          COMPONENT runtime
          NAMELINK_COMPONENT development
  INCLUDES
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(KDA_CUDA)
  install(
    TARGETS kda_cuda
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
            COMPONENT runtime)
endif()
install(
  DIRECTORY "${PROJECT_SOURCE_DIR}/include/"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  COMPONENT development
  FILES_MATCHING
  PATTERN "*.h")
install(
  EXPORT kdaTargets
  NAMESPACE kda::
  DESTINATION "${KDA_PACKAGE_DIR}"
  COMPONENT development)

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/kdaConfig.cmake.in" "${PROJECT_BINARY_DIR}/kdaConfig.cmake"
                              INSTALL_DESTINATION "${KDA_PACKAGE_DIR}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kdaConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/kdaConfig.cmake" "${PROJECT_BINARY_DIR}/kdaConfigVersion.cmake"
  DESTINATION "${KDA_PACKAGE_DIR}"
  COMPONENT development)
