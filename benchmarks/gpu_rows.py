"""The rows of the GPU suite, part by part: which trainings are run and compared, at which sizes.

Each part is a generator of rows. It gets the rows that are measured already, and is called again after each new row, so
that a row may depend on others, e.g. on the largest batch that fits. A row that it yields and that the suite's file
lacks is measured next. This module measures nothing; measure_gpu.py does. The first line of a part's docstring is the
caption of its table in results/README.md.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import gpu_functions
import recipes

from trainmem.core import hardware
from trainmem.core.hardware import Machine
from trainmem.core.task import TINY, Profile, Task
from trainmem.measure.interleaving import NO_TIME
from trainmem.records import Ratio, Record

NOT_TESTABLE = "not testable here"
FAILED = ("crashed", "killed", "timed out")  # rows with such a status are tried once more
BOTH = ("memory", "time")


@dataclass(frozen=True)
class Row:
    """One thing that the GPU suite measures: a run, a pair of interleaved runs, or a call of a function."""

    name: str  # unique within its part
    kind: str = "run"  # by the lab; "pair": two interleaved runs; "question": a function's result
    task: Task | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable | None = None
    function: Callable | None = None  # replaces the Trainer; for a question, the function to call
    measure: tuple[str, ...] = ("memory",)
    steps: int | None = None  # timed steps; None: the profile's
    of: tuple["Row", ...] = ()  # of a pair: the baseline and the other run
    lacks: str = ""  # something that the row needs and this machine lacks

    def settings(self) -> dict[str, Any]:
        """Return {name: value of a JSON type} of everything that the result depends on, except machine and versions."""
        facts = {"kind": self.kind, "task": self.task and self.task.to_dict(), "arguments": self.arguments}
        facts |= {"measure": list(self.measure), "steps": self.steps, "of": [row.settings() for row in self.of]}
        return facts | {name: getattr(self, name) and self.name for name in ("function", "optimizer")}


@dataclass(frozen=True)
class StoredRow(Record):
    """The result of a row of the GPU suite, as in one line of its file: settings, machine, status, runs and ratios."""

    part: str
    name: str
    settings: dict[str, Any]
    setup: dict[str, Any]  # the parts of machine, versions and profile that results depend on
    machine: dict[str, Any]
    status: str  # a run's status, or NOT_TESTABLE
    message: str = ""
    runs: tuple[dict[str, Any], ...] = ()  # one, or two of a pair; `Run.to_dict` without the other fields here
    speed_ratio: Ratio | None = None  # of a pair: samples per second of the other run over the baseline's
    wall_ratio: Ratio | None = None  # the same ratio in wall-clock time, on a CPU
    value: Any = None  # of a question: the function's result
    seconds: float | None = None  # total time of the row
    date: str = ""  # ISO 8601, UTC

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def peak_bytes(self) -> int | None:
        memory = self.runs[-1]["memory"] if self.runs else None
        return memory and memory["peak_bytes"]


Known = Mapping[str, StoredRow]  # {name: row} of the rows of a part that need not be run again


@dataclass(frozen=True)
class Here:
    """The machine, its packages and the profile that fits it, on which the rows of the GPU suite depend."""

    machine: Machine
    versions: dict[str, str | None]
    profile: Profile

    @property
    def tiny(self) -> bool:
        return self.profile.name == TINY.name

    @property
    def half(self) -> dict[str, bool]:
        """Return the argument for mixed precision: {"bf16": True}, or {"fp16": True} on a GPU without bf16."""
        fp16 = self.machine.kind == "cuda" and not self.has("sm80")
        return {"fp16": True} if fp16 else {"bf16": True}

    def has(self, feature: str) -> bool:
        return hardware.supports(feature, self.machine)[0]

    def row(self, name: str, task: Task, arguments: dict[str, Any], **more) -> Row:
        return Row(name, task=task, arguments=arguments, lacks=self.lacking(arguments), **more)

    def pair(self, baseline: Row, other: Row) -> Row:
        lacks = baseline.lacks or other.lacks or (NO_TIME if self.machine.rehearsed else "")
        return Row(f"{other.name} against {baseline.name}", "pair", of=(baseline, other), lacks=lacks)

    def question(self, name: str, task: Task, function: Callable, feature: str = "any", lacks: str = "") -> Row:
        missing = hardware.supports(feature, self.machine)[1] or lacks or (NO_TIME if self.machine.rehearsed else "")
        return Row(name, "question", task=task, function=function, lacks=missing)

    def lacking(self, arguments: Mapping[str, Any]) -> str:
        """Return what this machine lacks for training arguments, in words; empty if nothing is missing."""
        needs = {"fp16": "cuda", "tf32": "sm80"}
        missing = [hardware.supports(need, self.machine)[1] for name, need in needs.items() if arguments.get(name)]
        if "bnb" in arguments.get("optim", "") and not self.versions.get("bitsandbytes"):
            missing.append("needs the package bitsandbytes")
        if arguments.get("torch_compile"):
            missing.append(self.lacking_compiler)
        return "; ".join(dict.fromkeys(filter(None, missing)))

    @property
    def lacking_compiler(self) -> str:
        if self.machine.rehearsed:
            return "a rehearsal measures no times of compiled code"
        return "" if any(map(shutil.which, ("cc", "gcc", "clang"))) else "needs a C compiler"


def batch_of(size: int) -> dict[str, int]:
    return {"per_device_train_batch_size": size}


PRECISIONS = {"fp32": {}, "fp16": recipes.HALF}


# ---- the parts: the first line of a docstring is the title of the part's table


def ten(here: Here, known: Known) -> Iterator[Row]:
    """The guides' ten recipes, and their speeds against each other.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    task, rows = here.profile.task, {}
    against = {name: [] if name == "vanilla" else ["vanilla"] for name in recipes.ROWS}
    against["+ checkpointing"] = ["accumulation", "vanilla"]
    against["all + 8-bit Adam"] = ["all + Adafactor", "vanilla"]
    for name, (setup, _) in recipes.ROWS.items():
        if callable(setup):
            lacks = here.lacking(recipes.HALF | recipes.ADAM_8BIT)
            yield Row(name, task=task, function=setup, lacks=lacks)
            continue
        rows[name] = here.row(name, task, setup, measure=BOTH)
        yield rows[name]
        yield from (here.pair(rows[baseline], rows[name]) for baseline in against[name])


