"""Define an estimate's device (`Device`) and result (`MemoryEstimate`), and whether a training fits a card (`Fits`)."""

from dataclasses import asdict, dataclass
from typing import Any

from trainmem import cards
from trainmem.estimate.allocator_settings import Release
from trainmem.records import Memory
from trainmem.texts import bytes_text
from trainmem.unknown import Unknown


@dataclass(frozen=True, slots=True)
class Device:
    """Describe the device whose memory is estimated: kind and, for a GPU, capability, memory in bytes, allocator."""

    kind: str  # "cpu", where memory is counted, or "cuda", where `cuda.PARTS` model it
    compute_capability: tuple[int, int] = cards.DEFAULT_CAPABILITY  # of the GPU
    settings: str = ""  # of torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF
    memory_bytes: int | None = None  # memory that the card has for segments; None: no limit
    rules: Release | None = None  # of torch's allocator; None: the installed release's


@dataclass(frozen=True, slots=True)
class Fits:
    """Hold whether a training fits a card, with the bytes needed.

    `bool` returns the answer; if the answer is unknown, `bool` raises `unknown.NeedsValues` with the reason.
    """

    what: str  # the estimate's name
    card: cards.Card
    answer: bool | Unknown
    needed_bytes: int  # the allocator's reserved bytes plus the context
    context_bytes: int  # the context's part of them, assumed

    def __bool__(self) -> bool:
        return bool(self.answer)

    def to_dict(self) -> dict[str, Any]:
        answer = None if isinstance(self.answer, Unknown) else self.answer
        limit = {"limit_bytes": self.card.limit_bytes, "text": repr(self)}
        return {"fits": answer, "needed_bytes": self.needed_bytes} | limit

    def __repr__(self) -> str:
        """Return one sentence with the bytes needed, the bytes of the card, and the margin."""
        why = self.answer.why if isinstance(self.answer, Unknown) else ""
        answer = "it is UNKNOWN whether it fits" if why else "fits" if self.answer else "does not fit"
        context = f" (including {bytes_text(self.context_bytes, True)} assumed for the CUDA context)" * bool(
            self.context_bytes
        )
        kind = "board" if self.card.is_board else "card"
        sizes = (self.needed_bytes, self.card.memory_bytes, self.card.limit_bytes)
        needed, total, limit = (bytes_text(size, binary=True) for size in sizes)
        text = f"{self.what}: {answer} the {self.card.name}: it needs {needed}{context}"
        board = f" and the {1 - cards.OF_BOARD:.0%} that torch may be unable to use" * self.card.is_board
        text += f"; the {kind} has {total}, {limit} after a safety margin of {cards.MARGIN:.0%}{board}"
        return text + f"; {why}" * bool(why)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Hold an estimate: peak memory in bytes, and assumptions; `fits` tells whether the training fits a card."""

    name: str  # in tables and pictures
    task: dict[str, Any]  # see `Task.to_dict`
    arguments: dict[str, Any]  # training arguments, as the caller gave them
    device: str  # "cpu" or "cuda"
    memory: Memory  # with the same fields, in bytes, as that of a measured run
    assumptions: tuple[str, ...]  # what was modelled or left out, one sentence each
    seconds: float  # time that the estimate took
    own_bytes: int | None  # peak memory of the process that made it
    processes: int = 1  # ranks of the training; the figures are those of one rank
    is_too_large: bool = False  # whether it exceeds `device_memory`; the figures are then those without a limit
    attention: tuple[str, ...] = ()  # its fused kernels, e.g. "flash"; empty: attention is plain
    compute_capability: tuple[int, int] | None = None  # the requested one; None on a CPU
    device_memory: int | None = None  # the requested bytes for the allocator; None: no limit
    torch_rules: str | None = None  # the torch release whose rules of CUDA's memory were used; None on a CPU
    untested_torch: str | None = None  # the newer release that they were used for; None: the rules are its own
    weights: str | None = None  # their type and what decided it, e.g. "weights in bfloat16 (config.json)"

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def needed_bytes(self, context_bytes: int = 0) -> int:
        """Return the bytes that the device must have for the training.

        The bytes are the reserved bytes (if unknown, the peak) plus, on CUDA, the context.

        Args:
            context_bytes: bytes of the CUDA context, used if the estimate does not know them.
        """
        reserved = max(self.memory.reserved_bytes or 0, self.memory.peak_bytes)
        return reserved + (self.memory.context_bytes or (context_bytes if self.device == "cuda" else 0))

    def fits(self, card: str | cards.Card) -> Fits:
        """Return whether the training fits a card and leaves `cards.MARGIN` of its memory free.

        The answer is unknown if the training fits only without the margin, or if the estimate was made for another
        compute capability than the card's, because attention kernels and workspaces depend on the compute capability.

        Args:
            card: a card, or its name in `cards.CARDS`.

        Raises:
            ValueError: an unknown card.
        """
        card = cards.named(card) if isinstance(card, str) else card
        context = (self.memory.context_bytes or card.context_bytes) * (self.device == "cuda")
        needed, memory = self.needed_bytes(context), card.memory_bytes
        if self.compute_capability != card.capability:
            where = "the {}.{}".format(*card.capability) + f" of the {card.name}"
            made = "a CPU" if self.device == "cpu" else "compute capability {}.{}".format(*self.compute_capability)
            answer = Unknown(f"this was estimated for {made}, not for {where}: use estimate(..., card={card.name!r})")
        elif self.peak_bytes + context > memory or (self.is_too_large and self.device_memory >= memory - context):
            answer = False
        elif needed > card.limit_bytes:
            answer = Unknown("it fits only without the margin, or only if the allocator frees cached segments")
        else:
            answer = True
        return Fits(self.name, card, answer, needed, context)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        peak = bytes_text(self.peak_bytes, binary=self.device == "cuda")
        return f"{self.name}: estimated peak {peak} on {self.device}"
