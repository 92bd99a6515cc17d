# The warnings that this project's own code is free of.
function(kda_enable_warnings target)
  # clang's -Wconversion asks for more than g++'s: sizes of containers are unsigned, extents are not.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -Wno-sign-conversion -Wshadow)
  if(KDA_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
