"""Profiles: the sizes that a machine can hold."""

from dataclasses import dataclass

from perf_helpers.lab import hardware
from perf_helpers.lab.task import Task


@dataclass(frozen=True)
class Profile:
    """The sizes that a kind of machine can hold, and how long to measure there."""

    name: str
    task: Task
    micro_batch: int  # samples, of the vanilla recipe
    steps: int  # optimizer steps that are timed
    warmup_steps: int  # before these
    turns: int  # pairs of turns in a comparison
    # Seconds after which one experiment or comparison is given up: many times what it takes on a slow machine of that
    # kind, and no more than a learner waits.
    timeout: float


_SMALL, _LARGE = Task("bert-small", seq_len=256), Task("bert-large-uncased", seq_len=512)
PROFILES = {
    "cpu": Profile("cpu", _SMALL, micro_batch=4, steps=3, warmup_steps=1, turns=16, timeout=240),
    "t4": Profile("t4", _LARGE.replace(seq_len=256), micro_batch=4, steps=20, warmup_steps=3, turns=5, timeout=600),
    "gpu": Profile("gpu", _LARGE, micro_batch=4, steps=30, warmup_steps=5, turns=7, timeout=600),
}
# For tests in which lessons only have to run. What is measured at these sizes means nothing, so no list of profiles
# has them, and "auto" never takes them. With fewer turns an exercise of lesson 03 would not take its own solution.
TINY = Profile("tiny", Task("bert-tiny", seq_len=32), micro_batch=4, steps=1, warmup_steps=1, turns=5, timeout=240)


def choose_profile(name: str = "auto", machine=None) -> Profile:
    """The profile of that name; "auto" takes the largest one that this machine can hold, "tiny" is for tests.

    Raises:
        ValueError: no such profile.
    """
    if name == "auto":
        machine = machine or hardware.describe()
        memory = max((gpu.memory_bytes or 0 for gpu in machine.gpus), default=0) if machine.kind == "cuda" else 0
        name = "cpu" if machine.kind == "cpu" else "t4" if memory < 20e9 else "gpu"
    if name == TINY.name:
        return TINY
    if name not in PROFILES:
        raise ValueError(f"profile={name!r}: choose one of auto, {', '.join(PROFILES)}")
    return PROFILES[name]
