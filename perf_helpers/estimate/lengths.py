"""The worst batch of a data set, from the lengths of its samples: which step holds the peak, and what a card can take.

The batches are those of the Trainer's own loader, drawn in a clean process. A step is followed on the very lengths of
its samples, padded or packed (`Task.lengths`), between the steps before and after it.
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf_helpers import cards
from perf_helpers.estimate.estimates import estimate
from perf_helpers.estimate.prediction import Fits, MemoryEstimate
from perf_helpers.lab import processes
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task, positions
from perf_helpers.texts import bytes_text, whole_number

LONGEST = 1 << 20  # tokens of a sample: samples of more are not made here
_UNIT = 8  # tokens in which the largest length is told, where nothing is padded to a multiple
_OF_ORDER = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "accelerator_config")
_OF_ORDER += ("train_sampling_strategy", "dataloader_drop_last")
_SECONDS = 300.0  # that drawing the order may take

Steps = list[list[list[int]]]  # of each optimizer step its micro-batches, as numbers of samples


def read(file: str | os.PathLike) -> tuple[int, ...]:
    """The lengths that a text file has: whole numbers with blanks, commas or ends of lines between them.

    Raises:
        ValueError: it cannot be read, has none, or has something else.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or 'no text'})") from None
    return checked(text.translate(str.maketrans(",[]", "   ")).split(), str(file))


def checked(values: Iterable, name: str = "lengths") -> tuple[int, ...]:
    """Lengths as whole numbers: of a column of `datasets`, or of rows of token ids, whose lengths count.

    Raises:
        ValueError: there are none, or one is no whole number from 1 to `LONGEST`; they are called by their `name`.
    """
    found = []
    for number, value in enumerate(values, 1):
        size = value if isinstance(value, str) or not hasattr(value, "__len__") else len(value)
        try:
            found.append(int(str(size)))
        except ValueError:
            found.append(0)
        if not 1 <= found[-1] <= LONGEST:
            told = f"{str(size)[:20]!r} (number {number} of them) is no length"
            raise ValueError(f"{name}: {told}: give whole numbers of tokens from 1 to {LONGEST:,}")
    if not found:
        raise ValueError(f"{name}: there are none: give the number of tokens of each sample")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WorstBatch:
    """The step that holds the peak of a training's first epoch, and what the other ways to batch would take."""

    lengths: tuple[int, ...]  # tokens in each sample
    shapes: tuple[tuple[tuple[int, int], ...], ...]  # (rows, padded length) of each step's micro-batches, as sampled
    step: int  # the worst one, counted from 0
    order: tuple[int, ...]  # numbers of all samples, the worst step's first: train_sampling_strategy="sequential"
    estimate: MemoryEstimate  # of the worst step between its neighbours, the optimizer's states there already
    packed: MemoryEstimate | None  # the same of the step with most tokens, packed; None: the model takes no packed rows
    padded_tokens: int  # of the epoch, padding included; packed there are sum(lengths)
    fits: Fits | None = None  # the worst step; None: no card was named
    largest_batch: tuple[int, Fits] | None = None  # per_device_train_batch_size, every sample as long as the longest
    largest_length: tuple[int, Fits] | None = None  # tokens, in the batches that were asked for

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        tokens, shape = sum(self.lengths), max(self.shapes[self.step], key=lambda pair: pair[0] * pair[1])
        lines = [
            f"{len(self.lengths):,} samples of {min(self.lengths)} to {max(self.lengths)} tokens: "
            f"{len(self.shapes):,} steps in the first epoch",
            f"worst: step {self.step + 1}, {shape[0]} x {shape[1]} tokens, peak {bytes_text(self.estimate.peak_bytes)} "
            f"on {self.estimate.device}",
            f"padded: {self.padded_tokens:,} tokens, of which {1 - tokens / self.padded_tokens:.0%} are padding",
        ]
        if self.packed:
            lines.append(f"packed: {tokens:,} tokens, peak {bytes_text(self.packed.peak_bytes)}")
        lines.append(f"worst first: samples {', '.join(map(str, self.order[:16]))}{', ...' * (len(self.order) > 16)}")
        lines += [repr(self.fits)] if self.fits else []
        for what, found in (("batch", self.largest_batch), ("length", self.largest_length)):
            if found:
                lines.append(f"largest {what}: {found[0]:,}; {found[1]!r}")
        return "\n".join(lines)