def batch(here: Here, known: Known) -> Iterator[Row]:
    """Memory and throughput by batch size, up to the first that does not fit.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    task = here.profile.task if here.tiny else here.profile.task.replace(dataset_size=2048)
    fitting = []
    for size in (1, 2, 4, 8, 16, 32, 64):
        row = here.row(f"batch {size}", task, batch_of(size), measure=BOTH, steps=None if here.tiny else 8)
        yield row
        if row.name not in known:
            return  # the following rows depend on it
        if not known[row.name].ok:
            break
        fitting.append(row)
    if len(fitting) > 1:
        yield here.pair(fitting[0], fitting[-1])
    if len(fitting) > 2:
        yield here.pair(fitting[-1], fitting[-3])


def fp16(here: Here, known: Known) -> Iterator[Row]:
    """The 2022 guide's table: fp16 and fp32 by micro-batch, with one accumulation step and with two.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows. With two accumulation
    steps, the gradients of the first micro-batch stay in memory during the second.
    """
    task = here.profile.task if here.tiny else Task("bert-base-uncased", seq_len=128)

    def two(size: int, more: dict[str, int], measure: tuple[str, ...]) -> list[Row]:
        name = f"{size} x {more['gradient_accumulation_steps']}" if more else f"{size}"
        sizes = batch_of(size) | more
        return [here.row(f"{name}, {kind}", task, sizes | args, measure=measure) for kind, args in PRECISIONS.items()]

    for size in (8, 16, 32, 64):
        rows = two(size, {}, BOTH)
        yield from rows
        yield here.pair(*rows)
    for size in (1, 8, 16, 32, 64):
        yield from two(size, {"gradient_accumulation_steps": 2}, ("memory",))
    yield from two(1, {}, ("memory",))


def tf32(here: Here, known: Known) -> Iterator[Row]:
    """tf32 on and off, in fp32 and under fp16; and large matmuls in each precision.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    for name, arguments in PRECISIONS.items():
        baseline = here.row(name, here.profile.task, recipes.FOUR | arguments)
        name = "fp16 and tf32" if arguments else "tf32"
        row = here.row(name, here.profile.task, baseline.arguments | {"tf32": True}, measure=BOTH)
        yield row
        yield here.pair(baseline, row)
    yield here.question("products", here.profile.task, gpu_functions.products, "sm80")


