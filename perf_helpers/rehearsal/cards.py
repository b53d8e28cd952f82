"""The cards that can be rehearsed: what they are, and the environment variables that say so to the stand-in."""

from dataclasses import dataclass

from perf_helpers.texts import nearest_text, parse_bytes

CONTEXT_BYTES = 500 << 20  # assumed: drivers and loaded kernels vary two to three times


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU, and how many of them the machine has."""

    name: str  # as people call it
    capability: tuple[int, int]  # compute capability: (9, 0) for an H100
    memory_bytes: int  # what torch can have of it: `total_memory` of its properties
    devices: int = 1
    context_bytes: int = CONTEXT_BYTES  # what a process takes of it before its first tensor; assumed

    def variables(self, ledger: str) -> dict[str, str]:
        """What native/device.h reads; `ledger` is the file that the processes of one rehearsal share."""
        return {
            "REHEARSAL_CAPABILITY": "{}{}".format(*self.capability),
            "REHEARSAL_BYTES": str(self.memory_bytes),
            "REHEARSAL_CONTEXT_BYTES": str(self.context_bytes),
            "REHEARSAL_DEVICES": str(self.devices),
            "REHEARSAL_NAME": f"rehearsed {self.name}",
            "REHEARSAL_LEDGER": ledger,
        }


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
    known = None if name is None else CARDS.get(name.lower())
    if known is None and name is not None:
        raise ValueError(f"no card {name!r}. {nearest_text(name.lower(), CARDS)}")
    capability = tuple(compute_capability or known.capability)
    if not (7, 0) <= capability < (13, 0):
        raise ValueError("compute capability {}.{}: there are 7.0 to 12.x".format(*capability))
    memory_bytes = known.memory_bytes if device_memory is None else parse_bytes(device_memory)
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= 16:
        raise ValueError(f"devices={devices!r}: give a whole number from 1 to 16")
    described = "GPU of compute capability {}.{}, {:.3g} GB".format(*capability, memory_bytes / 1e9)
    return Card(known.name if known else described, capability, memory_bytes, devices)
