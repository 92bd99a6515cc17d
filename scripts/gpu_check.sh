#!/usr/bin/env bash
# Checks and times the CUDA backend on a machine with a GPU: scripts/gpu_check.sh BIN_DIR OUT_DIR [STEP...]
#
# Steps, all by default: tests (C++), python (the Python doors), sanitizer (memcheck, racecheck, initcheck), fla (errors and
# times beside flash-linear-attention, whose kernels take minutes to tune), bench.
#
# BIN_DIR holds kda_cuda_tests, kda_cuda_bench and libkda_cuda.so (and what else they load); the last is built there first
# when the machine has nvcc and BIN_DIR has none. The steps python and fla are for the package that python3 finds, with its
# CUDA backend, and are skipped where that is not installed. Writes logs and figures to OUT_DIR.
set -uo pipefail
cd "$(dirname "$0")/.."
BIN=$(realpath "$1")
OUT=$(realpath "$2")
shift 2
steps=" ${*:-tests python sanitizer fla bench} "
export KDA_CUDA_LIBRARY="$BIN/libkda_cuda.so" LD_LIBRARY_PATH="$BIN:${LD_LIBRARY_PATH:-}"
failed=0

if [ ! -e "$KDA_CUDA_LIBRARY" ]; then
  flags=(-std=c++20 -O3 -lineinfo --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC,-fvisibility=hidden -Iinclude -Isrc
    "-DKDA_VERSION=\"$(cat VERSION)\"")
  objects=$(mktemp -d)
  for source in src/cuda/entry.cu src/*/cuda/*.cu; do
    name=${source//\//_}
    nvcc "${flags[@]}" -Xptxas -v -c "$source" -o "$objects/$name.o" >"$objects/$name.log" 2>&1 &
  done
  wait
  cat "$objects"/*.log >"$OUT/build.log"
  nvcc -shared -cudart static -o "$KDA_CUDA_LIBRARY" "$objects"/*.o || exit 1
fi

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/device.txt"
KDA_DRIVER_VERSION=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
export KDA_DRIVER_VERSION

if [[ $steps == *" tests "* ]]; then
  shards=$(($(nproc) > 12 ? 12 : $(nproc)))
  # As plans choose, then each form of the kernels wherever it can be had.
  for path in chosen overlapped generic; do
    for ((i = 0; i < shards; ++i)); do
      KDA_CUDA_PATH=$path GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i timeout 400 "$BIN/kda_cuda_tests" --gtest_brief=1 \
        >"/tmp/tests.$path.$i.log" 2>&1 &
      pids[i]=$!
    done
    for ((i = 0; i < shards; ++i)); do wait "${pids[i]}" || failed=1; done
    echo "tests, $path path"
    grep -hE "FAILED  \]|PASSED|skipped" /tmp/tests."$path".*.log | sort | uniq -c | sort -rn | head -60
  done
  cat /tmp/tests.*.log >"$OUT/tests.log"
fi

has_package() {
  python3 -c 'import sys, kda; sys.exit(not any(b.name == "cuda" and b.available for b in kda.info().backends))' 2>/dev/null
}

if [[ $steps == *" python "* ]]; then
  if has_package; then
    timeout 400 python3 -m pytest -q -W default -p no:cacheprovider tests/python/test_cuda.py >"$OUT/python.log" 2>&1 || failed=1
    tail -n 15 "$OUT/python.log"
  else
    echo "skipped: python3 finds no kda with a CUDA backend"
  fi
fi

if [[ $steps == *" sanitizer "* ]]; then
  list='*/tail_T65_*:*/packed_edges_BSND_C64:*/dims_K48_V32_C128:*/dims_K256_V256_C64:*/groups_of_8:CudaSequences.*:KdaGate*StridesDoNotMatter:Cuda/StrongGates.AreExact/*:LargeKeys.*:CudaShapes.One*'
  parts=4
  for tool in memcheck racecheck initcheck; do
    for ((i = 0; i < parts; ++i)); do
      KDA_CUDA_PATH=overlapped GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$i timeout 300 compute-sanitizer --error-exitcode 1 \
        --tool "$tool" "$BIN/kda_cuda_tests" --gtest_brief=1 --gtest_filter="$list" >"$OUT/$tool.$i.log" 2>&1 &
      pids[i]=$!
    done
    for ((i = 0; i < parts; ++i)); do wait "${pids[i]}" || failed=1; done
    echo "compute-sanitizer $tool"
    grep -hE "ERROR SUMMARY|RACECHECK SUMMARY|FAILED|PASSED" "$OUT/$tool".*.log | sort | uniq -c
  done
fi

if [[ $steps == *" fla "* ]]; then
  if has_package; then
    timeout 500 python3 bench/compare_fla.py --json "$OUT/fla.json" | tee "$OUT/fla.txt"
    case ${PIPESTATUS[0]} in 0 | 77) ;; *) failed=1 ;; esac
  else
    echo "skipped: python3 finds no kda with a CUDA backend"
  fi
fi

if [[ $steps == *" bench "* ]]; then
  timeout 200 "$BIN/kda_cuda_bench" "$OUT/bench.json" | tee "$OUT/bench.txt" || failed=1
fi
exit $failed
