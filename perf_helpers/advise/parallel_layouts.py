"""Which parallelism: copies, shards, parts of layers or stages, for a model, cards and the links between them.

What one card needs, and each of several copies, is followed on fake tensors. What a rank needs where states are
sharded, layers are cut through or stages are made is arithmetic on that, as lessons 16 and 17 count it. Bytes that are
sent are those of ring algorithms, and seconds are a model: `notes` says of what.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from perf_helpers.advise.advice import Shown
from perf_helpers.cards import CONTEXT_BYTES
from perf_helpers.estimate import MemoryEstimate, estimate
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task
from perf_helpers.plots import Table
from perf_helpers.records import Category
from perf_helpers.texts import bytes_text, parse_bytes, whole_number

# Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), equation
# 2: of 34 bytes that a token and a unit of width keep in a layer without scores, tensor parallelism divides 24.
_KEPT_WHOLE = 10 / 34
_HIDDEN = 2 / 3  # of the arithmetic is backward, behind which gradients, gathered weights and stages' messages travel
_ZERO = ("", "states", "states and gradients", "states, gradients and weights")  # what the stages of ZeRO share out
_FORBIDDEN = ("fsdp", "deepspeed", "parallelism_config")


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model can be cut. Sizes are numbers of parameters."""

    parameters: int
    blocks: int  # layers that are repeated; 0: there are none
    block: int  # of the largest of them
    inside: int  # all blocks
    matrices: int  # of these, that tensor parallelism cuts: those with two dimensions and more
    before: int  # the first block: embeddings
    after: int  # the last one; a tied head counts here too, for two stages have it
    width: int  # numbers that a token is between two blocks
    heads: int  # the most parts of an attention; 1 where it is not known

    @classmethod
    def of(cls, task: Task) -> "Model":
        """No weights are made."""
        model = task.build_model(device="meta")
        lists = [(name, part) for name, part in model.named_modules() if type(part).__name__ == "ModuleList"]
        lists = [(name, part) for name, part in lists if len(part) > 1]
        outer = [part for name, part in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
        blocks = [block for part in outer for block in part]
        inside = {id(weight): weight for block in blocks for weight in block.parameters()}
        order = [*model.parameters()]
        first = next((at for at, weight in enumerate(order) if id(weight) in inside), len(order))
        outside = [[w.numel() for w in part if id(w) not in inside] for part in (order[:first], order[first:])]
        before, after = map(sum, outside)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and embedding is not None and head.weight is embedding.weight:
            after += head.weight.numel()
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 1
        return cls(
            parameters=sum(weight.numel() for weight in order),
            blocks=len(blocks),
            block=max((sum(weight.numel() for weight in block.parameters()) for block in blocks), default=0),
            inside=sum(weight.numel() for weight in inside.values()),
            matrices=sum(weight.numel() for weight in inside.values() if weight.dim() > 1),
            before=before,
            after=after,
            width=getattr(config, "hidden_size", 0) or 0,
            heads=heads if isinstance(heads, int) else 1,
        )

    def on_a_rank(self, tensor: int, pipeline: int) -> float:
        """Parameters of the fullest of `tensor` x `pipeline` ranks."""
        cut = self.matrices / tensor + self.inside - self.matrices
        if pipeline == 1:
            return cut + self.parameters - self.inside
        return cut * math.ceil(self.blocks / pipeline) / self.blocks + max(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model and its samples lie on the cards: `data` x `tensor` x `pipeline` ranks."""

    data: int
    tensor: int
    pipeline: int
    zero: int  # the stage of ZeRO over the data ranks; 0: each has a copy of what its place in the model needs
    bytes_a_rank: int = 0  # that the card of the fullest rank must have
    bytes_a_step: int = 0  # that a rank hands over for an update, to all its groups
    bytes_between_hosts: int = 0  # of these, what leaves the host
    seconds_a_sample: float = 0.0  # on all cards together, by the model that `Parallelism.notes` names
    fits: bool = False

    @property
    def name(self) -> str:
        words = [f"tensor {self.tensor}"] * (self.tensor > 1) + [f"pipeline {self.pipeline}"] * (self.pipeline > 1)
        if self.data > 1:
            kind = f"ZeRO {self.zero}" if self.zero else "data" if words else "DDP"
            words.append(f"{kind} {self.data}" if words else kind)
        return " x ".join(words) or "one card"

    @property
    def effort(self) -> tuple[int, int, int]:
        """What is sorted by for the simplest: in how many ways the model is cut, the stage of ZeRO, the parts."""
        return (self.tensor > 1) + (self.pipeline > 1), self.zero, self.tensor * self.pipeline


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
        where = f"{self.cards} cards of {bytes_text(self.card_bytes)}" + f" in {self.hosts} hosts" * (self.hosts > 1)
        fitting = sum(layout.fits for layout in self.layouts)
        shown = [*self.layouts[: min(6, fitting)], *self.layouts[fitting : fitting + 2]]
        rows = [
            [
                layout.name,
                "fits" if layout.fits else "does not",
                bytes_text(layout.bytes_a_rank),
                bytes_text(layout.bytes_a_step),
                bytes_text(layout.bytes_between_hosts),
                f"{shown[0].seconds_a_sample / layout.seconds_a_sample:.2f} x",
            ]
            for layout in shown
        ]
        header = ["layout", "", "bytes a rank", "sent a step", "between hosts", "speed, by the model"]
        return f"{self.task.model} on {where}: {self.choice}", Table(header, rows), "", [self.why, *self.notes]


def parallelism(
    task: Task,
    *,
    cards: int,
    card_bytes: int | float | str,
    hosts: int = 1,
    link_gbits: float | None = None,
    card_tflops: float = 100.0,
    device: str | None = "cuda",
    compute_capability: tuple[int, int] | None = None,
    **arguments,
) -> Parallelism:
    """Which parallelism for a training on several cards: the guides' decision tree, with the bytes that speak for it.

    The tree: does the model fit one card? Does its largest layer? One host or many, over which link? Of the layouts
    that fit, the one is taken that trains a sample fastest by a model of arithmetic and links; of equals the simplest.
    A model that fits one card is not cut: each card has it whole.

    Args:
        cards: in all, as many in each host.
        card_bytes: memory of one, in bytes or as "80GB".
        link_gbits: Gbit/s in one direction of the slowest link that all must use: between hosts, or between the cards
            of the only host. None: NVLink of an A100 (2400) in one host, 200 between hosts.
        card_tflops: 10^12 operations a second that a card is taken to do in a training.
        device, compute_capability: whose memory, as `estimate` takes them.
        arguments: names of `transformers.TrainingArguments`; `per_device_train_batch_size` is that of a data rank.

    Raises:
        ValueError: an argument that is unknown or out of range, or decides about sharding itself; a model that the
            estimate cannot follow.
    """
    whole_number("cards", cards)
    whole_number("hosts", hosts)
    if cards % hosts:
        raise ValueError(f"cards={cards} do not divide by hosts={hosts}: give as many to each")
    link_gbits = link_gbits if link_gbits is not None else 2400 if hosts == 1 else 200
    for name, value in (("link_gbits", link_gbits), ("card_tflops", card_tflops)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: give a number above 0")
    if given := [name for name in arguments if name.startswith(_FORBIDDEN)]:
        raise ValueError(f"{given[0]}: what is shared out is the answer here, leave it out")
    asked = {"device": device, "compute_capability": compute_capability if device == "cuda" else None}
    one = estimate(task, **asked, **arguments)
    copies = estimate(task, processes=2, **asked, **arguments) if cards > 1 else one
    limit, inside = parse_bytes(card_bytes, "card_bytes"), link_gbits if hosts == 1 else max(2400, link_gbits)
    planner = _Planner(task, one, copies, Arguments.of(arguments), cards // hosts, inside, link_gbits, card_tflops)
    layouts = [planner.layout(*place, limit) for place in planner.places(cards)]
    alone, layer = one.needed_bytes(CONTEXT_BYTES), planner.largest_layer()

    def order(layout: Layout) -> tuple:
        """Where the model fits one card those that leave it whole; then seconds to three digits, then the simplest."""
        is_cut = alone <= limit and layout.tensor * layout.pipeline > 1
        return is_cut, float(f"{layout.seconds_a_sample:.3g}"), layout.effort

    fitting = sorted((each for each in layouts if each.fits), key=order)
    others = sorted((each for each in layouts if not each.fits), key=lambda each: each.bytes_a_rank)
    chosen = (fitting or others)[0]
    branch = "the model fits one card"
    if alone > limit:
        branch = "the model does not fit one card, its largest layer does"
    if layer > limit:
        branch = "not even the largest layer fits one card"
    why = f"{branch[0].upper()}{branch[1:]}: all on one needs {bytes_text(alone)}, the largest layer alone "
    why += f"{bytes_text(layer)}, a card has {bytes_text(limit)}. "
    why += _why(chosen, others, limit) if fitting else _nothing(chosen, limit)
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
        notes=(_OF_BYTES, _of_seconds(inside, link_gbits, card_tflops, hosts)),
    )


_OF_BYTES = (
    "Bytes a rank: one card and copies are followed; shares, parts and stages are arithmetic on that. A stage takes "
    "one sample at a time; tensor parallelism leaves 10 of 34 parts of the activations whole (arXiv:2205.05198)."
)


def _of_seconds(inside: float, between: float, tflops: float, hosts: int) -> str:
    links = (
        f"{inside:g} Gbit/s inside a host, {between:g} between hosts" if hosts > 1 else f"links of {between:g} Gbit/s"
    )
    return (
        f"Speed is a model, not a measurement: {tflops:g} TFLOPS a card, {links}, gradients and stages' messages "
        "hidden behind backward as far as they fit, tensor parallelism's sums hidden by nothing, and the pipeline's "
        "bubble."
    )


def _why(chosen: Layout, others: list[Layout], limit: int) -> str:
    text = f"{chosen.name} needs {bytes_text(chosen.bytes_a_rank)} a rank and sends {bytes_text(chosen.bytes_a_step)}"
    text += " a step" + (f" ({_ZERO[chosen.zero]} shared out)." if chosen.zero else ".")
    if simpler := [each for each in others if each.effort < chosen.effort]:
        least = min(simpler, key=lambda each: each.effort)
        text += f" {least.name} is simpler and {bytes_text(least.bytes_a_rank - limit)} too large."
    return text


def _nothing(smallest: Layout, limit: int) -> str:
    text = f"Nothing fits: the smallest, {smallest.name}, needs {bytes_text(smallest.bytes_a_rank)} a rank, "
    text += f"{bytes_text(smallest.bytes_a_rank - limit)} too much. More cards, checkpointing or a smaller batch, "
    return text + "or offload to the host (advise tells what would help)."


class _Planner:
    """The arithmetic of layouts, from what one card and a copy need."""

    def __init__(
        self,
        task: Task,
        one: MemoryEstimate,
        copies: MemoryEstimate,
        arguments: Arguments,
        cards_a_host: int,
        inside_gbits: float,
        between_gbits: float,
        tflops: float,
    ):
        self.model, self.tokens, self.cards_a_host = Model.of(task), task.length(), cards_a_host
        self.of_copies = max(copies.needed_bytes(CONTEXT_BYTES) - one.needed_bytes(CONTEXT_BYTES), 0)  # DDP's buckets
        self.on_top = one.needed_bytes(CONTEXT_BYTES) - one.peak_bytes  # context, and what the allocator holds
        self.states = [one.memory.breakdown, *(one.memory.phase_breakdowns or {}).values()]
        self.batch = arguments.training.get("per_device_train_batch_size", 8)
        self.passes = arguments.training.get("gradient_accumulation_steps", 1)
        half = arguments.training.get("bf16") or arguments.training.get("fp16")
        self.activation_bytes = 2 if half or arguments.model.get("dtype") in ("bfloat16", "float16") else 4
        operations = 8 if arguments.training.get("gradient_checkpointing") else 6  # for a weight and a token
        self.arithmetic = (
            operations * self.model.parameters * self.tokens / (1e12 * tflops)
        )  # seconds a sample on one card
        self.inside, self.between = (gbits * 1e9 / 8 for gbits in (inside_gbits, between_gbits))

    def places(self, cards: int) -> Iterator[tuple[int, int, int, int]]:
        """(data, tensor, pipeline, zero) of every layout on so many cards: tensor parallelism stays in a host, and with
        stages ZeRO shares out no more than the states."""
        divisors = [each for each in range(1, cards + 1) if cards % each == 0]
        for tensor, pipeline in itertools.product(divisors, repeat=2):
            fits_heads = (
                self.model.heads % tensor == 0 and tensor <= self.cards_a_host and self.cards_a_host % tensor == 0
            )
            if cards % (tensor * pipeline) or not fits_heads or pipeline > max(self.model.blocks, 1):
                continue
            data = cards // (tensor * pipeline)
            most = 0 if data == 1 else 1 if tensor * pipeline > 1 else 3
            for zero in range(most + 1):
                yield data, tensor, pipeline, zero

    def layout(self, data: int, tensor: int, pipeline: int, zero: int, limit: int) -> Layout:
        made = Layout(data, tensor, pipeline, zero)
        sent, needed = self._sent(made), self._needed(made)
        seconds, between = min(self._seconds(made, sent, crossing) for crossing in self._crossings(made))
        return replace(
            made,
            bytes_a_rank=needed,
            bytes_a_step=round(sum(sent.values())),
            bytes_between_hosts=round(between),
            seconds_a_sample=seconds / (self.batch * self.passes * data),
            fits=needed <= limit,
        )

    def largest_layer(self) -> int:
        """Bytes that a card needs for what sharding over any number of cards does not divide."""
        return self._needed(Layout(2**30, 1, 1, 3))

    def _needed(self, made: Layout) -> int:
        model = self.model
        part = model.on_a_rank(made.tensor, made.pipeline) / model.parameters
        shares = {Category.WEIGHTS: 3, Category.GRADIENTS: 2, Category.OPTIMIZER_STATES: 1}  # from which stage on
        factors = {name: part / (made.data if made.zero >= stage else 1) for name, stage in shares.items()}
        factors[Category.WEIGHT_COPIES] = part
        samples = self.batch * self.passes
        held = 1.0 if made.pipeline == 1 else min(made.pipeline, samples) / made.pipeline / self.batch
        factors[Category.ACTIVATIONS] = held * (_KEPT_WHOLE + (1 - _KEPT_WHOLE) / made.tensor)
        most = max(sum(size * factors.get(name, 1) for name, size in state.items()) for state in self.states)
        return round(most + self.on_top + self._besides(made, part))

    def _besides(self, made: Layout, part: float) -> float:
        """Bytes that only several ranks have: DDP's buckets, a block that is gathered, its gradients before they are
        sent."""
        if made.data == 1:
            return 0
        weight, gradient = self._bytes_each(Category.WEIGHTS), self._bytes_each(Category.GRADIENTS)
        outside = self.model.parameters - self.model.inside
        if made.zero == 3:  # this block and the next, which is fetched ahead; what is outside them stays all the while
            return weight * (2 * self.model.block + outside) + gradient * self.model.block
        if made.zero == 2:
            return gradient * max(self.model.block, outside)
        return 0 if made.zero else self.of_copies * part

    def _bytes_each(self, category: Category) -> float:
        return max(state.get(category, 0) for state in self.states) / self.model.parameters

    def _sent(self, made: Layout) -> dict[str, float]:
        """Bytes that a rank hands over for an update, by group: a ring's (N - 1) / N for a reduce-scatter or a gather,
        twice that for a sum."""
        rank = self.model.on_a_rank(made.tensor, made.pipeline)
        weights, gradients = (rank * self._bytes_each(each) for each in (Category.WEIGHTS, Category.GRADIENTS))
        ring = (made.data - 1) / made.data
        sent = {"data": ring * (2 * self.passes * weights + gradients if made.zero == 3 else 2 * gradients)}
        passed = self.batch * self.passes * self.tokens * self.model.width * self.activation_bytes
        sent["pipeline"] = 0 if made.pipeline == 1 else passed * (2 if made.pipeline > 2 else 1)  # forward and back
        blocks = math.ceil(self.model.blocks / made.pipeline)
        sent["tensor"] = 4 * blocks * passed * 2 * (made.tensor - 1) / made.tensor  # two sums forward, two backward
        return sent

    def _crossings(self, made: Layout) -> list[set[str]]:
        """Which groups reach over hosts: the copies may be outermost, or the stages."""
        if made.data * made.tensor * made.pipeline <= self.cards_a_host:
            return [set()]
        outermost = {"data"} if made.data > 1 and made.tensor * made.pipeline <= self.cards_a_host else None
        stages = {"pipeline"} | ({"data"} if made.tensor * made.data > self.cards_a_host else set())
        stages = stages if made.pipeline > 1 else None
        return [crossing for crossing in (outermost, stages) if crossing] or [{"data", "pipeline"}]

    def _seconds(self, made: Layout, sent: dict[str, float], crossing: set[str]) -> tuple[float, float]:
        """Of an update by the model, and the bytes that leave the host."""
        samples = self.batch * self.passes
        busy = self.arithmetic * samples / (made.tensor * made.pipeline)
        travelling = {name: size / (self.between if name in crossing else self.inside) for name, size in sent.items()}
        waiting = max(0.0, travelling["data"] + travelling["pipeline"] - _HIDDEN * busy) + travelling["tensor"]
        with_bubble = busy * (samples + made.pipeline - 1) / samples
        return with_bubble + waiting, sum(sent[name] for name in crossing)
