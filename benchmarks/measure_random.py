"""Compare the estimate for CUDA with torch's own allocator in rehearsals, over random configurations.

    python benchmarks/measure_random.py [--count 1000] [--seed 3] [--minutes 60]
    python benchmarks/measure_random.py --shrink NUMBER [--seed 3]   # simplify training NUMBER while it is wrong

Configurations have odd head sizes and lengths, unpadded vocabularies, one layer or many, tied weights or not, and
sliding windows. Exit code 1 if an estimate differs by a byte, allocated or reserved. Then simplify the
training with --shrink, keep it as a test, and correct the estimate.
"""

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from architectures import CAPABILITIES, FACTS, drawn
from measure_cuda import CHECKPOINTS, MEMORY, OPTIMIZERS, PRECISIONS, Training, rehearsed
from runner import Measurement, carry_modules, read_record, rehearsing

from perf_helpers.lab import Lab
from trainmem.rehearsal import card

KINDS = FACTS["random"]
NAMES = "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"
HEADS = (8, 16, 20, 24, 36, 40, 48, 56, 64, 72, 80, 96, 112, 128, 144, 160, 192, 256)  # sizes of a head
WIDEST = 1100
MOST_TOKENS = 6000  # per micro-batch
WITHOUT_TORCHAO = [name for name in OPTIMIZERS if not name.endswith(("_torch_8bit", "_torch_4bit"))]


