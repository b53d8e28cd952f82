"""Find the device that a training must fit, for the advisor: its kind, its memory, and how much of it is kept free."""

from dataclasses import dataclass

from trainmem.cards import CONTEXT_BYTES, CONTEXT_SOURCE, DEFAULT_CAPABILITY, MARGIN, SIZES
from trainmem.core import hardware
from trainmem.texts import bytes_text, parse_bytes, shown

_AS_SOLD = {*SIZES.values(), *(round(size / 2**30) * 10**9 for size in SIZES.values())}  # bytes: "80GB" may mean either


@dataclass(frozen=True, slots=True)
class Target:
    """Hold a device's kind and compute capability, the bytes of its memory, and the bytes that a training may use."""

    kind: str  # "cpu" or "cuda"
    capability: tuple[int, int] | None  # compute capability; None: a CPU
    memory_bytes: int
    context_bytes: int  # kept for the CUDA context
    margin_bytes: int  # kept free for what an estimate cannot predict
    notes: tuple[str, ...]  # assumptions about the device, one sentence each
    kept: tuple[str, str]  # for the advice's notes: what the bytes under "needs" include; what is kept free

    def size_text(self, size: int) -> str:
        """Return a number of bytes as text: in GiB for a GPU, the unit of a GPU's memory; otherwise in GB."""
        return bytes_text(size, binary=self.kind == "cuda")

    @property
    def room_bytes(self) -> int:
        """Bytes that a training and the CUDA context may take together: the device's memory minus `margin_bytes`."""
        return self.memory_bytes - self.margin_bytes

    @property
    def allocator_bytes(self) -> int | None:
        """The bytes that torch's caching allocator may reserve; None for a CPU, which has no such limit."""
        return max(self.room_bytes - self.context_bytes, 0) if self.kind == "cuda" else None


def find(
    machine: hardware.Machine,
    memory_bytes: int,
    named: tuple[int, int] | None,
    device: str | None,
    context_memory: int | float | str | None,
    margin: float,
    processes: int,
) -> Target:
    """Return the device to advise for, from the arguments of `advise` and from this machine.

    Args:
        machine: this machine.
        memory_bytes: bytes of the device's memory.
        named: compute capability of the GPU that the user named; None: that of this machine's GPU, otherwise 9.0.
        device: "cpu" or "cuda"; None: this machine's kind of device. On a machine without a GPU, None means "cuda" if
            `named` is given, or if GPUs are sold with `memory_bytes`.
        context_memory: bytes to keep for the CUDA context, or a text such as "450MiB"; None: the usual size.
        margin: fraction of the memory to keep free.
        processes: number of ranks, one device each.

    Raises:
        ValueError: an unknown device, an invalid context memory, or a margin outside 0 to 1.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin={shown(margin)}: give a fraction of the memory below 1, e.g. {MARGIN}")
    kind, notes = machine.kind if device is None else device, ()
    if device is None and machine.kind == "cpu" and (named or memory_bytes in _AS_SOLD):
        kind = "cuda"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={shown(device)}: choose 'cpu' or 'cuda'")
    here = machine.gpus[0].capability if machine.kind == kind == "cuda" else None
    if kind == "cuda" and not (named or here):
        why = f", because GPUs are sold with {bytes_text(memory_bytes, binary=True)} (device='cpu' means this CPU)"
        sold = "" if device else why
        notes = (f"Assumed a GPU{sold}, of compute capability 9.0 like an H100. card= names another.",)
    capability = tuple(named or here or DEFAULT_CAPABILITY) if kind == "cuda" else None
    context, needs = _kept_for_context(context_memory, kind, processes)
    free = round(memory_bytes * margin)
    size = bytes_text(free, binary=kind == "cuda")
    kept = f"{margin:.0%} of the memory, {size}, is kept free for what an estimate cannot predict."
    return Target(kind, capability, memory_bytes, context, free, notes, (needs, kept))


def _kept_for_context(given: int | float | str | None, kind: str, processes: int) -> tuple[int, str]:
    """Return (bytes kept for the CUDA context, a note on what the advice's column "needs" includes).

    `given`: the user's `context_memory`. Raises ValueError if it is no number of bytes, or if it is given for a CPU.
    """
    if kind == "cpu":
        if given is not None:
            raise ValueError(f"context_memory={shown(given)}: a CPU has no CUDA context, so leave it out")
        return 0, "'needs' is the memory of tensors: the interpreter and its libraries need additional memory."
    context, source = CONTEXT_BYTES, CONTEXT_SOURCE
    if given is not None:
        context, source = parse_bytes(given, "context_memory", 0), "as given"
    reserved = "'needs' is what the allocator reserves, fragmentation included"
    note = f"{reserved}, plus {context / 2**20:,.0f} MiB for the CUDA context ({source})."
    return context, note + (" NCCL's buffers need additional memory." if processes > 1 else "")
