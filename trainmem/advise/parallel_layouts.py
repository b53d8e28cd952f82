"""Choose replicas or shards for a training on several cards, by traced memory and Hugging Face's decision tree.

Covers DDP, FSDP2 and ZeRO 1 to 3. Bytes per rank come from the estimate, bytes sent from the formulas of ring
algorithms. If no layout fits, the answer names the tree's next branch (offload, or splitting the layers) and the
figures that decide it. Not covered: speed, and the memory of a model whose layers are split.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainmem.advise.advice import Shown
from trainmem.cards import CONTEXT_BYTES, DEFAULT_CAPABILITY, MARGIN, context_bytes, memory_of_card
from trainmem.core import optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate, estimate
from trainmem.estimate.depth import STATES
from trainmem.records import CATEGORIES, Category, Phase
from trainmem.tables import Table
from trainmem.texts import arguments_of_kind, bytes_text, whole_number

MOST_CARDS = 1024
_FORBIDDEN = ("fsdp", "deepspeed", "parallelism_config")
_REPLICAS = ("one card", "DDP")
_WEIGHTS = (Category.WEIGHTS, Category.FROZEN_WEIGHTS, Category.QUANTIZED_WEIGHTS)

_size = functools.partial(bytes_text, binary=True)  # as the memory of a card


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold one way to train on all cards: its name, one rank's estimate, the bytes it needs, and the bytes it sends."""

    name: str  # e.g. "DDP", "FSDP" or "ZeRO 1, checkpointing"
    estimate: MemoryEstimate  # of one rank
    bytes_a_rank: int  # needed on its card, with the CUDA context
    bytes_a_step: int  # sent by a rank per optimizer update
    bytes_between_hosts: int  # of these, sent over links between hosts
    fits: bool

    @property
    def is_replicated(self) -> bool:
        """Whether each card has the whole model."""
        return self.name.startswith(_REPLICAS)

    @property
    def undivided_bytes(self) -> int:
        """Peak bytes of a rank's tensors that more cards do not divide: activations, gathered layers, temporaries."""
        timeline = self.estimate.memory.timeline
        rest = (timeline[category] for category in CATEGORIES if category not in STATES)
        moments = zip(timeline["phase"], map(sum, zip(*rest, strict=True)), strict=True)
        return max(size for phase, size in moments if phase != Phase.STEP)  # the update's temporaries are divided


@dataclass(frozen=True, slots=True, repr=False)
class Parallelism(Shown):
    """Hold the result of `parallelism`: chosen layout, its bytes per rank, all traced layouts; displayed as a table."""

    task: Task
    cards: int
    hosts: int
    card_bytes: int
    branch: str  # of the tree, as text
    choice: str  # the name of the chosen layout, or "nothing fits"
    bytes_a_rank: int  # of the chosen layout; if nothing fits, of the smallest
    bytes_a_step: int
    why: str
    layouts: tuple[Layout, ...]  # those that fit in the tree's order, then the others, the smallest first
    notes: tuple[str, ...]

    def _parts(self) -> tuple[str, Table, str, list[str]]:
        where = f"{self.cards} cards of {_size(self.card_bytes)}" + f" in {self.hosts} hosts" * (self.hosts > 1)
        rows = [
            [each.name, "fits" if each.fits else "does not fit"]
            + [_size(size) for size in (each.bytes_a_rank, each.bytes_a_step, each.bytes_between_hosts)]
            for each in self.layouts
        ]
        header = ["layout", "", "bytes per rank", "sent per step", "between hosts"]
        return f"{self.task.model} on {where}: {self.choice}", Table(header, rows), "", [self.why, *self.notes]