def worst_batch(
    task: Task | str,
    lengths: Iterable,
    *,
    pad_to_multiple_of: int = 1,
    card: str | None = None,
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    timeout: float = 300,
    **arguments,
) -> WorstBatch:
    """The worst batch of a data set, and with a `card` what fits it.

    Followed are the worst step and its neighbours. On CUDA steps of other shapes before them may leave segments that
    this one cannot use: `estimate(Task(..., lengths=...))` follows as many steps as it is given lengths for.

    Args:
        lengths: tokens in each sample, e.g. a column of `datasets`; rows of token ids count by their lengths.
        pad_to_multiple_of: to which the longest sample of a batch is padded.
        card, device, compute_capability, timeout, arguments: as `estimate` has them; one process.

    Raises:
        ValueError: as `estimate` does; lengths that are none, or longer than the model's positions.
    """
    lengths, multiple = checked(lengths), whole_number("pad_to_multiple_of", pad_to_multiple_of)
    task = (Task(task) if isinstance(task, str) else task).replace(pad_to_multiple_of=multiple)
    given = Arguments.of(arguments)
    if given.get("train_sampling_strategy") == "batch_rebalance":
        raise ValueError("train_sampling_strategy='batch_rebalance': its order is not followed; choose another one")
    whose = {"device": device, "compute_capability": compute_capability, "timeout": timeout}
    if card:  # without a limit of memory: what would be given back near it depends on what came before
        whose |= {"device": "cuda", "compute_capability": cards.named(card).capability}

    def followed(samples: Sequence[int], packed: bool) -> MemoryEstimate:
        these = task.replace(lengths=tuple(samples), packed=packed)
        return estimate(these, **whose, **arguments | {"train_sampling_strategy": "sequential"})

    def wide(size: int) -> int:
        return -(-size // multiple) * multiple

    room = positions(config := task.build_config())
    task.replace(seq_len=wide(max(lengths))).length(config)  # says what is too long
    of_order = {name: value for name, value in given.training.items() if name in _OF_ORDER}
    steps: Steps = processes.call(_drawn, lengths, Arguments(of_order), timeout=_SECONDS)
    shapes = tuple(tuple((len(rows), wide(max(lengths[i] for i in rows))) for rows in step) for step in steps)
    padded = [[rows * width for rows, width in step] for step in shapes]
    tokens = [[sum(lengths[i] for i in rows) for rows in step] for step in steps]

    def largest(sizes: list[list[int]], packed: bool) -> tuple[int, MemoryEstimate]:
        """The step with the highest peak, and its estimate: it has the largest micro-batch, or the largest after the
        first of a step, where gradients are there already. Of equals, with what is fetched at the same time."""
        keys = [max, *([lambda step: max(step[1:], default=0)] if len(sizes[0]) > 1 else [])]
        both = [a + b for a, b in itertools.pairwise([*map(sum, sizes), 0])]
        found = {max(range(len(sizes)), key=lambda k: (key(sizes[k]), both[k])) for key in keys}
        told = {k: followed(_around(steps, k, lengths), packed) for k in found}
        return max(told.items(), key=lambda item: item[1].peak_bytes)

    worst, found = largest(padded, packed=False)
    can_pack = task.family() == "causal"
    every = [i for rows in itertools.chain(*steps) for i in rows]
    first = {i for rows in steps[worst] for i in rows}
    answer = {
        "lengths": lengths,
        "shapes": shapes,
        "step": worst,
        "order": tuple(sorted(every, key=lambda i: i not in first)),  # which keeps the order among the others
        "estimate": found,
        "packed": largest(tokens, packed=True)[1] if can_pack else None,
        "padded_tokens": sum(map(sum, padded)),
    }
    if not card:
        return WorstBatch(**answer)
    size, passes = given.get("per_device_train_batch_size") or 8, given.get("gradient_accumulation_steps") or 1
    unit = multiple if multiple > 1 else _UNIT

    def batch(rows: int, tokens: int) -> Fits:
        """Three steps of batches with one sample of so many tokens, and the others one token shorter."""
        sampled = [tokens, *[max(tokens - 1, 1)] * (rows - 1)] * (3 * passes)
        options = arguments | {"per_device_train_batch_size": rows, "train_sampling_strategy": "sequential"}
        return estimate(task.replace(lengths=tuple(sampled)), **whose, **options).fits(card)

    rows, its_fits = _largest(lambda rows: batch(rows, max(lengths)), size, 1 << 12)
    number, length_fits = _largest(
        lambda number: batch(size, number * unit), max(lengths) // unit or 1, max((room or LONGEST) // unit, 1)
    )
    return WorstBatch(
        **answer, fits=found.fits(card), largest_batch=(rows, its_fits), largest_length=(number * unit, length_fits)
    )


def _around(steps: Steps, number: int, lengths: tuple[int, ...]) -> list[int]:
    """Lengths of a step's samples, with those of the steps before and after it. A first step comes second: its peak
    would be without the optimizer's states, which it has in all later epochs."""
    before = steps[number - 1] if number else steps[1] if len(steps) > 2 else []
    after = steps[number + 1] if number + 1 < len(steps) else []
    return [lengths[i] for rows in (*before, *steps[number], *after) for i in rows]


def _largest(ask: Callable[[int], Fits], first: int, most: int) -> tuple[int, Fits]:
    """The largest number up to `most` that is said to fit, and what was said of it; 0 where not even 1 fits, and what
    was said of 1. A straight line through two answers says where to ask next, from the eighth on the middle."""
    low, high, number, told = 0, most + 1, min(first, most), {}
    while high - low > 1:
        told[number] = ask(number)
        low, high = (number, high) if told[number].answer is True else (low, number)
        if len(told) == 1:
            guess = number * told[number].limit_bytes / told[number].needed_bytes
        else:
            (a, one), (b, two) = sorted(told.items(), key=lambda item: abs(item[1].limit_bytes - item[1].needed_bytes))[
                :2
            ]
            slope = (two.needed_bytes - one.needed_bytes) / (b - a)
            guess = (
                a + (one.limit_bytes - one.needed_bytes) / slope if slope > 0 and len(told) < 8 else (low + high) / 2
            )
        number = min(max(int(guess), low + 1), high - 1)
    return low, told[low or 1]


def _drawn(lengths: tuple[int, ...], arguments: Arguments, tell: Callable[[int], None]) -> Steps:
    """The batches of the first epoch, from the Trainer's own loader. To be called in a clean process: it seeds."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from transformers import Trainer

    class Nothing(torch.nn.Module):
        def forward(self, input_ids, number):
            raise NotImplementedError

    samples = [{"input_ids": range(length), "number": number} for number, length in enumerate(lengths)]

    def numbers(examples):
        return {"number": torch.tensor([example["number"] for example in examples])}

    with tempfile.TemporaryDirectory(prefix="perf_helpers-") as folder:
        args = arguments.build(folder)
        trainer = Trainer(model=Nothing(), args=args, train_dataset=samples, data_collator=numbers)
        batches = [batch["number"].tolist() for batch in trainer.get_train_dataloader()]
    passes = args.gradient_accumulation_steps
    return [batches[start : start + passes] for start in range(0, len(batches), passes)]