def configuration(kind: str, draw: random.Random) -> dict:
    """Return a random config.json, as a dict, of a model type in `KINDS`; `draw` is the random generator."""
    given = dict(KINDS[kind])
    names, grouped, free = given.pop("names", NAMES), given.pop("grouped", False), given.pop("free", False)
    size = draw.choice(HEADS)
    heads = draw.choice([count for count in (1, 2, 3, 4, 5, 6, 7, 8, 12) if count * size <= WIDEST])
    width = 4 * draw.randint(8, WIDEST // 4) if free else heads * size
    layers = draw.choice((1, 1, 2, 3, 4, 5, 9, 14))
    words = draw.choice((draw.randint(130, 3000), draw.randint(3000, 70_000), 32_000, 50_257))
    sizes = dict(zip(names, (width, heads, layers, draw.randint(1, 2500)), strict=True))
    sizes |= {"model_type": kind, "vocab_size": words, "pad_token_id": 0, "max_position_embeddings": 4200}
    if grouped:
        own = draw.choice([count for count in range(1, heads + 1) if heads % count == 0])
        sizes |= {"num_key_value_heads": own, "tie_word_embeddings": draw.random() < 0.5}
    return sizes | ({"head_dim": size} if free else {}) | {name: drawn(value, draw) for name, value in given.items()}


def random_training(number: int, seed: int) -> Training:
    """Return training `number` of the series that `seed` generates; successive ones rotate through model types."""
    draw = random.Random(f"stranger {seed} {number}")
    kind = [*KINDS][number % len(KINDS)]
    config = configuration(kind, draw)
    length = draw.choice((draw.randint(3, 60), draw.randint(60, 700), draw.randint(700, 1500), 64, 128, 256, 512))
    size = draw.randint(1, min(5, MOST_TOKENS // length))
    arguments = {"per_device_train_batch_size": size, "optim": draw.choice(WITHOUT_TORCHAO)}
    arguments |= draw.choice(PRECISIONS) | draw.choice(CHECKPOINTS)
    arguments |= {"attn_implementation": "eager"} if draw.random() < 0.2 else {}
    arguments |= {"gradient_accumulation_steps": draw.choice((2, 3, 4, 5))} if draw.random() < 0.3 else {}
    arguments |= {"max_grad_norm": 0.0} if draw.random() < 0.1 else {}
    return Training(number, kind, config, length, arguments, draw.choice(CAPABILITIES), 1)


def compare(lab: Lab, one: Training, folder: Path) -> dict:
    """Rehearse a training, estimate it at the same time, and return the row for the record.

    If the estimate is wrong, "missed" has the differences of allocated and reserved bytes, or {"refused": reason}. If
    the training cannot be rehearsed, "left_out" has the reason.

    Args:
        lab: rehearses on a card of the training's compute capability.
        one: the training.
        folder: folder for the file with the model's configuration.
    """
    row = one.to_dict()
    with tempfile.TemporaryDirectory() as own, ThreadPoolExecutor(1) as beside:  # both write the configuration
        pending = beside.submit(one.estimated, Path(own))
        try:
            run = lab.run(rehearsed(one.experiment(folder)), measure="none")
        except ValueError as error:  # transformers refuses the configuration
            return row | {"left_out": str(error)[-200:]}
    if not run.ok:
        return row | {"left_out": run.message[-200:]}
    row["rehearsed"] = run.value
    try:
        predicted = pending.result().memory
    except ValueError as error:
        return row | {"missed": {"refused": str(error)[:300]}}
    off = {
        "allocated": predicted.peak_bytes - run.value["allocated"],
        "reserved": predicted.reserved_bytes - run.value["reserved"],
    }
    return row | ({"missed": off} if any(off.values()) else {})


def simpler(one: Training) -> Iterator[Training]:
    """Yield simpler trainings: without one argument, or with fewer layers, words, tokens or samples."""
    size = "per_device_train_batch_size"
    for name in one.arguments.keys() - {size}:
        yield replace(one, arguments={key: value for key, value in one.arguments.items() if key != name})
    for few in sorted({1, one.arguments[size] // 2} - {0, one.arguments[size]}):
        yield replace(one, arguments=one.arguments | {size: few})
    least = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 1) | {"vocab_size": 256}
    for name in least.keys() & one.config.keys():
        for few in sorted({least[name], one.config[name] // 2}):
            if least[name] <= few < one.config[name]:
                yield replace(one, config=one.config | {name: few})
    for few in sorted({8, one.seq_len // 2}):
        if 0 < few < one.seq_len:
            yield replace(one, seq_len=few)


def shrink(one: Training, misses: Callable[[Training], bool]) -> Training:
    """Simplify a training as long as its estimate is still wrong; return the last such training.

    `misses`: returns whether a training's estimate is wrong.
    """
    while (found := next(filter(misses, simpler(one)), None)) is not None:
        one = found
    return one


def cases(options) -> dict[str, Training]:
    return {str(number): random_training(number, options.seed) for number in range(options.count)}


def measure(cases, options):
    """Compare estimate and rehearsal of trainings for `options.minutes`; yield (number, row) for each training.

    The trainings are taken in blocks of 90. For each compute capability, one card rehearses those trainings of the
    block that have this capability.

    `cases`: {name: training}; `options`: the script's command-line options.
    """
    end, left = time.monotonic() + 60 * options.minutes, [*cases.values()]
    with tempfile.TemporaryDirectory() as name:
        for first, capability in itertools.product(range(0, len(left), 90), CAPABILITIES):
            if time.monotonic() > end:
                return
            with rehearsing(card(None, capability, MEMORY)) as lab:
                for one in left[first : first + 90]:
                    if one.capability == capability and time.monotonic() < end:
                        yield str(one.number), compare(lab, one, Path(name))


def conclude(rows: list[dict], options) -> dict:
    tried, missed = (sum(what in row for row in rows) for what in ("rehearsed", "missed"))
    what = "the estimate for CUDA beside torch's own allocator in a rehearsal, over random configurations"
    return {"what": what, "seed": options.seed, "tried": tried, "missed": missed}


def line(row: dict) -> str:
    return str(row.get("left_out") or row.get("missed") or "equal")


OPTIONS = {"count": 1000, "seed": 3, "minutes": 60, "shrink": -1}
RANDOM = Measurement(__doc__, "random.json", cases, measure, conclude, OPTIONS, line=line, rehearsed=True)


def main() -> int:
    options = RANDOM.parsed(None)
    if options.shrink < 0:
        return RANDOM.main() or int(read_record(options.out)["missed"] > 0)
    carry_modules()
    one = random_training(options.shrink, options.seed)
    with tempfile.TemporaryDirectory() as name, rehearsing(card(None, one.capability, MEMORY)) as lab:
        print(json.dumps(shrink(one, lambda other: "missed" in compare(lab, other, Path(name))).to_dict(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
