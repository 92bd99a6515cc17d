# Installs the build into an empty prefix, builds a project that finds it there as a user's would, and runs its program.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
foreach(component runtime development)
  run("${CMAKE_COMMAND}" --install "${KDA_BUILD_DIR}" --prefix "${WORK_DIR}/prefix" --component ${component})
endforeach()

file(COPY "${EXAMPLE_DIR}/" DESTINATION "${WORK_DIR}/source")

run("${CMAKE_COMMAND}" -G "${GENERATOR}" -S "${WORK_DIR}/source" -B "${WORK_DIR}/build" "-DCMAKE_BUILD_TYPE=${BUILD_TYPE}"
    "-DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix" "-DCMAKE_${LANGUAGE}_COMPILER=${COMPILER}" "-DCMAKE_${LANGUAGE}_FLAGS=${FLAGS}")
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build")
execute_process(
  COMMAND "${WORK_DIR}/build/${PROGRAM}"
  OUTPUT_VARIABLE output
  COMMAND_ERROR_IS_FATAL ANY)
message("${output}")
foreach(text ${EXPECTED})
  string(FIND "${output}" "${text}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "the example did not print: ${text}")
  endif()
endforeach()
