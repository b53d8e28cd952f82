"""Which parallelism: the guides' decision tree over layouts of a model on several cards, with what speaks for it."""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from perf_helpers.advise.advice import Shown
from perf_helpers.advise.measured_speedups import RECORDED
from perf_helpers.advise.parallel_layouts import MOST_FOLLOWED, Layout, Planner
from perf_helpers.cards import CONTEXT_BYTES, MARGIN, memory_of_card
from perf_helpers.lab import optional_packages
from perf_helpers.lab.task import Task
from perf_helpers.tables import Table
from perf_helpers.texts import arguments_of_kind, bytes_text, whole_number

_WORTH_CUTTING = 1.2  # times as fast must a model that is cut be by the model of seconds: that is no better than this
_FORBIDDEN = ("fsdp", "deepspeed", "parallelism_config")

_size = functools.partial(bytes_text, binary=True)  # as the memory of a card


@dataclass(frozen=True, slots=True, repr=False)
class Parallelism(Shown):
    """The layout that the decision tree ends at, and every one that was looked at. Shows itself as a table."""

    task: Task
    cards: int
    hosts: int
    card_bytes: int
    branch: str  # of the tree, in words
    choice: str  # the name of the layout chosen, or "nothing fits"
    bytes_a_rank: int  # of the layout chosen; where nothing fits, of the smallest
    bytes_a_step: int
    why: str
    layouts: tuple[Layout, ...]  # those that fit, the best first, then the others, the smallest first
    notes: tuple[str, ...]  # what the figures stand for

    def _parts(self) -> tuple[str, Table, str, list[str]]:
        where = f"{self.cards} cards of {_size(self.card_bytes)}" + f" in {self.hosts} hosts" * (self.hosts > 1)
        fitting = sum(layout.fits for layout in self.layouts)
        shown = [*self.layouts[: min(6, fitting)], *self.layouts[fitting : fitting + 2]]
        rows = [
            [
                layout.name,
                "fits" if layout.fits else "does not fit",
                _size(layout.bytes_a_rank),
                layout.source,
                _size(layout.bytes_a_step),
                _size(layout.bytes_between_hosts),
                f"{shown[0].seconds_a_sample / layout.seconds_a_sample:.2f} x",
            ]
            for layout in shown
        ]
        header = ["layout", "", "bytes per rank", "source", "sent per step", "between hosts", "speed (modelled)"]
        return f"{self.task.model} on {where}: {self.choice}", Table(header, rows), "", [self.why, *self.notes]


