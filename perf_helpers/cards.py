"""Kinds of GPU, whether one is here or not: their memory, their compute capability, and what a CUDA context takes."""

from dataclasses import dataclass

from perf_helpers.texts import nearest_text, parse_bytes, whole_number

# What is taken for the CUDA context where nobody says otherwise: enough for 15 of the 19 processes of which published
# out-of-memory messages tell it: 120 to 1239 MiB, the 8 of them on RTX 4090, RTX 6000 Ada, L40S and A100 409 to 521
# (benchmarks/contexts.toml). It differs by driver, CUDA, card and the kernels in use.
CONTEXT_BYTES = 530 << 20
CONTEXT_SOURCE = "enough for 15 of 19 processes in published out-of-memory messages, of which they took 120 to 1239"
# Of a card's memory, that is kept free for what no estimate follows: longer samples, a communicator's buffers, a larger
# context. From 16 GB on it covers, with CONTEXT_BYTES, the largest of those 19 contexts.
MARGIN = 0.05
DEFAULT_CAPABILITY = (9, 0)  # the GPU that is meant where none is named and none is there: an H100


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU, and how many of them the machine has."""

    name: str  # as people call it
    capability: tuple[int, int]  # compute capability: (9, 0) for an H100
    memory_bytes: int  # what torch can have of it: `total_memory` of its properties
    devices: int = 1
    context_bytes: int = CONTEXT_BYTES  # what a process takes of it before its first tensor; assumed


# Memory: the total capacity in torch's out-of-memory messages, in GiB; the least of them where drivers differ.
CARDS = {
    "t4": Card("T4 16 GB", (7, 5), int(14.56 * 2**30)),
    "v100": Card("V100 16 GB", (7, 0), int(15.77 * 2**30)),
    "a10g": Card("A10G 24 GB", (8, 6), int(22.06 * 2**30)),
    "4090": Card("RTX 4090 24 GB", (8, 9), int(23.64 * 2**30)),
    "a100-40": Card("A100 40 GB", (8, 0), int(39.39 * 2**30)),
    "a100": Card("A100 80 GB", (8, 0), int(79.14 * 2**30)),
    "h100": Card("H100 80 GB", (9, 0), int(79.1 * 2**30)),
}
SIZES = {f"{size} GB": size * 2**30 for size in (8, 16, 24, 40, 80, 141)}  # as they are sold: 8 GB are 8 * 2^30 bytes


def context_bytes(compute_capability: tuple[int, int]) -> int | None:
    """Bytes of the CUDA context, which the device holds outside of the allocator; None where nobody has published or
    measured it. It depends on driver, CUDA and the kernels loaded. The one figure known is 1343 MiB on a V100 in "Model
    training anatomy" of transformers' documentation, taken there with one segment of 2 MiB."""
    return 1341 << 20 if compute_capability == (7, 0) else None


def card(
    name: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | float | str | None = None,
    devices: int = 1,
) -> Card:
    """The card of that name, or any that a compute capability and a memory describe; they overrule the named one's.

    Raises:
        ValueError: an unknown name, a capability that this torch has no kernels for, a memory that is none.
    """
    if name is None and (compute_capability is None or device_memory is None):
        raise ValueError(f"name a card ({', '.join(CARDS)}), or a compute capability and a memory")
    known = None if name is None else named(name)
    memory_bytes, its_capability = memory_of_card(name, device_memory, compute_capability)
    capability = tuple(its_capability)
    if not (7, 0) <= capability < (13, 0):
        raise ValueError("compute capability {}.{}: there are 7.0 to 12.x".format(*capability))
    if whole_number("devices", devices) > 16:
        raise ValueError(f"devices={devices!r}: give a whole number from 1 to 16")
    described = "GPU of compute capability {}.{}, {:.3g} GB".format(*capability, memory_bytes / 1e9)
    return Card(known.name if known else described, capability, memory_bytes, devices)


def named(name: str) -> Card:
    """The card that people call so. ValueError: there is none of that name."""
    if name.lower() not in CARDS:
        raise ValueError(f"no card {name!r}. {nearest_text(name.lower(), CARDS)}")
    return CARDS[name.lower()]


def memory_of_card(
    name: str | None, memory: int | float | str | None, capability: tuple[int, int] | None, argument: str = "memory"
) -> tuple[int, tuple[int, int] | None]:
    """Bytes and compute capability of a named card; a memory (called `argument`) and a capability overrule its own.

    Raises:
        ValueError: an unknown name, a memory that is none, or neither of them.
    """
    if name is None and memory is None:
        raise ValueError(f"{argument}=None: give bytes or a text such as '16GB', or name a card: {', '.join(CARDS)}")
    known = named(name) if name is not None else None
    size = known.memory_bytes if memory is None else parse_bytes(memory, argument)
    return size, capability or (known.capability if known else None)
