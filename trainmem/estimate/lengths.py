"""Find the step of a data set's epoch with the highest peak, and the batch sizes and lengths that fit a card.

The batches come from the Trainer's own loader, in a fresh subprocess. A step is traced together with the step before it
and the step after it. The samples have exactly the lengths in `Task.lengths`; their batches are padded or packed.
"""

import bisect
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmem import cards
from trainmem.core.arguments import Arguments
from trainmem.core.families import positions
from trainmem.core.task import Task
from trainmem.estimate.api import estimate
from trainmem.estimate.memory_estimate import Fits, MemoryEstimate
from trainmem.measure import processes
from trainmem.texts import bytes_text, reading

LONGEST = 1 << 20  # most tokens of a sample
_MOST_ROWS = 1 << 10  # upper limit of the search for the largest batch
# Arguments that affect the order of the samples.
_ORDER_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed")
_ORDER_ARGUMENTS += ("accelerator_config", "train_sampling_strategy", "dataloader_drop_last")

Steps = list[list[list[int]]]  # for each optimizer step its micro-batches, as lists of sample numbers


def read(file: str | os.PathLike) -> tuple[int, ...]:
    """Return the lengths, in tokens, in a text file; they are separated by blanks, commas or line ends.

    Raises:
        ValueError: the file cannot be read or has no lengths, or a length is not a whole number from 1 to `LONGEST`.
    """
    with reading(file, "text", "a text file"):
        text = Path(file).read_text(encoding="utf-8")
    return checked(text.translate(str.maketrans(",[]", "   ")).split(), str(file))


