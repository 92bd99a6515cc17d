# Installs the build into an empty prefix, builds a project that finds it there as a user's would, and runs its program.
# README_BLOCK: instead of the project's main.cc, the first block of the README in that language.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
foreach(component runtime development)
  run("${CMAKE_COMMAND}" --install "${KDA_BUILD_DIR}" --prefix "${WORK_DIR}/prefix" --component ${component})
endforeach()

file(COPY "${EXAMPLE_DIR}/" DESTINATION "${WORK_DIR}/source")
if(README_BLOCK)
  file(READ "${README}" text)
  string(REGEX MATCH "```${README_BLOCK}\n([^`]*)```" block "${text}")
  if(NOT block)
    message(FATAL_ERROR "${README} has no block in ${README_BLOCK}")
  endif()
  file(WRITE "${WORK_DIR}/source/main.cc" "${CMAKE_MATCH_1}")
endif()

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