def bf16(here: Here, known: Known) -> Iterator[Row]:
    """Compare a training in fp32 with one in bf16.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    plain = here.row("fp32", here.profile.task, recipes.FOUR)
    row = here.row("bf16", here.profile.task, recipes.FOUR | {"bf16": True}, measure=BOTH)
    yield row
    yield here.pair(plain, row)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def attention(here: Here, known: Known) -> Iterator[Row]:
    """Plain attention and SDPA by length, as in lesson 11, and each SDPA kernel that can be forced.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    lengths = (16, 24, 32) if here.tiny else (512, 1024, 2048)
    size = {} if here.tiny else {"num_hidden_layers": 12, "max_position_embeddings": 2048}
    task = Task("bert-tiny" if here.tiny else "bert-large-uncased", config=size | NO_DROPOUT)
    options = batch_of(1) | (here.half if here.machine.kind == "cuda" else {})
    rows = {}
    for length in lengths:
        for name in ("eager", "sdpa"):
            arguments = options | {"attn_implementation": name}
            # At the longest length also compare losses, over as few steps as in the lesson: rounding errors grow.
            more = {"measure": BOTH, "steps": 2} if length == lengths[-1] else {}
            rows[name] = here.row(f"{name}, {length}", task.replace(seq_len=length), arguments, **more)
            yield rows[name]
    yield here.pair(rows["eager"], rows["sdpa"])
    accepted = here.question("kernels", task, gpu_functions.kernels, "cuda")
    yield accepted
    for kernel in gpu_functions.KERNELS if accepted.name in known else ():
        answer = known[accepted.name].value or {}
        lacks = known[accepted.name].message or ("" if answer.get(kernel) else f"needs a GPU on which {kernel} runs")
        function = gpu_functions.forced(kernel, options | {"attn_implementation": "sdpa"}, here.profile)
        long = task.replace(seq_len=lengths[-1])
        row = Row(f"sdpa, {kernel}, {lengths[-1]}", task=long, function=function, measure=BOTH, lacks=lacks)
        yield row
        yield here.pair(rows["eager"], row)


