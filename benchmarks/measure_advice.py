"""Rehearse the micro-batch that `advise` proposes for a card, which must fit, and the next larger one, which must not.

    .venv-cuda/bin/python benchmarks/measure_advice.py [--count 58] [--seed 1]

Another seed gives another set: small models on made-up cards, and larger ones on real cards. A made-up card's memory
and the effective batch are chosen so that only a part of the batch fits. A pair of model and card is left out of the
counts, and recorded with the reason, if the whole batch fits, if not even one sample fits, or if the model cannot be
trained.
Advice and rehearsal assume the same CUDA context; its size on a real card cannot be rehearsed.
"""

import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from architectures import ARCHITECTURES, CAPABILITIES, LARGE, configuration, task_of
from measure_cuda import rehearsed
from runner import Measurement, rehearsing

from trainmem.advise import advise
from trainmem.advise.measured_speedups import ACCUMULATION_STEPS, MICRO_BATCH
from trainmem.cards import CONTEXT_BYTES
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import estimate
from trainmem.records import Memory, Phase
from trainmem.rehearsal import CARDS, Card, card
from trainmem.unknown import NeedsValues

LENGTHS = (128, 256, 384, 512, 1024)
BATCHES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # samples per update
SOLD = ("t4", "v100", "a10g", "4090", "a100-40", "a100", "h100")  # real cards, used in turn
SAMPLES = (2, 3, 4, 6, 8, 12, 16)  # per micro-batch that just fits on a made-up card
MOST_SAMPLES = 60  # per micro-batch
OPTIMIZERS = ({}, {}, *({"optim": name} for name in ("adafactor", "adamw_bnb_8bit", "adamw_torch", "sgd")))
TECHNIQUES = ({}, {}, {"fp16": True}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True})
TECHNIQUES += ({"attn_implementation": "eager"}, {"gradient_checkpointing": True, "max_grad_norm": 0.0})


@dataclass(frozen=True)
class Pair:
    """A model, the card for which advice is requested, and the training arguments that the advice must keep."""

    number: int
    architecture: str
    config: dict
    seq_len: int | None  # None for images
    card: Card | None  # None: a made-up card on which a micro-batch of `samples` just fits
    capability: tuple[int, int]
    samples: int
    must: dict  # training arguments that the advice must keep

    def to_dict(self) -> dict:
        return {name: getattr(self, name) for name in ("number", "architecture", "config", "seq_len", "must")}


