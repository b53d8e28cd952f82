"""What is chosen among: the combinations of techniques, and the micro-batches, that a user and a device allow."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from perf_helpers import recipes as known
from perf_helpers.lab import hardware
from perf_helpers.lab.arguments import Arguments
from perf_helpers.recipes import QUESTIONS, Technique
from perf_helpers.texts import nearest_text

# One way of training: an answer to each question of a recipe. The library's plain choices are left out, except AdamW.
Family = tuple[Technique, ...]

MICRO_BATCH, ACCUMULATION_STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
PRECISIONS = {known.BF16, known.FP16, known.BF16_WEIGHTS}


class Candidate(NamedTuple):
    """A family with a micro-batch: one recipe that may fit or not."""

    family: Family
    micro_batch: int  # samples


class Choices:
    """The families and the micro-batches that may be combined.

    Args:
        samples: that one process sees in an update.
        must, avoid: as `advise` takes them.
        native: the lower precisions that the device computes in by itself.

    Raises:
        ValueError: a name that is not known, wishes that contradict each other, or that leave nothing to choose.
    """

    def __init__(self, samples: int, must: Mapping[str, Any], avoid: Iterable[str], native: set[Technique]):
        self.samples = samples
        self.fixed = respelt(Arguments.of(must))  # training arguments that every recipe has
        avoided = _avoided(avoid)
        self.families = _families(self.fixed, avoided, native)
        self.micro_batches = _micro_batches(samples, self.fixed, avoided)  # samples, ascending

    def arguments(self, candidate: Candidate) -> dict[str, Any]:
        """The training arguments of a recipe."""
        size = candidate.micro_batch
        arguments = {MICRO_BATCH: size, ACCUMULATION_STEPS: self.samples // size}
        for technique in candidate.family:
            arguments |= technique.arguments
        return arguments | self.fixed

    def name(self, candidate: Candidate) -> str:
        """A recipe in words: "checkpointing, AdamW, 4 x 2" (micro-batch x accumulation)."""
        size = candidate.micro_batch
        return ", ".join([*(technique.name for technique in candidate.family), f"{size} x {self.samples // size}"])


def native_precisions(machine: hardware.Machine, kind: str, capability: tuple[int, int]) -> set[Technique]:
    """The lower precisions that a GPU of this compute capability, or the machine's CPU, computes in by itself."""
    if kind == "cuda" and capability < (8, 0):
        return {known.FP16}
    native = kind == "cuda" or not hardware.CPU_BF16.isdisjoint(machine.cpu_features or ())
    return {known.BF16, known.BF16_WEIGHTS} if native else set()


def respelt(arguments: Arguments) -> dict[str, Any]:
    """The same arguments under the names by which techniques call theirs, whichever the installed library knows."""
    ours = {next(iter(Arguments({name: None}).current)): name for name in itertools.chain(*QUESTIONS)}
    return {ours.get(name, name): value for name, value in arguments.current.items()}


def _avoided(avoid: Iterable[str]) -> set[str]:
    """What is avoided, in the spelling of `Technique.words`."""
    if isinstance(avoid, str):
        raise ValueError(f"avoid={avoid!r}: give a list of names")
    spelt = itertools.chain(known.ACCUMULATION, *(technique.words for technique in known.techniques()))
    words = {word.lower(): word for word in sorted(spelt, reverse=True)}  # of two, that with capitals: a name
    avoided = set()
    for name in map(str, avoid):
        if name.lower() not in words:
            raise ValueError(f"avoid={name!r} is no technique. {nearest_text(name, words.values())}")
        avoided.add(words[name.lower()])
    return avoided


def _families(fixed: Mapping[str, Any], avoided: set[str], native: set[Technique]) -> list[Family]:
    """Every combination of answers that is allowed. What is `ON_DEMAND` is for who asks for it by `must`."""
    left_out = known.ON_DEMAND | (PRECISIONS - native)
    if hardware.versions()["bitsandbytes"] is None:
        left_out.add(known.ADAM_8BIT)
    answers = []
    for names, options in QUESTIONS.items():
        if set(names) & fixed.keys():  # answered by the user; None: in a way that is no technique of ours
            same = [o for o in options if o and all(fixed.get(name) == value for name, value in o.arguments.items())]
            if clash := [o.name for o in same if o.words & avoided]:
                raise ValueError(f"{clash[0]!r} is both in must and in avoid: keep one")
            answers.append(same[:1] or [None])
            continue
        open_to = [option for option in options if option not in left_out and not (option and option.words & avoided)]
        if not open_to:
            raise ValueError(f"avoid leaves no answer for {', '.join(names)}: fix one with must")
        answers.append(open_to)
    return [tuple(filter(None, family)) for family in itertools.product(*answers)]


def _micro_batches(samples: int, fixed: Mapping[str, Any], avoided: set[str]) -> list[int]:
    """The micro-batches that make `samples` with a whole number of accumulation steps, ascending."""
    batch, steps = fixed.get(MICRO_BATCH), fixed.get(ACCUMULATION_STEPS)
    if avoided & set(known.ACCUMULATION):
        steps = steps or 1
        if steps > 1:
            raise ValueError(f"gradient_accumulation_steps={steps} is in must and accumulation in avoid: keep one")
    sizes = [
        size
        for size in range(1, samples + 1)
        if samples % size == 0 and batch in (None, size) and steps in (None, samples // size)
    ]
    if not sizes:
        given = " x ".join(str(value) for value in (batch, steps) if value)
        raise ValueError(f"no micro-batch x accumulation makes {samples} samples a process with {given} in must")
    return sizes
