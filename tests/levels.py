"""Run tests and lessons as on machines whose CPUs have fewer instructions than this machine's.

    python tests/levels.py                 tests that depend on a CPU's instructions; lessons 07 and 14, strictly
    python tests/levels.py --all           at every level, not only the lowest and the one that most machines have
    python tests/levels.py --lowest        the tests at the lowest level alone
    python tests/levels.py tests/estimate  arguments for pytest

A level is a pair: the instructions that oneDNN may use for matmuls and convolutions (ONEDNN_MAX_CPU_ISA), and those
that torch's own kernels may use (ATEN_CPU_CAPABILITY). Exit code 0 only if the tests pass at every level.
"""

import os
import subprocess
import sys
from pathlib import Path

from trainmem.core import hardware

ROOT = Path(__file__).resolve().parents[1]
TESTED = ("operator_workspaces", "estimates", "peak_memory", "estimate_exact")
TESTS = [f"tests/estimate/test_{name}.py" for name in TESTED]
# (oneDNN's level, torch's, the feature by which a machine is above it), from the lowest on. Those without a feature are
# safe anywhere: oneDNN takes no more than there is, and torch's default runs on every x86-64.
LEVELS = (
    ("SSE41", "default", None),
    ("AVX", "default", None),
    ("AVX2", "default", None),
    ("AVX2", "avx2", "avx512f"),
    ("AVX512_CORE", "avx512", "avx512_bf16"),
    ("AVX512_CORE_BF16", "avx512", "amx_bf16"),
)

MOST = ("AVX2", "avx2")
LESSONS = ["07", "14"]  # their claims are about 16-bit products


def below(features: tuple[str, ...] | None) -> list[tuple[str, str]]:
    """Return the CPU instruction levels below the level of a machine, lowest first.

    A level is (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY), values of two environment variables, which limit the CPU
    instructions of oneDNN and of torch.

    `features`: the names in `hardware.CPU_FEATURES` that the machine's CPU has; None: not known.
    """
    return [tuple(level) for *level, above in LEVELS if above is None or above in (features or ())]


def usual(every: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return two of the levels `every`: the lowest, and AVX2, which most machines have. If AVX2 is not among them,
    return the highest instead.

    `every`: levels of CPU instructions, lowest first, each a pair (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY).
    """
    return [every[0], MOST if MOST in every else every[-1]]


def without_bf16(every: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the highest of the levels `every` at which oneDNN has no instructions for bf16 matmuls.

    `every`: pairs (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY), lowest first, as `below` returns them.
    """
    return [level for level in every if not level[0].endswith("BF16")][-1]


def main(arguments: list[str]) -> int:
    machine = hardware.describe()
    if not machine.system or ("x86" not in machine.system and "AMD64" not in machine.system):
        print(f"levels: {machine.system} has no such levels, nothing to run")
        return 0
    every, failed = below(machine.cpu_features), []
    given = [word for word in arguments if word not in ("--all", "--lowest")]
    tests = [sys.executable, "-m", "pytest", "-q", *(given or ["-n", "2", "--dist", "worksteal", *TESTS])]
    course = [sys.executable, "-m", "perf_helpers.cli", "course", *LESSONS, "--strict", "--no-speeds", "--out"]
    levels = every if "--all" in arguments else usual(every)[: 1 if "--lowest" in arguments else None]
    todo = [(level, "tests", tests) for level in levels]
    for level in () if given else every if "--all" in arguments else [without_bf16(every)]:
        todo.append((level, f"lessons {', '.join(LESSONS)}", [*course, f"build/levels/{'-'.join(level)}"]))
    for (isa, capability), what, command in todo:
        print(f"\nlevels: oneDNN up to {isa}, torch {capability}: {what}", flush=True)
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(f"{isa}/{capability} ({what})")
    print(f"levels: failed at {', '.join(failed)}" if failed else "levels: passed at every level", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