def compiled(here: Here, known: Known) -> Iterator[Row]:
    """torch.compile on and off: steady state, and the seconds of a cold start.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    facts = NO_DROPOUT | {"problem_type": "single_label_classification"}
    task = here.profile.task.replace(config=facts | ({} if here.tiny else {"num_hidden_layers": 6}))
    plain = here.row("uncompiled", task, recipes.FOUR, measure=BOTH)
    yield plain
    for backend in ("inductor", "aot_eager"):
        arguments = recipes.FOUR | {"torch_compile": True, "torch_compile_backend": backend}
        row = here.row(backend, task, arguments, measure=BOTH if backend == "inductor" else ("memory",))
        yield row
        yield here.pair(plain, row)
    yield here.question("cold start", task, gpu_functions.cold_start, lacks=here.lacking_compiler)


# {name: (task, samples per micro-batch, sizes for a test run)}
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
_LLAMA = {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816}
_LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 4, "dtype": "float32"}
_MIXTRAL = _LLAMA | {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1408, "num_local_experts": 4}
_FEW = {"vocab_size": 500, "num_key_value_heads": 2}
MODELS: dict[str, tuple[Task, int, dict[str, Any]]] = {
    "bert-large": (Task("bert-large-uncased", seq_len=512), 4, _SMALL | {"vocab_size": 500}),
    "gpt2": (Task("gpt2", seq_len=512), 4, {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500}),
    "t5-base": (Task("t5-base", seq_len=256), 8, {"d_model": 64, "d_ff": 128, "num_layers": 2, "vocab_size": 500}),
    "vit-base": (Task("vit-base"), 16, _SMALL | {"image_size": 32}),
    "llama": (Task("llama-3-8b", seq_len=512, config=_LLAMA), 4, _SMALL | _FEW),
    "mixtral": (Task("mixtral-8x7b", seq_len=256, config=_MIXTRAL), 4, _SMALL | _FEW),
}
RECIPES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "Adafactor": {"optim": "adafactor"},
    "8-bit Adam": {"optim": "adamw_bnb_8bit"},
}
WITHOUT = {("t5-base", "fp16"), ("mixtral", "fp16")}  # uncommon trainings: T5 overflows in fp16


def estimates(here: Here, known: Known) -> Iterator[Row]:
    """Forty trainings of six models, which the estimate is compared with.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows.
    """
    chosen = [(model, recipe) for model in MODELS for recipe in RECIPES if (model, recipe) not in WITHOUT]
    for model, recipe in chosen:
        task, size, small = MODELS[model]
        if here.tiny:
            task, size = task.replace(seq_len=16, dataset_size=64, config=small), 2
        yield here.row(f"{model}, {recipe}", task, batch_of(size) | RECIPES[recipe])


FIRST = "guides' vanilla"


def best(here: Here, known: Known) -> Iterator[Row]:
    """Lesson 14's ladder of speed: the first recipe, "guides' vanilla", plus one technique after the other; each alone.

    Yield this part's rows for the machine `here`; `known`: {name: row} of the measured rows. The batch grows as long as
    a run needs no more memory than the first recipe. Model FLOPs utilization is measured for the first recipe and for
    the fastest one. The runs of each technique alone are for the guide's own table.
    """
    climb = [here.row(FIRST, here.profile.task, GUIDES, optimizer=gpu_functions.looped)]
    yield climb[0]
    if FIRST not in known or not known[FIRST].ok:
        return
    for name, changes, lacks in _rungs(here):
        base = climb[-1]
        for change in changes:
            label = f"{name}, {change['per_device_train_batch_size']}" if len(changes) > 1 else name
            more = {} if change.get("optim") else {"optimizer": base.optimizer}
            row = here.row(label, base.task, base.arguments | change, **more)
            yield row if not lacks else Row(label, lacks=lacks)
            if label not in known:
                return
            found = known[label]
            if not found.ok or (len(changes) > 1 and found.peak_bytes > known[FIRST].peak_bytes):
                break
            climb = [*climb[: climb.index(base) + 1], row]
    pairs = [here.pair(climb[0], row) for row in climb[1:]]
    yield from pairs
    if all(pair.name in known for pair in pairs):
        yield from _utilization(here, known, climb)
    yield from (here.pair(*two) for two in pairwise(climb) if two[0] is not climb[0])
    yield from _alone(here, climb[0])


GUIDES = recipes.FOUR | {"attn_implementation": "eager"}


def _rungs(here: Here) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """Yield each rung (added technique) of lesson 14's ladder of speed: (name, list of training arguments, text).

    Each entry of the list is one way to add the technique. `best` tries the entries in order, and stops at the first
    entry that fails or, if the list has several, that needs more memory than the first recipe of the ladder. The entry
    before is kept. The text names the packages or hardware that the machine `here` lacks for the rung; it is empty if
    nothing is missing.
    """
    native = "" if here.machine.kind == "cuda" or here.machine.native_bf16 else "needs a CPU with bf16 instructions"
    yield "+ tf32", [{"tf32": True}], here.lacking({"tf32": True})
    yield "+ half precision", [here.half], native
    yield "+ SDPA", [{"attn_implementation": "sdpa"}], ""
    yield "+ fused AdamW", [{"optim": "adamw_torch_fused"}], ""
    yield "+ larger batch", [batch_of(size) for size in (6, 8, 12, 16, 24, 32)], ""
    yield "+ workers", [{"dataloader_num_workers": 2}], ""
    yield "+ compile", [{"torch_compile": True}], here.lacking({"torch_compile": True})


def _utilization(here: Here, known: Known, climb: list[Row]) -> Iterator[Row]:
    """Yield the rows for model FLOPs utilization (lesson 02): the first and the fastest recipe, and rates of matmuls.

    The fastest recipe is sought among those that need no more memory than the first.

    `known`: {name: row} of the measured rows; `climb`: the rows of lesson 14's ladder of speed, in its order.
    """
    ratios = {row.name: known[here.pair(climb[0], row).name].speed_ratio for row in climb[1:]}
    fitting = [row for row in climb if known[row.name].peak_bytes <= known[FIRST].peak_bytes]
    surely = {FIRST: 1.0} | {name: ratio.low for name, ratio in ratios.items() if ratio and ratio.known}
    found = max((row for row in fitting if row.name in surely), key=lambda row: surely[row.name])
    lacks = NO_TIME if here.machine.rehearsed else ""
    for which, row in (("first", climb[0]), ("best", found)):
        yield dataclasses.replace(row, name=f"{which}, timed", measure=BOTH, lacks=lacks)
    yield here.question("rates", here.profile.task, gpu_functions.rates)
    yield here.question("model FLOPs of a sample", here.profile.task, gpu_functions.flops_of_a_sample)


def _alone(here: Here, first: Row) -> Iterator[Row]:
    one, looped = batch_of(1), gpu_functions.looped
    alone = {"accumulation alone": recipes.ONE, "checkpointing alone": {"gradient_checkpointing": True}}
    for name, change in (alone | {"micro-batch 1": one, "Adafactor alone": recipes.ADAFACTOR}).items():
        optimizer = None if "optim" in change else looped
        yield (row := here.row(name, first.task, first.arguments | change, optimizer=optimizer))
        if name == "micro-batch 1":
            yield here.pair(row, first)
        elif name != "Adafactor alone":
            yield here.pair(first, row)


PARTS: dict[str, Callable[[Here, Known], Iterator[Row]]] = {
    "ten": ten,
    "batch": batch,
    "fp16": fp16,
    "tf32": tf32,
    "bf16": bf16,
    "attention": attention,
    "compile": compiled,
    "estimate": estimates,
    "best": best,
}