def checked(values: Iterable, name: str = "lengths") -> tuple[int, ...]:
    """Return `values`, lengths in tokens, as a tuple of whole numbers.

    A list of token ids, e.g. one entry of a column of a data set, is replaced by its length.
    `name`: what the message calls the lengths.

    Raises:
        ValueError: there are no lengths, or a length is not a whole number from 1 to `LONGEST`.
    """
    found = []
    for number, value in enumerate(values, 1):
        text = str(len(value) if hasattr(value, "__len__") and not isinstance(value, str) else value)
        if not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= LONGEST):
            wrong = f"{name}: {text[:20]!r} (entry {number}) is not a valid length"
            raise ValueError(f"{wrong}: give whole numbers of tokens from 1 to {LONGEST:,}")
        found.append(int(text))
    if not found:
        raise ValueError(f"{name} is empty: give the number of tokens of each sample")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WorstBatch:
    """Hold the step with the highest memory peak in a training's first epoch, and the estimate of that step.

    Also hold the estimate of the worst step of the same training with packed batches and, if a card was named, the
    largest batch size and the largest length that fit the card.
    """

    lengths: tuple[int, ...]  # tokens in each sample
    shapes: tuple[tuple[tuple[int, int], ...], ...]  # (rows, padded length) of each step's micro-batches, as sampled
    step: int  # the worst one, counted from 0
    order: tuple[int, ...]  # samples, the worst step's first, for train_sampling_strategy="sequential"
    estimate: MemoryEstimate  # of the worst step between its neighbours, with the optimizer's states
    packed: MemoryEstimate | None  # the same for the worst step of packed batches; None: not a causal language model
    padded_tokens: int  # of the epoch, with padding; packed batches have sum(lengths)
    fits: Fits | None = None  # whether the worst step fits; None: no card was named
    largest_batch: tuple[int, Fits] | None = None  # rows, with samples as long as the longest; 0: not even one fits
    largest_length: tuple[int, Fits] | None = None  # tokens, with the present number of rows

    @property
    def weights(self) -> str:
        """The weights' type and what decided it, e.g. "weights in bfloat16 (config.json)"."""
        return self.estimate.weights

    @property
    def assumptions(self) -> list[str]:
        """The assumptions: what was modelled or left out, one sentence each."""
        left = "; free memory cached by steps of other shapes may add to the reserved bytes" * (
            self.estimate.device == "cuda"
        )
        return [
            f"traced: the worst step of the first epoch, one before and one after{left}",
            *self.estimate.assumptions,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return {name: value} for JSON. Peaks are in bytes. `fits` is None if it is unknown whether the training fits.

        The largest batch and length are None if no card was named.
        """
        names = ("weights", "lengths", "shapes", "step", "order", "padded_tokens", "assumptions")
        peaks = {"peak_bytes": self.estimate.peak_bytes, "packed_peak_bytes": self.packed and self.packed.peak_bytes}
        largest = {name: getattr(self, name) for name in ("largest_batch", "largest_length")}
        sizes = {name: found and {"size": found[0], **found[1].to_dict()} for name, found in largest.items()}
        return (
            {name: getattr(self, name) for name in names}
            | peaks
            | sizes
            | (self.fits.to_dict() if self.fits is not None else {})
        )

    def __repr__(self) -> str:
        on_gpu = self.estimate.device == "cuda"
        tokens, (rows, width) = sum(self.lengths), max(self.shapes[self.step], key=lambda shape: shape[0] * shape[1])
        lines = [
            f"{len(self.lengths):,} samples of {min(self.lengths)} to {max(self.lengths)} tokens, "
            f"{len(self.shapes):,} steps; step {self.step + 1} takes the most memory, {rows} x {width} tokens; "
            f"{self.weights}",
            f"padded: peak {bytes_text(self.estimate.peak_bytes, on_gpu)}; {self.padded_tokens:,} tokens, "
            f"{1 - tokens / self.padded_tokens:.0%} of them padding",
            *([f"packed: peak {bytes_text(self.packed.peak_bytes, on_gpu)}; {tokens:,} tokens"] if self.packed else []),
            f"samples, worst step first: {', '.join(map(str, self.order[:16]))}{', ...' * (len(self.order) > 16)}",
            *([repr(self.fits)] if self.fits is not None else []),
        ]
        largest = {"largest batch": self.largest_batch, "largest length": self.largest_length}
        return "\n".join(lines + [f"{what}: {found[0]:,}; {found[1]!r}" for what, found in largest.items() if found])


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
    """Find the batch of a data set that takes the most memory; with a `card`, also find whether this batch fits.

    To trace all batches instead, use `estimate(Task(..., lengths=...))`.

    Args:
        task: the model, or its name.
        lengths: tokens in each sample, as whole numbers or as texts such as "512"; or the token ids of each sample,
            e.g. a column of `datasets`.
        pad_to_multiple_of: tokens; the longest sample of a batch is padded to a multiple of this number.
        card: a GPU model of `cards.CARDS`, e.g. "t4"; None: the result does not say what fits.
        device, compute_capability: the device whose memory is estimated, as in `estimate`.
        timeout: time limit of each estimate in seconds.
        arguments: training arguments, as in `estimate`. The training has one process.

    Raises:
        ValueError: `estimate` rejects an argument, there are no lengths, or a length exceeds the model's positions.
    """
    lengths, task = checked(lengths), Task(task) if isinstance(task, str) else task
    task, given = task.replace(pad_to_multiple_of=pad_to_multiple_of), Arguments.of(arguments)
    if given.get("train_sampling_strategy") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' is not supported here: choose another strategy, or use "
            "estimate(Task(..., lengths=...))"
        )
    where = {"device": device, "compute_capability": compute_capability, "timeout": timeout}
    if card:  # without a memory limit: what the allocator frees near a limit depends on earlier steps
        where |= {"device": "cuda", "compute_capability": cards.named(card).capability}

    def traced(samples: Iterable[int], packed: bool = False, **more) -> MemoryEstimate:
        options = arguments | {"train_sampling_strategy": "sequential"} | more
        return estimate(task.replace(lengths=tuple(samples), packed=packed), **where, **options)

    def wide(size: int) -> int:
        return -(-size // pad_to_multiple_of) * pad_to_multiple_of

    room = positions(config := task.build_config())
    task.replace(seq_len=wide(max(lengths))).length(config)  # raises ValueError if that is too long
    order_arguments = Arguments({name: value for name, value in given.training.items() if name in _ORDER_ARGUMENTS})
    steps: Steps = processes.call(_drawn, lengths, order_arguments, timeout=timeout)
    shapes = tuple(tuple((len(rows), wide(max(lengths[i] for i in rows))) for rows in step) for step in steps)

    def worst(sizes: list[list[int]], packed: bool) -> tuple[int, MemoryEstimate]:
        """Return (number of the step with the highest peak, its estimate).

        Two candidates are traced: the step with the largest micro-batch of all, and the step with the largest
        micro-batch if the first micro-batch of each step is ignored. The second candidate may peak higher, because
        gradients exist from the second micro-batch on. If several steps have an equally large micro-batch, the tokens
        of each such step and of the step after it are added. The step with the largest sum is the candidate, because
        the next batch is loaded while a step runs.

        Args:
            sizes: tokens in each micro-batch of each step, padding included.
            packed: whether the samples of a batch are packed.
        """
        both = [a + b for a, b in itertools.pairwise([*map(sum, sizes), 0])]
        keys = (max, lambda step: max(step[1:], default=0)) if len(sizes[0]) > 1 else (max,)
        found = {max(range(len(sizes)), key=lambda k: (key(sizes[k]), both[k])) for key in keys}
        estimates = {k: traced(_around(steps, k, lengths), packed) for k in found}
        return max(estimates.items(), key=lambda item: item[1].peak_bytes)

    padded = [[rows * width for rows, width in step] for step in shapes]
    step, found = worst(padded, packed=False)
    first = {i for rows in steps[step] for i in rows}
    every = sorted((i for rows in itertools.chain(*steps) for i in rows), key=lambda i: i not in first)
    tokens = [[sum(lengths[i] for i in rows) for rows in step] for step in steps]
    packed = worst(tokens, packed=True)[1] if task.family() == "causal" else None
    answer = lengths, shapes, step, tuple(every), found, packed, sum(map(sum, padded))
    if not card:
        return WorstBatch(*answer)
    size, passes = given.get("per_device_train_batch_size", 8), given.get("gradient_accumulation_steps", 1)
    unit = pad_to_multiple_of if pad_to_multiple_of > 1 else 8  # of the largest length, in tokens

    def largest(most: int, rows: int = 0, width: int = 0) -> tuple[int, Fits]:
        """Return (the largest batch size or sample length that fits the card, `Fits` for this size).

        Give `width` to find the largest number of samples in a batch. Give `rows` to find the largest length of the
        samples as a number of units: a unit is `pad_to_multiple_of` tokens, or 8 tokens if `pad_to_multiple_of` is 1.
        If not even size 1 (one sample, or one unit) fits, return (0, `Fits` for 1).

        To try a size, three equal steps are traced. All samples but the first of a batch are one token shorter, so that
        there is padding.

        Args:
            most: the largest size to try, in samples or in units.
            rows: samples in a batch; 0 if their number is searched.
            width: tokens per sample; 0 if the length is searched.
        """

        def ask(number: int) -> Fits:
            high, wide = rows or number, width or number * unit
            samples = [wide, *[max(wide - 1, 1)] * (high - 1)] * (3 * passes)
            return traced(samples, per_device_train_batch_size=high).fits(card)

        number = bisect.bisect_left(range(1, most + 1), True, key=lambda number: ask(number).answer is not True)
        return number, ask(max(number, 1))

    number, fits = largest((room or LONGEST) // unit, rows=size)
    return WorstBatch(*answer, found.fits(card), largest(_MOST_ROWS, width=wide(max(lengths))), (number * unit, fits))


def _around(steps: Steps, number: int, lengths: tuple[int, ...]) -> list[int]:
    """Return, as one list, the lengths of all samples of the step before `number`, of `number`, and of the step after.

    The first step has no step before it; if there are at least three steps, the second step is used in its place. The
    optimizer creates its states in the first traced step. With a step before it, step `number` is traced while these
    states exist, as they do from the second epoch on.

    Args:
        steps: for each step, for each of its micro-batches, the numbers of the micro-batch's samples in the data set.
        lengths: tokens of each sample of the data set, by its number.
    """
    before = steps[number - 1] if number else steps[1] if len(steps) > 2 else []
    return [lengths[i] for rows in (*before, *itertools.chain(*steps[number : number + 2])) for i in rows]


def _drawn(lengths: tuple[int, ...], arguments: Arguments, tell: Callable[[int], None]) -> Steps:
    """Return the batches of the first epoch as nested lists: for each step, for each micro-batch, a list of samples.

    A sample is given by its position in `lengths`, from 0. The batches come from the Trainer's own loader. Call this
    function in a fresh subprocess, because it sets seeds.

    Args:
        lengths: tokens in each sample.
        arguments: the training arguments, which determine the order of the samples and the size of batches.
        tell: not used; `processes.call` passes it to every function.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from transformers import Trainer

    class Nothing(torch.nn.Module):
        def forward(self, input_ids, number):
            """Do nothing. The Trainer keeps those columns of the samples that are parameters of this method."""

    samples = [{"input_ids": range(length), "number": number} for number, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory(prefix="perf_helpers-") as folder:
        args = arguments.build(folder)
        numbers = {"data_collator": lambda rows: {"number": torch.tensor([row["number"] for row in rows])}}
        loader = Trainer(model=Nothing(), args=args, train_dataset=samples, **numbers).get_train_dataloader()
        batches = [batch["number"].tolist() for batch in loader]
    passes = args.gradient_accumulation_steps
    return [batches[start : start + passes] for start in range(0, len(batches), passes)]