def parallelism(
    task: Task,
    *,
    cards: int,
    card: str | None = None,
    card_bytes: int | float | str | None = None,
    hosts: int = 1,
    effective_batch: int | None = None,
    link_gbits: float | None = None,
    card_tflops: float = 100.0,
    sharding: str = "fsdp",
    compute_capability: tuple[int, int] | None = None,
    **arguments,
) -> Parallelism:
    """Choose the parallelism of a training on several cards by the guides' decision tree, with the bytes behind it.

    The tree: if the model fits one card, each card has a replica. Otherwise it is sharded, if necessary with
    checkpointing. Only if that does not fit either, or if links are so slow that it would be 1.2 times as fast, the
    model itself is split: layers into tensor-parallel shards inside a host, into pipeline stages, or into experts.
    Among the layouts that remain, the fastest by a model of arithmetic and links is chosen; the simplest among equals.

    Args:
        task: the model and its data.
        cards: number of cards, the same in each host.
        card, card_bytes: a name of `cards.CARDS`, e.g. "h100", or the memory of one card, in bytes or as "80GB".
        hosts: number of hosts.
        effective_batch: samples per update. None: one micro-batch per card, times the accumulation steps.
        link_gbits: bandwidth in Gbit/s, in one direction, of the slowest link that all cards use: per card between
            hosts, or between the cards of a single host. None: 2400 (NVLink of an A100) in one host, 200 between hosts.
        card_tflops: 10^12 operations per second that a card is assumed to reach in a training.
        sharding: library that shards: "fsdp" (FSDP2), or "deepspeed" (ZeRO 1 to 3) if it is installed.
        compute_capability: of the cards, e.g. (8, 0); None: the named card's, this machine's, else (9, 0).
        arguments: names of `transformers.TrainingArguments`; `per_device_train_batch_size` is per data rank.

    Raises:
        ValueError: an argument that is unknown or out of range, or decides about sharding itself; a model that cannot
            be traced.
    """
    arguments_of_kind(parallelism, locals())
    for name, value in (("cards", cards), ("hosts", hosts)):
        whole_number(name, value)
    if cards % hosts:
        raise ValueError(f"cards={cards} is not a multiple of hosts={hosts}: give each host as many cards")
    link_gbits = link_gbits if link_gbits is not None else 2400 if hosts == 1 else 200
    for name, value in (("link_gbits", link_gbits), ("card_tflops", card_tflops)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: give a number above 0")
    if sharding not in ("fsdp", "deepspeed"):
        raise ValueError(f"sharding={sharding!r}: choose 'fsdp' or 'deepspeed'")
    if sharding == "deepspeed" and (why := optional_packages.missing("deepspeed")):
        raise ValueError(f"sharding='deepspeed': {why}")
    if given := [name for name in arguments if name.startswith(_FORBIDDEN)]:
        raise ValueError(f"{given[0]}: this function decides what is sharded, so leave it out")
    limit, capability = memory_of_card(card, card_bytes, compute_capability, "card_bytes")
    links = link_gbits if hosts == 1 else max(2400, link_gbits), link_gbits
    planner = Planner(task, arguments, capability, cards, hosts, limit, effective_batch, links, card_tflops, sharding)
    layouts = [*planner.layouts(checkpointing=False)]
    if not layouts:
        wrong = f"effective_batch={effective_batch}, {planner.batch} a micro-batch"
        raise ValueError(f"{wrong}: not divisible by any number of data ranks on {cards} cards. Change the batch")
    tries_checkpointing = (
        "gradient_checkpointing" not in arguments and task.model_class().supports_gradient_checkpointing
    )
    if tries_checkpointing and not any(each.fits and not each.is_cut for each in layouts):
        layouts += planner.layouts(checkpointing=True)
    alone, room = planner.one(False).needed_bytes(CONTEXT_BYTES), planner.room
    fitting, others = [each for each in layouts if each.fits], [each for each in layouts if not each.fits]
    # What recomputing takes is no reason to cut: it is tried before.
    whole = (each.seconds_a_sample - planner.recomputing * each.checkpointing for each in fitting if not each.is_cut)
    least = min(whole, default=math.inf)

    def order(layout: Layout) -> tuple:
        """Copies where the model fits one card; what is cut last, unless that is worth it; then seconds to three
        digits, then the simplest."""
        more_than_needed = alone <= room and (layout.is_cut or bool(layout.sharing))
        too_little = layout.is_cut and _WORTH_CUTTING * layout.seconds_a_sample > least
        return more_than_needed, too_little, float(f"{layout.seconds_a_sample:.3g}"), layout.effort

    fitting.sort(key=order)
    others.sort(key=lambda each: each.bytes_a_rank)
    chosen = (fitting or others)[0]
    branch = "the model fits one card"
    if alone > room:
        branch = "the model does not fit one card, but its largest layer does"
    if alone > room and least == math.inf and planner.largest_layer(tries_checkpointing) > room:
        branch = "not even the largest layer fits one card"
    why = f"{branch[0].upper()}{branch[1:]}: the whole needs {_size(alone)}, a card has {_size(limit)}, of "
    why += f"which {MARGIN:.0%} is kept free. " + (_why(chosen, others, room) if fitting else _nothing(chosen, room))
    return Parallelism(
        task=task,
        cards=cards,
        hosts=hosts,
        card_bytes=limit,
        branch=branch,
        choice=chosen.name if fitting else "nothing fits",
        bytes_a_rank=chosen.bytes_a_rank,
        bytes_a_step=chosen.bytes_a_step,
        why=why,
        layouts=(*fitting, *others),
        notes=(*_of_bytes(cards), planner.of_seconds(), *planner.of_links(chosen), *planner.left_out),
    )


def _of_bytes(cards: int) -> Iterator[str]:
    """What the figures of memory stand for."""
    text = "Bytes per rank are traced by the estimate if no layer is split"
    yield text + (f", on {MOST_FOLLOWED} ranks; more ranks make smaller shards." if cards > MOST_FOLLOWED else ".")
    text = "Under tensor, pipeline or expert parallelism they are calculated from one card's: "
    file = RECORDED / "layouts.json"
    if file.is_file():
        errors = json.loads(file.read_text("utf-8"))["errors"].items()
        known = (f"{kind} {each['least']:+.0%} to {each['most']:+.0%} ({each['count']})" for kind, each in errors)
        text += f"compared with traced ranks the error was {', '.join(known)}; see results/layouts.json. "
    text += "A stage takes one sample at a time. Tensor parallelism leaves 10 of 34 parts of the activations whole "
    yield text + "(arXiv:2205.05198); sequence parallelism would divide them as well."


def _why(chosen: Layout, others: list[Layout], room: int) -> str:
    text = f"{chosen.name} needs {_size(chosen.bytes_a_rank)} per rank and sends {_size(chosen.bytes_a_step)}"
    text += " per step."
    if simpler := [each for each in others if each.effort < chosen.effort]:
        least = min(simpler, key=lambda each: each.effort)
        text += f" {least.name} is simpler, but {_size(least.bytes_a_rank - room)} too large."
    return text


def _nothing(smallest: Layout, room: int) -> str:
    text = f"Nothing fits: the smallest, {smallest.name}, needs {_size(smallest.bytes_a_rank)} per rank, "
    text += f"{_size(smallest.bytes_a_rank - room)} too much. Use more cards, a smaller batch, an optimizer with "
    return text + "smaller states, or offload to the host (`advise` prints what would help)."
