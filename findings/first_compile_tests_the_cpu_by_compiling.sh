#!/usr/bin/env bash
# The first torch.compile on a CPU spends most of its compiler time on a question that /proc/cpuinfo answers: which
# vector instructions this CPU has.
#
# One would guess: for a function that becomes one kernel the C++ compiler compiles this kernel.
# What happens: with an empty cache inductor also compiles a test program for each instruction set that the CPU names,
# and loads each in a new Python that imports torch. TORCHINDUCTOR_VEC_ISA_OK=1 leaves these tests out. The variable is
# read when torch._inductor.config is imported, which `import transformers` already does.
#
#     bash findings/first_compile_tests_the_cpu_by_compiling.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer, g++, an x86 CPU with AVX2 and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > "$folder/compiler" <<'SHELL'
#!/bin/sh
for word in "$@"; do case "$word" in *.cpp) echo "$word" >> "$COMPILED" ;; esac; done
exec g++ "$@"
SHELL
chmod +x "$folder/compiler"

cat > "$folder/show.py" <<'PYTHON'
import os
import resource
import sys
import time

import torch

numbers, start = torch.ones(1000), time.perf_counter()
torch.compile(lambda each: each.sin() * 2)(numbers)
with open(os.environ["COMPILED"]) as file:
    files = {line.split()[0] for line in file}
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"{sys.argv[1]}: {len(files)} source files were compiled, in {used.ru_utime + used.ru_stime:.1f} CPU seconds of other")
print(f"    processes; the first call took {time.perf_counter() - start:.1f} s")
with open(sys.argv[2], "w") as file:
    print(len(files), file=file)
PYTHON

"$folder/venv/bin/python" -c "import torch; print(f'torch {torch.__version__}')"
g++ --version | head -1
for tested in yes no; do
    if [ $tested = no ]; then export TORCHINDUCTOR_VEC_ISA_OK=1; else unset TORCHINDUCTOR_VEC_ISA_OK; fi
    CXX="$folder/compiler" COMPILED="$folder/compiled-$tested" TORCHINDUCTOR_CACHE_DIR="$folder/cache-$tested" \
        TORCHINDUCTOR_COMPILE_THREADS=1 "$folder/venv/bin/python" "$folder/show.py" "CPU tested: $tested" "$folder/count-$tested"
done
# At least one test program more, or the CPU is no longer tested by compilations.
[ "$(cat "$folder/count-yes")" -gt "$(cat "$folder/count-no")" ] || { echo "not as before"; exit 1; }
