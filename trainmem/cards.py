"""List GPU models with their memory, compute capability and CUDA context. This machine need not have them."""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from trainmem.texts import arguments_of_kind, nearest_text, of_kind, parse_bytes, shown, whole_number

# Default size of the CUDA context. It is enough for 15 of the 19 processes in published out-of-memory messages, which
# report 120 to 1239 MiB; the 8 on RTX 4090, RTX 6000 Ada, L40S and A100 report 409 to 521 (benchmarks/contexts.toml).
# The size differs by driver, CUDA, card and the kernels in use.
CONTEXT_BYTES = 530 << 20
CONTEXT_SOURCE = "enough for 15 of 19 contexts in published out-of-memory messages: they took 120 to 1239 MiB"
# Share of a card's memory that is kept free for what no estimate covers: longer samples, a communicator's buffers, a
# larger context. From 16 GiB on, this and CONTEXT_BYTES together cover the largest of those 19 contexts.
MARGIN = 0.05
DEFAULT_CAPABILITY = (9, 0)  # an H100's: used if no GPU is named and this machine has none


@dataclass(frozen=True, slots=True)
class Card:
    """Hold a GPU model's name, compute capability, memory, size of the CUDA context, and the number of such GPUs."""

    name: str  # as people write it
    capability: tuple[int, int]  # compute capability: (9, 0) for an H100
    memory_bytes: int  # usable by torch (`total_memory` of the device properties), unless `is_board`
    devices: int = 1
    context_bytes: int = CONTEXT_BYTES  # assumed size of the CUDA context, which exists before the first tensor
    is_board: bool = False  # whether `memory_bytes` is the whole board's, of which torch can use only `OF_BOARD`

    @property
    def limit_bytes(self) -> int:
        """The bytes that a training may use: 95% of the card's memory, because `MARGIN` is kept free.

        If `memory_bytes` is the memory of the whole board (`is_board`), torch can use only a part of it (`OF_BOARD`),
        and a training may use 95% of this part.
        """
        return int((1 - MARGIN) * self.memory_bytes * (OF_BOARD if self.is_board else 1))


OF_BOARD = 0.94  # the smallest usable share that we found: 7753 of 8192 MiB, an RTX 3070 under Linux
# Parts of a name that do not identify the card: maker, product lines, sockets. "NVIDIA A100-SXM4-80GB" is "a10080".
_NO_NAME = re.compile(
    r"nvidia|geforce|tesla|quadro|rtx|gtx|generation|\b(gpu|sxm\d?|pcie|hbm\d?e?)\b|(?<=\d)\s*gi?b|[^a-z0-9]"
)


def _plain(name: str) -> str:
    """Return the parts of a card's name that identify it, for comparisons: "a10080" for "NVIDIA A100-SXM4-80GB"."""
    return _NO_NAME.sub("", re.sub(r"[-_]+", " ", name.lower()))


_KNOWN = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
CARDS = {
    key: Card(it["name"], (*it["capability"],), parse_bytes(it["memory"]), is_board=it.get("board", False))
    for key, it in _KNOWN.items()
}
# Keys of `CARDS` by the names that `_plain` returns for "4090", "RTX 4090 24 GiB" and "RTX 4090 24 GB".
_BY_NAME = {_plain(word): key for key, entry in _KNOWN.items() for word in (key, entry["name"], *entry.get("also", ()))}
SIZES = {f"{size} GiB": size * 2**30 for size in (8, 16, 24, 40, 80, 141)}  # sold as "8 GB": 8 * 2^30 bytes


def context_bytes(compute_capability: tuple[int, int]) -> int | None:
    """Return the bytes of the CUDA context, which is outside of torch's allocator; None if they are not known.

    The bytes depend on driver, CUDA and the loaded kernels. V100: 1341 MiB, that is the 1343 MiB in "Model training
    anatomy" of transformers' documentation, minus a segment of 2 MiB of torch's allocator. H100: 767 MiB in 16 bits,
    which is returned, and 751 MiB in fp32. The GPU suite (docs/gpu-suite.md) measured both with driver 580, CUDA 13.0.
    """
    return {(7, 0): 1341 << 20, (9, 0): 767 << 20}.get(compute_capability)


def card(
    name: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | float | str | None = None,
    devices: int = 1,
) -> Card:
    """Return a named card, or a card of a given compute capability and memory.

    Args:
        name: a name of `CARDS`, as people, torch or nvidia-smi write it; None: the next two arguments describe the
            card.
        compute_capability: e.g. (9, 0) for an H100; None: the named card's.
        device_memory: bytes, or a text such as "16GB"; None: the named card's.
        devices: number of such GPUs, at most 16.

    Raises:
        ValueError: an unknown name, an unsupported compute capability, an invalid memory, or a missing argument.
    """
    arguments_of_kind(card, locals())
    if name is None and (compute_capability is None or device_memory is None):
        raise ValueError("no GPU is named: give a card, e.g. t4 or h100, or a compute capability and a memory")
    memory_bytes, capability = memory_of_card(name, device_memory, compute_capability)
    check_capability(capability := tuple(capability))
    whole_number("devices", devices, most=16)
    if name is not None and device_memory is None:
        return replace(named(name), capability=capability, devices=devices)
    described = "GPU of compute capability {}.{}, {:.3g} GiB".format(*capability, memory_bytes / 2**30)
    return Card(described if name is None else named(name).name, capability, memory_bytes, devices)


def check_capability(capability: tuple[int, int]) -> None:
    """Raise ValueError if no supported GPU has this compute capability."""
    if not (7, 0) <= capability < (13, 0):
        raise ValueError("compute capability {}.{} is not supported: give one from 7.0 to 12.x".format(*capability))


def named(name: str) -> Card:
    """Return the card called `name`, as people, torch or nvidia-smi spell it; raise ValueError for an unknown name."""
    of_kind("card", name, str)
    key = _BY_NAME.get(_plain(name))
    if key is None:
        raise ValueError(f"card={shown(name)} is unknown. {nearest_text(_plain(name) or name, CARDS)}")
    return CARDS[key]


def memory_of_card(
    name: str | None, memory: int | float | str | None, capability: tuple[int, int] | None, argument: str = "memory"
) -> tuple[int, tuple[int, int] | None]:
    """Return the memory in bytes and the compute capability of a card.

    Args:
        name: the card's name, see `card`; None: `memory` and `capability` describe it.
        memory: bytes, or a text such as "16GB"; None: the named card's.
        capability: compute capability, which is returned as it is; None: the named card's, or None without a name.
        argument: the name of `memory` in error messages.

    Raises:
        ValueError: an unknown name, an invalid memory, or neither a name nor a memory.
    """
    if name is None and memory is None:
        raise ValueError(f"{argument}=None: give bytes or a text such as '16GB', or a card, e.g. t4, a100 or h100")
    known = named(name) if name is not None else None
    size = known.memory_bytes if memory is None else parse_bytes(memory, argument)
    return size, capability or (known.capability if known else None)
