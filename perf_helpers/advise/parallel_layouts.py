"""Layouts of a model on several cards: what a rank needs, what it sends, and how long an update takes by a model.

Where each rank has the whole model, as a copy or in shards, its bytes are the estimate's: the training is followed with
these arguments. What a rank needs of a model that is cut, into parts of layers, stages or experts, is arithmetic on
what one card needs (lessons 17 and 18); `results/layouts.json` has how far it is from ranks that were followed. Bytes
that are sent are those of ring algorithms.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perf_helpers.cards import CONTEXT_BYTES, MARGIN
from perf_helpers.estimate import MemoryEstimate, estimate
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task
from perf_helpers.records import TENSOR_CATEGORIES, Category
from perf_helpers.texts import whole_number

# Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), equation
# 2: of 34 bytes that a token and a unit of width keep in a layer without scores, tensor parallelism divides 24. Under
# autocast the other 10, norms and residuals, are twice as wide as the products.
_KEPT_WHOLE, _KEPT_WHOLE_IN_AUTOCAST = 10 / 34, 20 / 44
_BACKWARD = 2 / 3  # of the arithmetic: behind it gradients travel
MOST_FOLLOWED = 32  # ranks: of more, the shards of 32 are followed and made smaller
_STATES = {Category.WEIGHTS: 3, Category.GRADIENTS: 2, Category.OPTIMIZER_STATES: 1}  # shared out from that stage on
_STAGES = {"": 0, "ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3, "FSDP": 3, "FSDP, gathered once": 3, "HSDP": 3}
_WHOLE = {"ZeRO 1": 2, "ZeRO 2": 1, "FSDP, gathered once": 1}  # weights and gradients in the type computed in: copies


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model can be cut. Sizes are numbers of parameters."""

    parameters: int
    blocks: int  # layers that are repeated; 0: there are none
    inside: int  # all blocks
    matrices: int  # of all, that tensor parallelism cuts: those with two dimensions and more
    before: int  # the first block: embeddings
    after: int  # the last one; a tied head counts here too, for two stages have it
    width: int  # numbers that a token is between two blocks
    heads: int  # the most parts of an attention; 1 where it is not known
    experts: int = 1  # in a block
    of_experts: int = 0  # parameters of all experts: weights with one dimension for them
    chosen: int = 1  # experts that a token passes
    prefixes: tuple[str, ...] = ()  # of the names of the modules in blocks

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

        def told(*names: str) -> int:
            values = (getattr(config, name, None) for name in names)
            return next((value for value in values if isinstance(value, int) and value > 0), 1)

        return cls(
            parameters=sum(weight.numel() for weight in order),
            blocks=len(blocks),
            inside=sum(weight.numel() for weight in inside.values()),
            matrices=sum(weight.numel() for weight in order if weight.dim() > 1),
            before=before,
            after=after,
            width=told("hidden_size"),
            heads=told("num_key_value_heads", "num_attention_heads"),
            experts=told("num_local_experts", "num_experts", "n_routed_experts"),
            of_experts=sum(weight.numel() for weight in inside.values() if weight.dim() == 3),
            chosen=told("num_experts_per_tok"),
            prefixes=tuple(f"{name}." for name, part in lists if part in outer),
        )

    @property
    def active(self) -> float:
        """Parameters that a token meets."""
        return self.parameters - self.of_experts * (1 - self.chosen / self.experts)

    def on_a_rank(self, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> float:
        """Parameters of the fullest rank."""
        part = (self.matrices / tensor + self.parameters - self.matrices) / self.parameters
        whole = self.parameters - self.of_experts * (1 - 1 / expert)
        if pipeline == 1:
            return part * whole
        inside = self.inside - self.of_experts * (1 - 1 / expert)
        return part * (inside * math.ceil(self.blocks / pipeline) / self.blocks + max(self.before, self.after))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model and its samples lie on the cards: `data` x `tensor` x `pipeline` ranks."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1  # of the data ranks, so many have different experts
    sharing: str = ""  # how data ranks share out states, gradients and weights: a key of `_STAGES`
    checkpointing: bool = False
    bytes_a_rank: int = 0  # that the card of the fullest rank must have
    source: str = ""  # of these bytes: "traced", "calculated", or "states only" if the states alone do not fit
    bytes_a_step: int = 0  # that a rank hands over for an update, to all its groups
    bytes_between_hosts: int = 0  # of these, what leaves the host
    seconds_a_sample: float = 0.0  # on all cards together, by the model that `Parallelism.notes` names
    fits: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether layers, or the model between layers, are cut: no rank has or gathers all of it."""
        return self.tensor * self.pipeline * self.expert > 1

    @property
    def name(self) -> str:
        ways = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}
        words = [f"{way} {count}" for way, count in ways.items() if count > 1]
        if self.data > 1 and (self.sharing or self.expert == 1):
            kind = self.sharing or ("data" if words else "DDP")
            words.append(f"{kind} {self.data}" if words else kind)
        return (" x ".join(words) or "one card") + ", checkpointing" * self.checkpointing

    @property
    def effort(self) -> tuple[int, int, int]:
        """What is sorted by for the simplest: in how many ways the model is cut, how much is shared out, the parts."""
        ways = (self.tensor > 1) + (self.pipeline > 1) + (self.expert > 1)
        return ways, [*_STAGES].index(self.sharing), self.tensor * self.pipeline * self.expert


class Planner:
    """The layouts of one question: what is followed, and the arithmetic on what one card needs."""

    def __init__(
        self,
        task: Task,
        arguments: dict[str, Any],
        capability: tuple[int, int] | None,
        cards: int,
        hosts: int = 1,
        limit: float = math.inf,
        effective_batch: int | None = None,
        link_gbits: tuple[float, float] = (2400, 200),  # inside a host, between hosts
        tflops: float = 100,
        sharding: str = "fsdp",
    ):
        self.task, self.arguments, self.sharding = task, arguments, sharding
        self.asked = {"device": "cuda", "compute_capability": capability}
        self.cards, self.cards_a_host, self.room = cards, cards // hosts, limit * (1 - MARGIN)
        self.links, self.tflops, self.model, self.tokens = link_gbits, tflops, Model.of(task), task.length()
        known = Arguments.of(arguments)
        self.batch = known.training.get("per_device_train_batch_size", 8)
        self.samples = self.batch * known.training.get("gradient_accumulation_steps", 1) * cards  # of an update
        if effective_batch is not None:
            self.samples = whole_number("effective_batch", effective_batch)
        # Seconds of a sample, on all cards together, that checkpointing computes again: the forward.
        self.recomputing = 2 * self.model.active * self.tokens / (1e12 * tflops) / cards
        self.left_out: list[str] = []  # layouts that cannot be followed, and why
        self.is_half = bool(known.training.get("bf16") or known.training.get("fp16"))
        is_narrow = task.weights(known.get("dtype")).dtype in ("bfloat16", "float16")
        self.activation_bytes = 2 if self.is_half or is_narrow else 4  # of what products take and messages carry
        self.input_bytes = 2 if is_narrow else 4  # of a block's input: autocast leaves it as wide as the weights
        self.checkpoints = bool(known.get("gradient_checkpointing"))

    def one(self, checkpointing: bool) -> MemoryEstimate:
        """What one card needs that has the whole model, and room for it."""
        return estimate(self.task, **self.asked, **self._with(checkpointing, 1))

    def _with(self, checkpointing: bool, passes: int) -> dict[str, Any]:
        more = {"gradient_accumulation_steps": passes} if passes > 1 else {}
        kept = {name: value for name, value in self.arguments.items() if name != "gradient_accumulation_steps"}
        return kept | more | ({"gradient_checkpointing": True} if checkpointing else {})

    def layouts(self, checkpointing: bool) -> Iterator[Layout]:
        """Every layout: the model whole, as copies and in shards, then cut."""
        one = self.one(checkpointing)
        for place in self._places():
            made = replace(place, checkpointing=checkpointing)
            try:
                yield self._layout(made, one)
            except ValueError as error:
                if not made.sharing:
                    raise
                self.left_out.append(f"{made.name} was left out: {error}")

    def _places(self) -> Iterator[Layout]:
        """Layouts without figures. Tensor parallelism and experts stay in a host; with stages no more than the states
        are shared out."""
        shared = ("ZeRO 1", "ZeRO 2", "ZeRO 3") if self.sharding == "deepspeed" else ("FSDP, gathered once", "FSDP")
        divisors = [each for each in range(1, self.cards + 1) if self.cards % each == 0]
        inside = [each for each in divisors if self.cards_a_host % each == 0]
        for tensor, pipeline in itertools.product(inside, divisors):
            data, rest = divmod(self.cards, tensor * pipeline)
            is_whole = not (rest or self.model.heads % tensor or self.samples % (data * self.batch))
            if not is_whole or pipeline > max(self.model.blocks, 1):
                continue
            yield Layout(data, tensor, pipeline)
            if data > 1:
                cut = ("ZeRO 1", "FSDP") if pipeline == 1 else ("ZeRO 1",)
                for sharing in cut if tensor * pipeline > 1 else shared:
                    yield Layout(data, tensor, pipeline, sharing=sharing)
            if data > self.cards_a_host > 1 == tensor * pipeline and self.sharding == "fsdp":
                yield Layout(data, sharing="HSDP")
        for expert in inside if self.samples % (self.cards * self.batch) == 0 else ():
            if expert > 1 and self.model.experts % expert == 0:
                yield Layout(self.cards, expert=expert, sharing="FSDP")

    def _layout(self, made: Layout, one: MemoryEstimate) -> Layout:
        passes = self.samples // (made.data * self.batch)
        needed, source = self._states_alone(made, one), "states only"
        if made.is_cut:
            needed, source = self._with_allocator(self.live_bytes(made, one, passes), one), "calculated"
        elif needed <= self.room:
            needed, source = self._followed(made, passes), "traced"
        sent = self._sent(made, one, passes)
        seconds, between = min(self._seconds(made, sent, crossing, passes) for crossing in self._crossings(made))
        return replace(
            made,
            bytes_a_rank=round(needed),
            source=source,
            bytes_a_step=round(sum(sent.values())),
            bytes_between_hosts=round(between),
            seconds_a_sample=seconds / self.samples,
            fits=needed <= self.room,
        )

    # ---- memory

    def _bytes_each(self, one: MemoryEstimate, category: Category) -> float:
        """Of a parameter, in that category."""
        return max(one.memory.timeline[category]) / self.model.parameters

    def _shares(self, made: Layout) -> dict[Category, float]:
        """Which part of one card's bytes a rank has, of what can be shared out: ranks that have different experts share
        the rest, those that have the same also these."""
        part = self.model.on_a_rank(made.tensor, made.pipeline) / self.model.parameters
        ranks = self.cards_a_host if made.sharing == "HSDP" else made.data
        return {name: part / (ranks if _STAGES[made.sharing] >= stage else 1) for name, stage in _STATES.items()}

    def _states_alone(self, made: Layout, one: MemoryEstimate) -> float:
        """Bytes that every rank has at the least: of weights, gradients and optimizer states, whole or its shares."""
        copies = _WHOLE.get(made.sharing, 0) * self._weight_bytes(one) * self.model.parameters
        shared = [Category.OPTIMIZER_STATES] if copies else _STATES
        return copies + sum(self._shares(made)[name] * max(one.memory.timeline[name]) for name in shared)

    def _followed(self, made: Layout, passes: int) -> float:
        """The estimate's bytes of a rank on a card of this memory."""
        options = self._with(made.checkpointing, passes)
        if made.sharing.startswith("ZeRO"):
            zero = {"stage": _STAGES[made.sharing]}
            own = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
            halves = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
            words = {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
            options["deepspeed"] = {"zero_optimization": zero} | own | words | halves
        elif made.sharing:
            options |= {"fsdp": True, "fsdp_config": {"reshard_after_forward": made.sharing != "FSDP, gathered once"}}
        ranks = self.cards_a_host if made.sharing == "HSDP" else made.data
        options["processes"] = followed = min(ranks, MOST_FOLLOWED)
        spared = 0
        # FSDP2 cuts along the first dimension: stacked experts into as many shards as there are experts, and no more.
        if followed < ranks and (not self.model.of_experts or ranks <= self.model.experts):
            parts = estimate(self.task, **self.asked, **options).memory.breakdown
            shared = sum(parts[name] for name, stage in _STATES.items() if _STAGES[made.sharing] >= stage)
            spared = round(shared * (1 - followed / ranks))
        # A card that has so much more room decides alike.
        options["device_memory"] = max(0, round(self.room) - CONTEXT_BYTES + spared)
        return estimate(self.task, **self.asked, **options).needed_bytes(CONTEXT_BYTES) - spared

    def largest_layer(self, checkpointing: bool) -> float:
        """Bytes that a card needs for what sharding over any number of cards does not divide."""
        made, one = Layout(2**30, sharing="FSDP", checkpointing=checkpointing), self.one(checkpointing)
        return self._with_allocator(self.live_bytes(made, one, 1), one)

    def live_bytes(self, made: Layout, one: MemoryEstimate, passes: int) -> float:
        """One card's bytes, each category by its part, at the worst moment of the step: the arithmetic."""
        line = one.memory.timeline
        live = {name: np.asarray(line[name], float) for name in TENSOR_CATEGORIES}
        if passes > 1 or (made.pipeline > 1 and self.batch > 1):  # gradients of earlier passes, or samples, are there
            live[Category.GRADIENTS] = np.full_like(live[Category.GRADIENTS], live[Category.GRADIENTS].max())
        phase = np.asarray(line["phase"])
        in_blocks = np.array([bool(module) and module.startswith(self.model.prefixes) for module in line["module"]])
        activations = live[Category.ACTIVATIONS]
        of_blocks = np.minimum(activations, activations[in_blocks & (phase == "forward")].max(initial=0))
        share = _KEPT_WHOLE_IN_AUTOCAST if self.is_half and made.sharing != "FSDP" else _KEPT_WHOLE
        whole = share * of_blocks
        if self._recomputes(made):  # the blocks' inputs, which stay whole; then one block at a time
            inputs = self.model.blocks * self.batch * self.tokens * self.model.width * self.input_bytes
            whole += (1 - share) * np.minimum(of_blocks, inputs)
        of_blocks, outside = whole + (of_blocks - whole) / made.tensor, activations - of_blocks
        factors = self._shares(made)
        part = self.model.on_a_rank(made.tensor, made.pipeline, made.expert) / self.model.parameters
        factors[Category.WEIGHT_COPIES] = 0 if made.sharing == "FSDP" else part  # FSDP2's are what it gathers
        sample = 1 if made.pipeline == 1 else 1 / self.batch  # a stage takes one at a time
        factors[Category.TEMPORARIES] = np.where(phase == "step", factors[Category.OPTIMIZER_STATES], sample)
        del live[Category.ACTIVATIONS]
        kept = sum(size * factors.get(name, 1) for name, size in live.items())
        # The last stage has a sample and what is outside the blocks; the first one as many samples as there are stages.
        most = (kept + sample * (of_blocks / made.pipeline + outside)).max()
        if made.pipeline > 1:
            held = min(made.pipeline, self.batch * passes)
            first = held * sample * of_blocks / made.pipeline + kept
            # Each forward keeps its own copies of the weights for backward, where that does not make them anew.
            first += (held - 1) * part * live[Category.WEIGHT_COPIES][phase == "backward"].max(initial=0)
            most = max(most, first[in_blocks | (phase == "step")].max(initial=0))
        return most + (self._gathered(made, one) if made.data > 1 else 0)

    def _with_allocator(self, live: float, one: MemoryEstimate) -> float:
        """These bytes, with what the allocator holds beside them in proportion to one card's, and the context."""
        return live * one.needed_bytes() / one.peak_bytes + CONTEXT_BYTES

    def _gathered(self, made: Layout, one: MemoryEstimate) -> float:
        """Bytes that only several data ranks have: DDP's buckets; two blocks of weights, and what is outside blocks."""
        gradients = self._bytes_each(one, Category.GRADIENTS)
        rank = self.model.on_a_rank(made.tensor, made.pipeline, made.expert)
        if made.sharing != "FSDP":
            return gradients * rank
        block = (rank - self._outside(made)) / max(self.model.blocks, 1)
        return self._weight_bytes(one) * (2 * block + self._outside(made)) + gradients * block

    def _outside(self, made: Layout) -> float:
        """Parameters of a rank that are in no block."""
        return (self.model.parameters - self.model.inside) / made.tensor

    def _weight_bytes(self, one: MemoryEstimate) -> float:
        """Of a weight as it is gathered: accelerate has FSDP2 gather in the type that is computed in."""
        return 2 if self.is_half else self._bytes_each(one, Category.WEIGHTS)

    # ---- messages and seconds

    def _sent(self, made: Layout, one: MemoryEstimate, passes: int) -> dict[str, float]:
        """Bytes that a rank hands over for an update, by group: a ring's (N - 1) / N for a reduce-scatter or a gather,
        twice that for a sum."""
        rank = self.model.on_a_rank(made.tensor, made.pipeline, made.expert)
        gradients, weights = rank * self._bytes_each(one, Category.GRADIENTS), rank * self._weight_bytes(one)
        ranks = made.data // made.expert
        ring, sent = (ranks - 1) / ranks, {}
        half = rank * 2 if self.is_half else gradients  # FSDP2 and DeepSpeed send gradients in the type computed in
        sent["data"] = (
            ring
            * {
                "": 2 * gradients,
                "ZeRO 1": half + weights,
                "ZeRO 2": half * passes + weights,  # DeepSpeed sums after each pass
                "ZeRO 3": passes * (2 * weights + half),
                "FSDP, gathered once": passes * weights + half,
                "FSDP": 2 * passes * weights + half,
                "HSDP": 2 * passes * weights + half,
            }[made.sharing]
        )
        if made.sharing == "HSDP":
            inside, hosts = self.cards_a_host, made.data // self.cards_a_host
            sent = {"host": sent["data"] / ring * (inside - 1) / inside}
            sent["data"] = 2 * (hosts - 1) / hosts * half / inside
        tokens = self.batch * passes * self.tokens * self.model.width * self.activation_bytes
        sent["pipeline"] = 0 if made.pipeline == 1 else tokens * (2 if made.pipeline > 2 else 1)  # forward and back
        blocks = math.ceil(self.model.blocks / made.pipeline)
        again = self._recomputes(made)  # the first sum of a block is made once more
        sent["tensor"] = (5 if again else 4) * blocks * tokens * 2 * (made.tensor - 1) / made.tensor
        exchanges = 6 if again else 4  # to the experts and back, forward and backward
        sent["expert"] = exchanges * blocks * tokens * self.model.chosen * (made.expert - 1) / made.expert
        return sent

    def _crossings(self, made: Layout) -> list[set[str]]:
        """Which groups reach over hosts: the copies may be outermost, or the stages."""
        if self.cards <= self.cards_a_host:
            return [set()]
        outermost = {"data"} if made.data > 1 and made.tensor * made.pipeline <= self.cards_a_host else None
        stages = {"pipeline"} | ({"data"} if made.tensor * made.data > self.cards_a_host else set())
        stages = stages if made.pipeline > 1 else None
        return [crossing for crossing in (outermost, stages) if crossing] or [{"data", "pipeline"}]

    def _seconds(self, made: Layout, sent: dict[str, float], crossing: set[str], passes: int) -> tuple[float, float]:
        """Of an update by the model, and the bytes that leave the host."""
        samples = self.batch * passes
        operations = self._operations(made) * self.model.active * self.tokens * samples
        busy = operations / (1e12 * self.tflops) / (made.tensor * made.pipeline)
        inside, between = (gbits * 1e9 / 8 for gbits in self.links)
        travelling = {name: size / (between if name in crossing else inside) for name, size in sent.items()}
        # Gathered weights travel behind all arithmetic, gradients behind the backward of the pass that sends them.
        behind = busy if "FSDP" in made.sharing or made.sharing in ("HSDP", "ZeRO 3") else _BACKWARD * busy / passes
        behind = _BACKWARD * busy if made.sharing == "ZeRO 2" else behind
        waiting = max(0.0, travelling["data"] + travelling.get("host", 0) - behind)
        waiting += max(0.0, travelling["pipeline"] - _BACKWARD * busy) + travelling["tensor"] + travelling["expert"]
        with_bubble = busy * (samples + made.pipeline - 1) / samples
        return with_bubble + waiting, sum(sent[name] for name in crossing)

    def _recomputes(self, made: Layout) -> bool:
        """Whether the forward of blocks runs twice: as tried here, or as it was asked for."""
        return made.checkpointing or self.checkpoints

    def _operations(self, made: Layout) -> int:
        """Of a weight and token: two in forward and four in backward; two more where the forward runs twice."""
        return 8 if self._recomputes(made) else 6

    def of_seconds(self) -> str:
        """What the figures of speed stand for."""
        inside, between = self.links
        links = f"links of {between:g} Gbit/s"
        if self.cards > self.cards_a_host:
            links = f"{inside:g} Gbit/s inside a host, {between:g} between hosts"
        return (
            f"Speed is a model, not a measurement: {self.tflops:g} TFLOPS per card, {links}, {self.samples} samples "
            "per update. Sending weights overlaps with all computation, gradients with their backward pass, sums of "
            "tensor parallelism and tokens for experts with nothing; the pipeline's bubble is included."
        )

    def of_links(self, chosen: Layout) -> Iterator[str]:
        """Where the weights that FSDP gathers take longer than what is computed with them, by the same model."""
        if chosen.sharing == "FSDP":
            gathered = 2 * self.activation_bytes / (self.links[1] * 1e9 / 8)  # seconds a weight and pass
            least = gathered * 1e12 * self.tflops / self._operations(chosen)
            text = f"With fewer than {math.ceil(least):,} tokens per card and pass FSDP waits for its link"
            yield f"{text}; here there are {self.batch * self.tokens:,}."