def parallelism(
    task: Task,
    *,
    cards: int,
    card: str | None = None,
    card_bytes: int | float | str | None = None,
    hosts: int = 1,
    slow_link: bool = False,
    sharding: str = "fsdp",
    compute_capability: tuple[int, int] | None = None,
    **arguments,
) -> Parallelism:
    """Choose the layout of a training on several cards by a decision tree; return it with the bytes that decided.

    The tree of Hugging Face's guides: if each card can hold a replica, use DDP. Otherwise shard the model, if necessary
    with checkpointing. The first layout that fits is chosen, in the order DDP, FSDP, HSDP (on several hosts), FSDP that
    keeps gathered weights from forward to backward; with DeepSpeed in the order DDP, ZeRO 1, 2, 3. If none fits, the
    answer says whether more cards or offload would help, or whether layers must be split (tensor parallelism, pipeline
    stages), because the largest layer alone, with its activations, does not fit a card.

    Args:
        task: the model and its data.
        cards: number of cards over all hosts, the same in each host.
        card, card_bytes: a name of `cards.CARDS`, e.g. "h100", or the memory of one card, in bytes or as "80GB".
        hosts: number of hosts.
        slow_link: whether the link between hosts (in a single host: between cards) is slow. Sharded layouts that fit
            are then ordered by the bytes that they send over it, the fewest first.
        sharding: library that shards: "fsdp" (FSDP2), or "deepspeed" (ZeRO 1 to 3) if it is installed.
        compute_capability: compute capability of the cards, e.g. (8, 0); None: the named card's, otherwise this
            machine's, otherwise (9, 0).
        arguments: names of `transformers.TrainingArguments`; `per_device_train_batch_size` is per card.

    Raises:
        ValueError: an argument that is unknown or out of range; an argument that would choose the layout itself, e.g.
            `fsdp`; a model that cannot be traced.
    """
    arguments_of_kind(parallelism, locals())
    for name, value in (("cards", cards), ("hosts", hosts)):
        whole_number(name, value, most=MOST_CARDS)
    if cards % hosts:
        raise ValueError(f"cards={cards} is not a multiple of hosts={hosts}: give each host as many cards")
    if sharding not in ("fsdp", "deepspeed"):
        raise ValueError(f"sharding={sharding!r}: choose 'fsdp' or 'deepspeed'")
    if sharding == "deepspeed" and (why := optional_packages.missing("deepspeed")):
        raise ValueError(f"sharding='deepspeed': {why}")
    if given := [name for name in arguments if name.startswith(_FORBIDDEN)]:
        raise ValueError(f"{given[0]}: this function decides what is sharded, so leave it out")
    limit, capability = memory_of_card(card, card_bytes, compute_capability, "card_bytes")
    room, left_out = int(limit * (1 - MARGIN)), []
    cluster = _Cluster(task, cards, hosts, sharding, room, capability, left_out)
    layouts = [*cluster.layouts(arguments)]
    can_checkpoint = "gradient_checkpointing" not in arguments and task.model_class().supports_gradient_checkpointing
    if can_checkpoint and not any(each.fits for each in layouts):
        layouts += cluster.layouts(arguments | {"gradient_checkpointing": True}, ", checkpointing")
    fitting, others = [each for each in layouts if each.fits], [each for each in layouts if not each.fits]
    if slow_link:
        fitting.sort(key=lambda each: (not each.is_replicated, each.bytes_between_hosts or each.bytes_a_step))
    others.sort(key=lambda each: each.bytes_a_rank)
    chosen = (fitting or others)[0]
    if fitting:
        branch = "a replica fits each card" if chosen.is_replicated else "a replica does not fit a card, shards do"
        why = f"{chosen.name} needs {_size(chosen.bytes_a_rank)} per rank and sends {_size(chosen.bytes_a_step)} per "
        why += "step."
        if simpler := [each for each in layouts[: layouts.index(chosen)] if not each.fits]:
            too_large = _size(simpler[0].bytes_a_rank - room)
            why += f" {simpler[0].name} is simpler, but {too_large} too large."
    else:
        branch, why = _if_nothing_fits(task, chosen, room)
    return Parallelism(
        task=task,
        cards=cards,
        hosts=hosts,
        card_bytes=limit,
        branch=branch,
        choice=chosen.name if fitting else "nothing fits",
        bytes_a_rank=chosen.bytes_a_rank,
        bytes_a_step=chosen.bytes_a_step,
        why=f"{branch[0].upper()}{branch[1:]}. A card has {_size(limit)}, of which {MARGIN:.0%} is kept free. {why}",
        layouts=(*fitting, *others),
        notes=(*left_out, *_of_undivided_weights(layouts, cards), "Speed is not estimated: measure what fits."),
    )


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Trace the memory of a training under each layout (e.g. DDP, FSDP) on given cards and hosts."""

    task: Task
    cards: int
    hosts: int
    sharding: str
    room: int  # bytes of a card without the margin
    capability: tuple[int, int] | None
    left_out: list[str]  # filled with the layouts that cannot be traced, and why

    def layouts(self, arguments: dict[str, Any], suffix: str = "") -> Iterator[Layout]:
        """Yield every layout, traced with these training arguments, in the order of `_ways` (replicas first).

        A layout that cannot be traced is skipped, and the reason is added to `self.left_out`.

        `suffix`: added to the names of the layouts, e.g. ", checkpointing".

        Raises:
            ValueError: the first layout, with a replica on each card, cannot be traced.
        """
        context, whole = context_bytes(self.capability or DEFAULT_CAPABILITY) or CONTEXT_BYTES, None
        target = {"device": "cuda", "compute_capability": self.capability}
        for name, ranks, more in self._ways():
            options = target | arguments | more
            try:
                traced = estimate(self.task, processes=ranks, **options)
                # The limit matters only in between, where the allocator frees cached segments.
                if traced.peak_bytes + context <= self.room < traced.needed_bytes(context):
                    traced = estimate(self.task, processes=ranks, device_memory=self.room - context, **options)
            except ValueError as error:
                if not more:
                    raise
                self.left_out.append(f"{name}{suffix} was left out: {error}")
                continue
            whole = whole or traced  # the first layout has replicas
            sent, between = self._sent(name, ranks, whole, Arguments.of(arguments))
            needed = traced.needed_bytes(context)
            yield Layout(name + suffix, traced, needed, round(sent), round(between), needed <= self.room)

    def _ways(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield (name, number of ranks that share the model, training arguments) of each layout."""
        yield _REPLICAS[self.cards > 1], self.cards, {}
        if self.cards == 1:
            return
        if self.sharding == "deepspeed":
            own = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
            own |= {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
            own |= {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
            for stage in (1, 2, 3):
                yield f"ZeRO {stage}", self.cards, {"deepspeed": {"zero_optimization": {"stage": stage}} | own}
            return
        fsdp, once = ({"fsdp": True, "fsdp_config": {"reshard_after_forward": again}} for again in (True, False))
        yield "FSDP", self.cards, fsdp
        if self.cards > self.hosts > 1:  # the cards of a host share a model, and hosts are replicas of each other
            yield "HSDP", self.cards // self.hosts, fsdp
        yield "FSDP, gathered once", self.cards, once

    def _sent(self, name: str, ranks: int, whole: MemoryEstimate, arguments: Arguments) -> tuple[float, float]:
        """Return (bytes that a rank sends per update, how many of these bytes go between hosts).

        `name`: the layout's, e.g. "ZeRO 3"; `ranks`: number of ranks that share the model; `whole`: the estimate with
        the whole model on each card; `arguments`: of the training.
        """
        memory, passes = whole.memory, arguments.training.get("gradient_accumulation_steps", 1)
        trained = summed = memory.breakdown[Category.WEIGHTS]  # a gradient has its weight's type
        gathered = sum(memory.breakdown[category] for category in _WEIGHTS)
        if arguments.training.get("bf16") or arguments.training.get("fp16"):  # shards are sent in the compute type
            gathered, summed = 2 * memory.parameters, 2 * memory.trainable_parameters
        resharded = 2 * passes * gathered + summed
        sizes = {"DDP": 2 * trained, "ZeRO 1": 2 * summed, "ZeRO 2": (passes + 1) * summed}  # ZeRO 2 sums in each pass
        sizes |= {"ZeRO 3": passes * (2 * gathered + summed), "FSDP, gathered once": passes * gathered + summed}
        # In a ring: (N - 1) / N of the bytes gathered or reduce-scattered, twice as many in an all-reduce.
        sent = (ranks - 1) / ranks * sizes.get(name, resharded)
        if name == "HSDP":
            between = 2 * (self.hosts - 1) / self.hosts * summed / ranks
            return sent + between, between
        return sent, sent if self.hosts > 1 else 0


def _if_nothing_fits(task: Task, smallest: Layout, room: int) -> tuple[str, str]:
    """Return (branch of Hugging Face's decision tree, text with reasons and a remedy) for a task that no layout fits.

    `smallest`: the layout that needs the least memory; `room`: usable bytes of a card.
    """
    layer, weights = _largest_layer(task, smallest.estimate.arguments.get("dtype"))
    states = smallest.estimate.memory.breakdown[Category.OPTIMIZER_STATES]
    text = f"The smallest layout, {smallest.name}, needs {_size(smallest.bytes_a_rank)} per rank, "
    text += f"{_size(smallest.bytes_a_rank - room)} too much. More cards do not divide "
    text += f"{_size(smallest.undivided_bytes)} of it: activations, temporaries and gathered layers (the largest, "
    text += f"{layer}, has {_size(weights)} of weights)."
    if smallest.undivided_bytes > room:
        text += " Use smaller micro-batches, or split the layers themselves: tensor parallelism inside a host, pipeline"
        return "the largest layer and its activations do not fit a card", f"{text} stages between hosts (lesson 17)."
    text += f" Use more cards, or offload the optimizer states, {_size(states)} per rank, to the host (lesson 16)."
    return "shards on so many cards do not fit a card", text


def _largest_layer(task: Task, dtype: Any) -> tuple[str, int]:
    """Return (name, bytes of the weights) of the largest layer: a repeated block or a module without submodules."""
    modules = task.build_model(device="meta", dtype=dtype).named_modules()
    layers = ((name, part) for name, part in modules if name.split(".")[-1].isdigit() or not [*part.children()])
    sizes = ((name, sum(weight.nbytes for weight in part.parameters())) for name, part in layers)
    return max(sizes, key=lambda layer: layer[1])


def _of_undivided_weights(layouts: list[Layout], cards: int) -> Iterator[str]:
    """Yield a sentence if FSDP2 leaves rank 0 more than 1.5 times an equal share of the weights."""
    weights = {each.name: each.estimate.memory.breakdown[Category.WEIGHTS] for each in layouts}
    share = weights.get("FSDP", 0) / max(weights.values())  # the most: a layout with the whole model on each card
    if share > 1.5 / cards:
        text = f"FSDP2 divides a weight along its first dimension only: rank 0 has {share:.1%} of all weights, not "
        yield f"{text}{1 / cards:.1%}. Expert parallelism divides stacked experts better (lesson 18)."
