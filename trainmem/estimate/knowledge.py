"""Store what torch answered about operations, so that later processes and commands need not ask again.

An answer depends on the operation, on the versions of the libraries and of this package, and for operator workspaces on
the CPU. So each combination of versions and CPU has a file of its own in the user's cache folder. A file holds JSON,
never code; one that cannot be read counts as empty.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainmem.core import hardware
from trainmem.estimate.trace_records import Spec
from trainmem.records import write_whole

IN_PLACE = "in place"  # the operation returns its first argument, or nothing
MOST_BYTES = 4 * 2**20  # of a file; beyond these the older half of its facts is dropped
_MOST_FILES = 4  # that are kept; of more the oldest are removed
# Operations that the versions describe completely; a user's own operator may change between two commands.
_OF_LIBRARIES = ("aten.", "bitsandbytes.")
_OF_CPU = ("model", "cpu family", "stepping", "cache size", "flags", "Features", "CPU ")  # lines of /proc/cpuinfo
_OF_KERNELS = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_", "TORCH_")  # environment variables that select a CPU's kernels


@dataclass(frozen=True, slots=True)
class View:
    """A result that lies on the memory of the operation's first argument."""

    spec: Spec
    offset: int  # in elements


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one operation hides at its own size."""

    bytes: int | None  # None where it cannot be run by itself
    how: str  # "measured" at its own size, on a "line" through three smaller ones, "assumed", or "unknown"
    seconds: float = field(default=0.0, compare=False)  # that it took, if it was run at its own, large size


Fact = Spec | View | Hidden | tuple | list | str  # a tuple or list: several results, None for one that is no tensor


class Knowledge:
    """Facts about operations: those that this process learned, and those that earlier ones stored.

    Args:
        stored: facts as a file holds them, by the digest of their keys.
    """

    def __init__(self, stored: Mapping[str, Any] | None = None):
        self.learned: dict[tuple, Fact] = {}  # by (device or threads, operation, ...): see those who ask
        self._found: dict[tuple, Fact] = {}  # facts in use: learned, or read from those that are stored
        self._stored = stored or {}

    @classmethod
    def load(cls) -> "Knowledge":
        """Return what earlier processes stored."""
        return cls(_stored_in(_file()))

    def find(self, key: tuple) -> Fact | None:
        """Return the fact of this key, or None if it is not known."""
        fact = self._found.get(key)
        if fact is None and self._stored and (plain := self._stored.get(_digest(key))):
            with contextlib.suppress(AttributeError, TypeError):  # somebody edited the file
                fact = self._found[key] = _read(plain)
        return fact

    def learn(self, facts: Mapping[tuple, Fact]) -> None:
        """Add facts that torch was asked for."""
        self.learned.update(facts)
        self._found.update(facts)

    def lasting(self) -> dict[str, Any]:
        """Return the learned facts that hold in later processes, as a file holds them."""
        return {_digest(key): _plain(fact) for key, fact in self.learned.items() if _lasts(key, fact)}

    def save(self) -> None:
        """Add what this process learned to the file, unless the folder cannot be written to. If several processes
        write at once, the last file counts: what it lacks is learned again."""
        if not (lasting := self.lasting()):
            return
        with contextlib.suppress(OSError):
            file = _file()
            facts = _stored_in(file) | lasting
            while len(text := json.dumps(facts)) > MOST_BYTES:
                facts = dict(itertools.islice(facts.items(), len(facts) // 2 + 1, None))
            write_whole(file, text)
            for old in sorted(file.parent.glob("*.json"), key=os.path.getmtime)[:-_MOST_FILES]:
                old.unlink(missing_ok=True)


def _lasts(key: tuple, fact: Fact) -> bool:
    """Whether a fact holds in later processes: what was assumed or failed may depend on time or free memory."""
    return key[1].startswith(_OF_LIBRARIES) and (type(fact) is not Hidden or fact.how in ("measured", "line"))


def _digest(key: tuple) -> str:
    return hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()


def _plain(fact: Fact | None) -> Any:
    """Return a fact as JSON can hold it."""
    match fact:
        case Spec():
            return ["spec", fact.shape, fact.stride, str(fact.dtype).removeprefix("torch.")]
        case View():
            return ["view", _plain(fact.spec), fact.offset]
        case Hidden():
            return ["hidden", fact.bytes, fact.how, fact.seconds]
        case tuple() | list():
            return [type(fact).__name__, *map(_plain, fact)]
    return fact


def _read(plain: Any) -> Fact | None:
    """Return the fact that `_plain` wrote, or None if there is none."""
    match plain:
        case "in place":
            return IN_PLACE
        case ["spec", shape, stride, dtype]:
            return Spec(tuple(shape), tuple(stride), getattr(torch, dtype))
        case ["view", spec, offset]:
            return View(_read(spec), offset)
        case ["hidden", *values]:
            return Hidden(*values)
        case ["tuple", *parts]:
            return tuple(map(_read, parts))
        case ["list", *parts]:
            return [*map(_read, parts)]
    return None


def _stored_in(file: Path) -> dict[str, Any]:
    """Return the facts in a file; {} if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        facts = json.loads(file.read_text(encoding="utf-8"))
        return facts if isinstance(facts, dict) else {}
    return {}


def _file() -> Path:
    """Return the file for these versions, this CPU, and the environment variables that select its kernels."""
    cpu = [line for line in hardware.read(hardware.ROOT / "proc/cpuinfo").splitlines() if line.startswith(_OF_CPU)]
    selected = sorted((name, value) for name, value in os.environ.items() if name.startswith(_OF_KERNELS))
    build = torch.__version__, torch.version.git_version, hardware.versions()
    version = repr((_SOURCES, build, hardware.read_cpu(), sorted(set(cpu)), selected))
    digest = hashlib.blake2b(version.encode(), digest_size=12).hexdigest()
    return hardware.cache_folder() / "operations" / f"{digest}.json"


def _digest_of_sources() -> str:
    files = (each for each in Path(__file__).parents[1].rglob("*.*") if each.suffix in (".py", ".toml"))
    return hashlib.blake2b(b"".join(each.read_bytes() for each in sorted(files))).hexdigest()


_SOURCES = _digest_of_sources()  # when this code is imported: the files may be edited while it runs
