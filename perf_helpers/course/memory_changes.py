"""The memory of a run then and now: every byte that moved, by category, and the operation at the peak.

Memory is counted (on a CPU) or told by torch's allocator (on CUDA) and has no noise: where the code is the same, so is
every byte. What the system tells, resident memory or that of a whole device, is left out.
"""

from perf_helpers.records import Memory
from perf_helpers.texts import bytes_text, name_text


def moved(old: Memory, new: Memory) -> tuple[str, bool | None] | None:
    """What differs between a run's memory then and now, in words; and whether it is worse: True where the peak, what is
    reserved, or what is held after a phase grew, False where it shrank, None where only the parts moved. None: nothing
    differs."""
    parts = [
        _total("peak", old.peak_bytes, new.peak_bytes, _parts(old.breakdown, new.breakdown)),
        _place(old, new),
        _total("reserved", old.reserved_bytes, new.reserved_bytes, ""),
        *_phases(old, new),
    ]
    sizes = [(old.peak_bytes, new.peak_bytes), (old.reserved_bytes, new.reserved_bytes)]
    sizes += [((old.phases or {}).get(phase), size) for phase, size in (new.phases or {}).items()]
    growth = next((b > a for a, b in sizes if a is not None and b is not None and a != b), None)
    text = "; ".join(filter(None, parts))
    return (text, growth) if text else None


def _total(name: str, old: int | None, new: int | None, parts: str) -> str:
    """One figure that moved, with the categories that moved it; empty if neither did."""
    if old != new and old is not None and new is not None:
        head = f"{name} {bytes_text(old)} -> {bytes_text(new)} ({new - old:+,} B)"
        return f"{head}: {parts}" if parts else head
    return f"{name} the same, of other parts: {parts}" if parts else ""


def _parts(old: dict[str, int] | None, new: dict[str, int] | None) -> str:
    """The categories that moved, the largest change first; empty where there is no breakdown of both."""
    if not old or not new:
        return ""
    changes = {name: new.get(name, 0) - old.get(name, 0) for name in {**old, **new}}
    largest = sorted((name for name in changes if changes[name]), key=lambda name: -abs(changes[name]))
    return ", ".join(f"{name_text(name)} {changes[name]:+,} B" for name in largest)


def _place(old: Memory, new: Memory) -> str:
    """Where the peak is, and where it was; empty where both memories are the same, and so is the place."""
    here, there = (_operation(memory) for memory in (new, old))
    if not here or (here == there and old.peak_bytes == new.peak_bytes):
        return ""
    return f"at {here}" + (f", before at {there}" if there and there != here else "")


def _operation(memory: Memory) -> str:
    where = f" of {memory.peak_module}" if memory.peak_module else ""
    return f"{memory.peak_operation}{where} ({memory.peak_phase})" if memory.peak_operation else ""


def _phases(old: Memory, new: Memory) -> list[str]:
    """What is held at the end of each phase, where that moved: a leak shows after the step."""
    lines = []
    for phase, size in (new.phases or {}).items():
        before = (old.phases or {}).get(phase, size)
        parts = [(memory.phase_breakdowns or {}).get(phase) for memory in (old, new)]
        lines.append(_total(f"after {phase}", before, size, _parts(*parts)))
    return [line for line in lines if line]
