"""Parse the options of torch's caching allocator (PYTORCH_CUDA_ALLOC_CONF), and list how torch's releases differ.

Covers the options that affect the device's memory; `allocator` applies them. Torch reads only one of two variables:
PYTORCH_CUDA_ALLOC_CONF if it is set, even to an empty text, otherwise PYTORCH_ALLOC_CONF (seen in rehearsals of 2.13,
2.14 and 2.15).
"""

import functools
import importlib.metadata
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainmem.texts import nearest_text, shown


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the options of PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF, that affect the device's memory.

    Names, defaults and limits are those of torch 2.15 (c10/core/AllocatorConfig, c10/cuda/CUDAAllocatorConfig).
    """

    expandable_segments: bool = False  # whether segments grow, instead of more segments being added
    expandable_segments_reserve: float | None = None  # GiB of addresses per segment; None: 9/8 of the card's memory
    max_split_size_mb: int | None = None  # blocks of at least this many MiB are not split; None: all are
    max_non_split_rounding_mb: int | None = None  # how much larger such a block may be; None: large_segment_size_mb
    large_segment_size_mb: int = 20  # size of the segment for requests of more than 1 MiB and less than 10 MiB
    # Sizes are rounded up to this many steps between two powers of two: entry i is for 2**i to 2**(i+1) MiB, the first
    # also for all smaller sizes, the last for all larger ones. 0 and 1: no rounding.
    roundup_power2_divisions: tuple[int, ...] = (0,) * 16

    def __post_init__(self):
        least = self.large_segment_size_mb
        if least <= 10:
            raise ValueError(f"large_segment_size_mb:{least}: give more than 10 MiB")
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            if (size := getattr(self, name)) is not None and size < least:
                raise ValueError(f"{name}:{size}: give at least {least} MiB")

    @classmethod
    def parse(cls, text: str, torch_version: str | None = None) -> "Settings":
        """Return the settings in a value of PYTORCH_CUDA_ALLOC_CONF, e.g. "max_split_size_mb:128".

        Args:
            torch_version: the torch release that will read the value, e.g. "2.13"; None: accept any release's options.

        Raises:
            ValueError: an option that no torch release has, or that `torch_version` lacks; an option or an allocator
                `backend` that is not supported here; or a value that torch refuses.
        """
        words = _words("".join(text.split()))
        for name in words.keys() & _UNSUPPORTED.keys():
            raise ValueError(f"{name} is not supported: {_UNSUPPORTED[name]}")
        for name in words.keys() - _READERS.keys() - _ELSEWHERE:
            options = sorted(_READERS.keys() | _ELSEWHERE)
            raise ValueError(f"allocator_settings: unknown option {shown(name)}. {nearest_text(name, options)}")
        for name in words.keys() & _SINCE.keys():
            if torch_version is not None and _number(torch_version) < _number(_SINCE[name]):
                since = f"torch {_SINCE[name]} introduced it, and {torch_version} rejects it"
                raise ValueError(f"{name}: {since}. Leave it out, or choose a newer torch_version")
        if words.get("backend", "native") != "native":
            raise ValueError(f"backend:{words['backend']} is not supported: leave it out, for torch's native allocator")
        read = {name: _read(name, value) for name, value in words.items() if name in _READERS}
        if not read.get("expandable_segments"):
            read.pop("expandable_segments_reserve", None)
        elif read.get("expandable_segments_reserve") == _SHARE_OF_CARD:
            raise ValueError(
                "expandable_segments_reserve as a share of the card is not supported, because an estimate does not "
                "know the card's whole memory: give GiB, e.g. expandable_segments_reserve:40G"
            )
        return cls(**read)


# Valid options without an effect here: for the host's memory, locks and CUDA graphs; the choice of the allocator; those
# that apply only under a fraction of the card's memory; and addresses for classes of streams, which only C++ assigns.
_ELSEWHERE = {
    *("expandable_segments_reserve_by_class", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"),
    *("backend", "garbage_collection_threshold", "graph_capture_record_stream_reuse", "pinned_free_catch_all"),
    *("pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads"),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register"),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc"),
}

# Options that some known releases lack, with the first release that has them. An older one raises ValueError at the
# first use of CUDA: "Unrecognized key ... in CUDA allocator config". (2.13 is the oldest tried with its two.)
_SINCE = {
    "expandable_segments_reserve": "2.15",
    "expandable_segments_reserve_by_class": "2.15",
    "pinned_max_cached_size_mb": "2.13",
    "pinned_max_round_threshold_mb": "2.13",
}

# They depend on the whole card's bytes, which an estimate does not know.
_UNSUPPORTED = {
    "per_process_memory_fraction": "give device_memory= the bytes that it allows instead",
    "throw_on_cudamalloc_oom": "leave it out, it matters only if the card is full",
}


def _words(text: str) -> dict[str, str]:
    """Return {name: value} for a text of `name:value` pairs; raise ValueError for a pair without colon or value."""
    words = {}
    for word in filter(None, re.split(r",(?![^[]*\])", text)):  # commas inside brackets do not separate pairs
        name, colon, value = word.partition(":")
        if not colon or not value:
            example = "give name:value pairs, separated by commas, e.g. max_split_size_mb:128"
            raise ValueError(f"allocator_settings={shown(word)} is not an option: {example}")
        words[name] = value
    return words


def _divisions(value: str) -> tuple[int, ...]:
    """Return `Settings.roundup_power2_divisions` for "4" (all sizes) or "[256:1,512:2,>:4]" (from 256, 512 MiB).

    Raises:
        ValueError: no number, or (as in torch) a number that is not a power of 2.
    """
    if not value.startswith("["):
        return (_power_of_2(value),) * 16
    divisions, last = [0] * 16, None  # as in torch, a range between two entries stays 0
    for entry in value.strip("[]").split(","):
        where, _, steps = entry.partition(":")
        steps = 0 if steps == "0" else _power_of_2(steps)
        if where == ">":  # all larger ranges
            begin = 1 if last is None else last + 1
            divisions[begin:] = [steps] * (16 - begin)
            continue
        here = min(_power_of_2(where).bit_length() - 1, 15)
        if last is None:  # as in torch, the first entry also sets all smaller ranges
            divisions[:here] = [steps] * here
        divisions[here] = steps
        last = here
    return tuple(divisions)


def _power_of_2(text: str) -> int:
    number = int(text)
    if number < 1 or number.bit_count() > 1:
        raise ValueError
    return number


_SHARE_OF_CARD = -1.0  # the value is a multiple of the card's memory, e.g. "1.5"


def _reserve(value: str) -> float | None:
    """Return the GiB of addresses to reserve, e.g. 40 for "40G"; `_SHARE_OF_CARD` without "G", None if ignored."""
    is_gib = value[-1:] in ("G", "g")
    try:
        size = float(value[:-1] if is_gib else value)
    except ValueError:
        return None
    if not 0 < size < float("inf"):  # torch ignores such a value, and one that is no number
        return None
    return size if is_gib else _SHARE_OF_CARD


# For each option a function that reads its value (it raises LookupError or ValueError), and a text that says what to
# write.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "expandable_segments": ({"True": True, "False": False}.__getitem__, "True or False"),
    "expandable_segments_reserve": (_reserve, "GiB, e.g. 40G"),
    "max_split_size_mb": (int, "a whole number"),
    "max_non_split_rounding_mb": (int, "a whole number"),
    "large_segment_size_mb": (int, "a whole number"),
    "roundup_power2_divisions": (_divisions, "a power of two, or one per interval of sizes in MiB, e.g. [256:1,>:4]"),
}


def _read(name: str, value: str) -> Any:
    reader, wanted = _READERS[name]
    try:
        return reader(value)
    except (LookupError, ValueError):
        raise ValueError(f"{name}:{value}: give {wanted}") from None


# ---- what changed between releases of torch


@dataclass(frozen=True, slots=True)
class Release:
    """Hold those rules of a torch release about device memory that differ between releases."""

    torch: str  # "2.13"
    # Which of several free blocks of one size is taken: the one with the lowest "address", the "block" that torch made
    # first, or the one of the "segment" that was taken first, and within it with the lowest address.
    ties: str
    shares_workspace: bool  # whether cuBLASLt uses cuBLAS' workspace; otherwise LT_WORKSPACE_BYTES for each thread
    lt_takes_both: bool  # whether a matmul of cuBLASLt with its own workspace allocates cuBLAS' too
    # Whether each thread keeps the workspaces of its first matmuls; otherwise each matmul allocates and frees its own.
    keeps_workspaces: bool = True
    # Whether memory-efficient attention takes grouped queries, every fused kernel takes a single head of keys and
    # values without `enable_gqa`, and cuDNN's takes heads of up to 256 on compute capability 10 too.
    groups_attention: bool = False
    seeds_on_device: bool = False  # whether memory-efficient attention without dropout keeps its unused seed there
    compacts_norms: bool = False  # whether the partial results of _foreach_norm have no gaps


WORKSPACES = ("cuBLAS workspace", "cuBLASLt workspace")  # names of their blocks
LT_WORKSPACE_BYTES = 1 << 20  # ATen/cuda/CublasHandlePool.cpp: parseCUDABlasLtWorkspaceSize
# Sources. Ties: c10/cuda/CUDACachingAllocator.cpp, named after the comparators in each wheel's libc10_cuda.so; by age
# since pull request 178362, by the segment's since 183591. Workspaces: 151163, 168175 and 173002. Each was
# seen in a rehearsal of its release: `benchmarks/measure_allocator.py`, `tests/rehearsal/test_kernels_rehearsed.py`.
# Workspaces freed after each matmul: 194311 (not if TORCH_CUBLAS_WORKSPACE_CACHE=1). Attention: 191085. Norms: 190549.
_SINCE_2_14 = {"groups_attention": True, "seeds_on_device": True}
RELEASES = {
    each.torch: each
    for each in (
        Release("2.10", "address", False, True),
        Release("2.11", "address", False, True),
        Release("2.12", "block", True, False),
        Release("2.13", "segment", True, False),
        Release("2.14", "segment", True, False, **_SINCE_2_14),
        Release("2.15", "segment", True, False, **_SINCE_2_14, keeps_workspaces=False, compacts_norms=True),
    )
}


def release(torch_version: str | None = None) -> Release:
    """Return the rules of a torch release such as "2.11" or "2.11.0+cu130"; None: of the installed release.

    Like torch, obey TORCH_CUBLASLT_UNIFIED_WORKSPACE and, since 2.15, TORCH_CUBLAS_WORKSPACE_CACHE (1 or 0). For a
    release newer than all known releases, warn once and return the rules of the newest known one, with `torch` set to
    the requested release (`is_tested` is then False).

    Raises:
        ValueError: the text names no release, or a release older than all known releases.
    """
    version = importlib.metadata.version("torch") if torch_version is None else str(torch_version)
    number = _number(version)
    name = "{}.{}".format(*number) if number else ""
    known = RELEASES.get(name)
    if known is None and number > _number(newest()):
        _warn_of_untested(name)
        known = replace(RELEASES[newest()], torch=name)
    if known is None:
        choose = f"Choose from {', '.join(RELEASES)}, or a newer one"
        if number:  # older than all of them
            choose = f"Did you mean '{min(RELEASES, key=_number)}'? {choose}"
        raise ValueError(f"torch_version={shown(version)}: the rules of its allocator are unknown. {choose}.")
    shared = _SWITCH.get(os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE"), known.shares_workspace)
    kept = known.keeps_workspaces or _SWITCH.get(os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE"), False)
    return replace(known, shares_workspace=shared, keeps_workspaces=kept)


_SWITCH = {"1": True, "0": False}


def newest() -> str:
    """Return the newest torch release whose allocator rules this package knows, e.g. "2.14"."""
    return max(RELEASES, key=_number)


def is_tested(rules: Release) -> bool:
    """Return whether this package knows the allocator rules of the torch release `rules.torch`.

    If not, this release is newer than all known releases, and `rules` holds the rules of the newest known one.
    """
    return rules.torch in RELEASES


def is_since(torch: str, rules: Release) -> bool:
    """Return whether `rules.torch`, the release whose rules are used, is the release `torch` (e.g. "2.15") or newer."""
    return _number(rules.torch) >= _number(torch)


def untested_text(torch: str) -> str:
    """Return a sentence that warns of the release `torch`, e.g. "2.16", which is newer than all known releases."""
    return f"torch {torch} is untested: the rules of torch {newest()} (newest known) were used"


@functools.cache
def _warn_of_untested(torch: str) -> None:
    warnings.warn(f"{untested_text(torch)}; memory on CUDA may differ.", stacklevel=4)


def _number(version: str) -> tuple[int, ...]:
    """Return the release of a torch version as numbers: (2, 11) for "2.11" or "2.11.0a0+git"; () for other texts."""
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})((\.|\+|a|b|rc).*)?", version)
    return (int(found[1]), int(found[2])) if found else ()
