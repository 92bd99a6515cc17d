#!/usr/bin/env bash
# Valgrind's memcheck over a few of the C++ tests of build/release: reads of memory that nobody wrote, which no sanitizer
# of g++ sees. Valgrind knows no AVX-512, and takes the tests' own operator delete for a mismatch.
set -euo pipefail
cd "$(dirname "$0")/.."

filter='Plan.RepeatedExecutionsGiveTheSameBits:Plan.EmptySequencesPassTheirStateOn:Bitwise.StateVFirstTransposes:'
filter+='COutputs.MayHaveStrides:CExecutors.*:KdaGate.StridesDoNotMatter:KdaGateCumsum.StridesDoNotMatter'
for isa in AVX2 SSE4; do
  KDA_CPU_ISA=$isa valgrind -q --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=definite \
    --show-leak-kinds=definite --show-mismatched-frees=no build/release/tests/kda_tests --gtest_brief=1 \
    --gtest_filter="$filter"
done