def pair(number: int, seed: int) -> Pair:
    """Return pair `number` of the series that `seed` generates: a model and a card.

    Every fourth model is large and gets a real card. The others are small and get a made-up card. Successive pairs
    rotate through the architectures and the real cards.
    """
    draw = random.Random(f"{seed} {number}")
    turn, kind = divmod(number, 4)
    on, capability, lengths = None, draw.choice(CAPABILITIES), LENGTHS
    if kind == 3:
        architecture, on = [*LARGE][turn % len(LARGE)], CARDS[SOLD[(turn + turn // len(LARGE)) % len(SOLD)]]
        config, capability = LARGE[architecture], on.capability
        lengths = (1024,) if on.memory_bytes < 20e9 else (2048,) if on.memory_bytes < 50e9 else (4096,)
    else:
        architecture = [*ARCHITECTURES][(3 * turn + kind) % len(ARCHITECTURES)]
        config = configuration(architecture, draw)
    vision = "image_size" in config or config["model_type"] == "swin"
    length, must = None if vision else draw.choice(lengths), draw.choice(OPTIMIZERS) | draw.choice(TECHNIQUES)
    return Pair(number, architecture, config, length, on, capability, draw.choice(SAMPLES), must)


class Undecided(Exception):
    """Rehearsals cannot decide whether the advice for a model and a card is right; the message says why."""


def card_and_batch(one: Pair, task: Task) -> tuple[Card, int]:
    """Return the card of a `Pair` (model and card), and an effective batch that is too large for one micro-batch.

    A made-up card gets 0 to 10 % more memory than a chosen micro-batch needs. That micro-batch is large enough for the
    peak to be in forward or backward, not in the optimizer update. For a real card, the number of samples that fit is
    extrapolated linearly from two estimates.

    `task`: the pair's model as a task.

    Raises:
        Undecided: too many samples fit on the real card, or none.
    """
    draw = random.Random(one.number)
    precision = {} if {"fp16", "dtype"} & one.must.keys() else {"bf16" if one.capability >= (8, 0) else "fp16": True}
    arguments = {"optim": "adamw_torch_fused", ACCUMULATION_STEPS: 2} | precision | one.must
    device = {"device": "cuda", "compute_capability": one.capability}

    def memory(size: int) -> Memory:
        return estimate(task, **device, **arguments | {MICRO_BATCH: size}).memory

    if one.card is None:
        size = one.samples
        while (found := memory(size)).peak_phase == Phase.STEP.shown and size < MOST_SAMPLES:
            size *= 2
        needed = CONTEXT_BYTES + found.reserved_bytes * draw.uniform(1, 1.1)
        return card(None, one.capability, round(needed / 1e7 + 0.5) * 10**7), size * draw.choice((2, 3, 4))
    few, more = (memory(size).reserved_bytes for size in (2, 6))
    largest = 2 + int((one.card.memory_bytes - CONTEXT_BYTES - few) / max((more - few) / 4, 1))
    fitting = [batch for batch in BATCHES if batch >= 2 * largest]
    if not 1 <= largest <= MOST_SAMPLES or not fitting:
        raise Undecided(f"the memory ends at some {largest} samples")
    return one.card, draw.choice(fitting[:2])


def decide(one: Pair, folder: Path) -> dict:
    """Rehearse the micro-batch that `advise` calls best for a model and a card, and the next larger one.

    Return a record. Its keys include "recipe" (the advised recipe's name), "best" and "next" (the two rehearsals), and
    "keeps_its_word": whether the best micro-batch fits and the next does not. If this cannot be decided, "left_out" has
    the reason instead.

    `folder`: folder for the file with the model's configuration.
    """
    row, task = one.to_dict(), task_of(one.config, one.seq_len, folder / f"{one.number}.json")
    try:
        on, batch = card_and_batch(one, task)
        row["card"] = {"name": on.name, "capability": on.capability, "memory_bytes": on.memory_bytes}
        device = {"device": "cuda", "compute_capability": on.capability, "context_memory": on.context_bytes}
        must = {"memory": on.memory_bytes, "effective_batch": batch, "must": one.must}
        advice = advise(task, **must, **device, runs=[], most=1)
        if not advice.recipes:
            raise Undecided("nothing fits")
        recipe = advice.recipes[0]
        row |= {"effective_batch": batch, "estimates": advice.estimates, "recipe": recipe.name}
        row |= {"arguments": recipe.arguments, "why_not_next": recipe.why_not_next}
        size = recipe.arguments[MICRO_BATCH]
        if size == batch:
            raise Undecided("the whole batch fits")
        larger = next(more for more in range(size + 1, batch + 1) if batch % more == 0)
        if f", {larger} x {batch // larger} needs" not in recipe.why_not_next:
            raise Undecided("the advice does not speak of the next micro-batch")
        ends = {}
        with rehearsing(on) as lab:
            for name, samples in (("best", size), ("next", larger)):
                given = recipe.arguments | {MICRO_BATCH: samples, ACCUMULATION_STEPS: batch // samples}
                run = lab.run(rehearsed(Experiment(name, task=task, arguments=Arguments.of(given))), measure="none")
                if run.status not in ("ok", "out of memory"):
                    raise Undecided(f"cannot be trained: {run.message[-200:]}")
                ends[name] = {"micro_batch": samples, "status": run.status} | (run.value or {"message": run.message})
        reserved = recipe.needed_bytes - advice.context_bytes
        ends["best"] |= {"said_allocated": recipe.peak_bytes, "said_reserved": reserved}
    except (Undecided, NeedsValues, ValueError) as error:
        return row | {"left_out": str(error).replace(f"{folder}/", "")[:300]}
    keeps = {"best": ends["best"]["status"] == "ok", "next": ends["next"]["status"] == "out of memory"}
    return row | ends | {"keeps_its_word": all(keeps.values())}


def summary(rows: list[dict]) -> dict:
    """Return how often the advice for a model and a card was right, over all records.

    The advice is right if its micro-batch fits in the rehearsal, and the next larger one runs out of memory.

    Args:
        rows: one record per model and card, see `decide`.

    Returns:
        {"decided": number of records that decide whether the advice is right, "keeps_its_word": number of these in
            which it is right, "left_out": number of the other records}. Over the decided records: "architectures" (how
            many), "capabilities" and "micro_batches" (the values that occur) and "estimates_median" (estimates per
            advice).
    """
    decided = [row for row in rows if "keeps_its_word" in row]
    return {
        "decided": len(decided),
        "left_out": len(rows) - len(decided),
        "keeps_its_word": sum(row["keeps_its_word"] for row in decided),
        "architectures": len({row["architecture"] for row in decided}),
        "capabilities": sorted({tuple(row["card"]["capability"]) for row in decided}),
        "micro_batches": sorted({row["best"]["micro_batch"] for row in decided}),
        "estimates_median": statistics.median(row["estimates"] for row in decided) if decided else None,
    }


def line(row: dict) -> str:
    outcome = row.get("left_out") or f"keeps its word: {row['keeps_its_word']}"
    return f"{row['architecture']}, {row.get('recipe')}: {outcome}"


def measure(cases, options):
    with tempfile.TemporaryDirectory() as name:
        for number, one in cases.items():
            yield number, decide(one, Path(name))


def conclude(rows: list[dict], options) -> dict:
    what = "the best recipe of an advice and the next larger micro-batch, rehearsed on such a card; bytes"
    return {"what": what, "assumed_context_bytes": CONTEXT_BYTES, "seed": options.seed, "summary": summary(rows)}


ADVICE = Measurement(
    __doc__,
    "advice.json",
    lambda options: {str(number): pair(number, options.seed) for number in range(options.count)},
    measure,
    conclude,
    {"count": 58, "seed": 1},
    line=line,
)

if __name__ == "__main__":
    sys.exit(ADVICE.main())
