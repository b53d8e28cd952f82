"""The options of torch's caching allocator, as PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF name them.

Covers those that decide about the device's memory. Not covered: what they do (`allocator`).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from perf_helpers.texts import nearest_text


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF, that decide about the device's memory.

    Names, defaults and limits are those of torch 2.13 (c10/core/AllocatorConfig, c10/cuda/CUDAAllocatorConfig).
    """

    expandable_segments: bool = False  # segments that grow, instead of one segment after the other
    max_split_size_mb: int | None = None  # blocks of so many MiB are not split; None: all are
    max_non_split_rounding_mb: int | None = None  # how much larger such a block may be; None: large_segment_size_mb
    large_segment_size_mb: int = 20  # the segment for more than 1 MiB and less than 10 MiB
    # Steps between two powers of two that sizes are rounded up to: entry i is for 2**i to 2**(i+1) MiB, the first for
    # all that is smaller, the last for all that is larger. 0 and 1: none.
    roundup_power2_divisions: tuple[int, ...] = (0,) * 16

    def __post_init__(self):
        self._check(self.large_segment_size_mb > 10, "large_segment_size_mb", "a number of MiB above 10")
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            least, size = self.large_segment_size_mb, getattr(self, name)
            self._check(size is None or size >= least, name, f"a number of MiB from {least} on")
        powers = all(step >= 0 and step & (step - 1) == 0 for step in self.roundup_power2_divisions)
        whole = powers and len(self.roundup_power2_divisions) == 16
        self._check(whole, "roundup_power2_divisions", "16 powers of two, or 0")

    def _check(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: give {wanted}")

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """The settings that such a variable describes: `Settings.parse("max_split_size_mb:128")`.

        Raises:
            ValueError: an option that torch does not know or that is not followed, a value that torch refuses, another
                allocator than torch's own.
        """
        words = _words("".join(text.split()))
        for name in words.keys() & _NOT_FOLLOWED.keys():
            raise ValueError(f"{name} is not followed: {_NOT_FOLLOWED[name]}")
        known = {one.name for one in fields(cls)}
        for name in words.keys() - known - _ELSEWHERE:
            raise ValueError(f"no option {name!r} in {text!r}. {nearest_text(name, sorted(known | _ELSEWHERE))}")
        if words.get("backend", "native") != "native":
            raise ValueError(f"backend:{words['backend']} is another allocator than the one that is followed here")
        return cls(**{name: _PARSERS[name](name, value) for name, value in words.items() if name in known})


# Options of memory of the host, of locks and of CUDA graphs; the choice of the allocator itself; and what is done only
# under a fraction of the card's memory.
_ELSEWHERE = {
    *("backend", "garbage_collection_threshold", "graph_capture_record_stream_reuse", "pinned_free_catch_all"),
    *("pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads"),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register"),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc"),
}

# They ask for the bytes of the whole card, which an estimate is not told.
_NOT_FOLLOWED = {
    "per_process_memory_fraction": "give device_memory= as many bytes as it allows",
    "throw_on_cudamalloc_oom": "leave it out; it decides only where the card is full",
}


def _words(text: str) -> dict[str, str]:
    """`name:value` by name; a comma inside of brackets separates nothing."""
    found, depth, begin = [], 0, 0
    for place, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            found.append(text[begin:place])
            begin = place + 1
    words = {}
    for word in filter(None, found):
        name, colon, value = word.partition(":")
        if not colon or not value:
            raise ValueError(f"{word!r} is no option: write name:value, with commas between, as max_split_size_mb:128")
        words[name] = value
    return words


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}:{value}: give a whole number") from None


def _truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name}:{value}: give True or False")
    return value == "True"


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """One number for all sizes; or, for each interval from that many MiB on, one of its own. torch leaves the intervals
    that lie between two named ones alone."""
    if not value.startswith("["):
        if not value.isdecimal() or int(value).bit_count() != 1:
            raise ValueError(f"{name}:{value}: give a power of two, or intervals as in [256:1,>:4]")
        return (int(value),) * 16
    divisions, last = [0] * 16, None
    for entry in value.strip("[]").split(","):
        where, _, steps = entry.partition(":")
        sizes = where == ">" or (where.isdecimal() and int(where).bit_count() == 1)
        if not sizes or not steps.isdecimal() or int(steps).bit_count() > 1:
            raise ValueError(f"{name}:{value}: {entry!r} is no power of two of MiB, a colon and a power of two, or 0")
        if where == ">":
            begin = 1 if last is None else last + 1
            divisions[begin:] = [int(steps)] * (16 - begin)
            continue
        here = min(int(where).bit_length() - 1, 15)
        if last is None:
            divisions[:here] = [int(steps)] * here
        divisions[here] = int(steps)
        last = here
    return tuple(divisions)


_PARSERS: dict[str, Callable] = {
    "expandable_segments": _truth,
    "max_split_size_mb": _number,
    "max_non_split_rounding_mb": _number,
    "large_segment_size_mb": _number,
    "roundup_power2_divisions": _divisions,
}
