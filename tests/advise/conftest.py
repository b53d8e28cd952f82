"""Replace the estimate by a formula, so that a search can be compared with every possible answer; and make runs with
given speeds.
"""

import dataclasses
from pathlib import Path

import pytest

from perf_helpers.course import published_speedups
from trainmem.advise import advise
from trainmem.core import hardware
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate
from trainmem.records import Memory, Run, Timing

MB = 10**6


def synthetic(task, *, device="cpu", processes=1, compute_capability=None, device_memory=None, **arguments):
    """Return an estimate by a formula: weights and gradients take 100 MB each, optimizer states depend on `optim`,
    activations on the number of tokens, bf16 and checkpointing. The function takes the arguments of `estimate`.
    """
    states = {"adamw_torch_fused": 200, "adamw_bnb_8bit": 50, "adafactor": 1}.get(arguments["optim"], 0) * MB
    size, half = arguments["per_device_train_batch_size"], bool(arguments.get("bf16"))
    activations = size * task.length() * MB // (40 if arguments.get("gradient_checkpointing") else 4) // (1 + half)
    several = arguments["gradient_accumulation_steps"] > 1
    forward = {"weights": 100 * MB, "gradients": 100 * MB * several, "optimizer_states": states}
    forward |= {"activations": activations}
    update = {"weights": 100 * MB, "gradients": 100 * MB, "optimizer_states": states, "activations": 0}
    peak = max(forward, update, key=lambda parts: sum(parts.values()))
    memory = Memory(sum(peak.values()), "estimated", breakdown=peak, phase_breakdowns={"step": update})
    memory = dataclasses.replace(memory, peak_phase="forward" if peak is forward else "step")
    return MemoryEstimate("", {}, {}, device, memory, (), "", 0.0, None)


@pytest.fixture
def task():
    return Task("bert-tiny", seq_len=32)


@pytest.fixture
def formula(task):
    """Return a function that takes training arguments and returns the task's peak in bytes, by `synthetic`."""
    return lambda **arguments: synthetic(task, **arguments).peak_bytes


@pytest.fixture
def machine():
    """Return the machine that the advice is for, so that tests do not depend on the machine that runs them."""
    return hardware.Machine("a CPU, 2 cores", "cpu", cpu_cores=2, cpu_features=("avx2",))


@pytest.fixture
def native(machine):
    """Return `machine` with a CPU that has instructions for bf16."""
    features = ("avx2", "avx512_bf16", "amx_bf16")
    return dataclasses.replace(machine, name="a server's CPU, 2 cores", cpu_features=features)


@pytest.fixture
def followed(monkeypatch):
    """Replace the estimate by `synthetic`, and return a list to which each estimate adds its arguments.

    The advisor finds no recorded runs.
    """
    requests = []

    def estimate(task, **options):
        requests.append(options)
        return synthetic(task, **options)

    monkeypatch.setattr("trainmem.advise.advice.estimate", estimate)
    monkeypatch.setattr("trainmem.advise.advice.hardware.this_machine", lambda: hardware.Machine("", "cpu"))
    monkeypatch.setattr(published_speedups, "RECORDED", Path("nowhere"))
    return requests


@pytest.fixture
def attending(monkeypatch, followed):
    """Return a function that takes names of attention kernels; estimates by `synthetic` then name these kernels."""

    def with_kernels(*kernels):
        def estimate(task, **options):
            return dataclasses.replace(synthetic(task, **options), attention=kernels)

        monkeypatch.setattr("trainmem.advise.advice.estimate", estimate)

    return with_kernels


@pytest.fixture
def ask(task, machine, followed):
    """Return a function that calls `advise`, by default for 1 GB of memory, no margin and 64 samples per update."""
    default = {"memory": 10**9, "effective_batch": 64, "device": "cpu", "runs": [], "machine": machine, "margin": 0}
    default["published"] = published_speedups.published
    return lambda **options: advise(options.pop("task", task), **default | options)


@pytest.fixture
def timed(task, machine):
    """Return a function (samples per second, minute after midnight, training arguments) that makes a run of `task`."""

    def made(speed, minute, **arguments):
        return Run(
            "r",
            "ok",
            arguments={"per_device_train_batch_size": 4} | arguments,
            task=dataclasses.asdict(task),
            timing=Timing(1.0, 0.0, 5, 1, speed),
            losses=(1.0,),
            machine={"name": machine.name},
            date=f"2026-01-01T00:{minute:02}:00+00:00",
        )

    return made


@pytest.fixture
def pairs(timed):
    """Return a function (speed, arguments) that makes alternating runs: plain ones with 10 samples per second, and ones
    with these training arguments at `speed`.
    """
    return lambda speed, count=3, **arguments: [
        run for n in range(count) for run in (timed(10.0, 2 * n), timed(speed, 2 * n + 1, **arguments))
    ]
