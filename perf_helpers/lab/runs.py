"""What experiments yield: runs and comparisons.

Every figure of a run is None where nobody asked for it, a ratio is unknown where a run failed; nothing is ever 0 for
want of a measurement. In files both are null.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from perf_helpers.unknown import Unknown

SCHEMA = 1
CATEGORIES = (
    "weights",
    "weight_copies",
    "gradients",
    "optimizer_states",
    "activations",
    "inputs",
    "temporaries",
    "inside_operations",
)
STATUSES = ("ok", "out of memory", "crashed", "killed", "timed out", "refused")


class Record:
    """to_dict and from_dict for the dataclasses of this module; unknown keys of a newer file are left out."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return _null_for_unknown(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any] | None):
        if data is None:
            return None
        nested = {"memory": Memory, "timing": Timing, "baseline": Run, "other": Run, "speed_ratio": Ratio}
        values = {}
        for item in dataclasses.fields(cls):
            if item.name in data:
                value = data[item.name]
                if item.name in nested:
                    value = nested[item.name].from_dict(value)
                values[item.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _null_for_unknown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_for_unknown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_null_for_unknown, value))
    return None if isinstance(value, Unknown) else value


@dataclass(frozen=True, slots=True)
class Memory(Record):
    """Memory of an experiment in bytes.

    `kind` says what was counted: "counted" (CPU: live bytes, from the allocator's own events) or "allocated" (CUDA:
    the peak that torch's caching allocator handed out). `breakdown` splits `peak_bytes` by `CATEGORIES`, and sums to
    it; `peak_operation` and `peak_module` say what ran there. `phases` is what is live at the end of forward, backward
    and step in the last step recorded; `timeline` is that step as a series: {"phase": [...], "operation": [...],
    "module": [...], "weights": [bytes, ...], ...}, one entry for each of some 200 stretches of operations, taken where
    the stretch is highest. `reserved_bytes` is the peak that the CUDA allocator holds,
    `device_used_bytes` what NVML reports for the whole device, `context_bytes` what the CUDA context takes of it,
    `rss_bytes` the peak resident memory of the process (information only).
    """

    peak_bytes: int
    kind: str
    peak_phase: str | None = None
    peak_operation: str | None = None
    peak_module: str | None = None
    breakdown: dict[str, int] | None = None
    phases: dict[str, int] | None = None
    phase_breakdowns: dict[str, dict[str, int]] | None = None
    timeline: dict[str, Any] | None = None
    parameters: int | None = None
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    context_bytes: int | None = None
    rss_bytes: int | None = None

    def explained(self, categories: "Memory") -> "Memory":
        """This total with the breakdowns of a second pass that followed every tensor; the parts sum to the total."""
        if categories.breakdown is None:
            return self
        return dataclasses.replace(
            self,
            peak_phase=categories.peak_phase,
            peak_operation=categories.peak_operation,
            peak_module=categories.peak_module,
            breakdown=explain(categories.breakdown, self.peak_bytes),
            phase_breakdowns={
                phase: explain(parts, self.phases[phase])
                for phase, parts in categories.phase_breakdowns.items()
                if phase in self.phases
            },
            timeline=categories.timeline,
        )


def explain(live: dict[str, int], total: int) -> dict[str, int]:
    """Bytes by category, and what no tensor shows, workspaces inside operations, so that the parts sum to `total`."""
    seen = {category: live[category] for category in CATEGORIES[:-1]}
    return seen | {"inside_operations": total - sum(seen.values())}


@dataclass(frozen=True, slots=True)
class Timing(Record):
    """Seconds of an optimizer step: median, interquartile range, and every step that was timed, warm-up left out."""

    step_seconds: float
    spread_seconds: float
    steps: int
    warmup_steps: int
    samples_per_second: float | None
    all_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Run(Record):
    """What one experiment yielded. `status` is one of `STATUSES`; anything but "ok" comes with a `message`."""

    name: str
    status: str
    message: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None
    timing: Timing | None = None
    losses: tuple[float, ...] | None = None
    value: Any = None
    ranks: tuple[Any, ...] | None = None
    processes: int = 1
    profile: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    id: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def peak_bytes(self) -> int | None:
        return self.memory.peak_bytes if self.memory else None

    @property
    def step_seconds(self) -> float | None:
        return self.timing.step_seconds if self.timing else None

    @property
    def samples_per_second(self) -> float | None:
        return self.timing.samples_per_second if self.timing else None

    def __repr__(self) -> str:
        peak = "not measured" if self.peak_bytes is None else f"{self.peak_bytes / 1e6:.1f} MB {self.memory.kind}"
        rate = self.samples_per_second
        speed = "" if rate is None else ", speed not known" if isinstance(rate, Unknown) else f", {rate:.3g} samples/s"
        return f"{self.name}: {self.status}{': ' + self.message if self.message else f', {peak}{speed}'}"


@dataclass(frozen=True, slots=True)
class Ratio(Record):
    """A measured ratio with its interval, `low` to `high`: the bootstrap's, widened by the noise floor of where it was
    measured. An effect that does not clear it is too small to tell. Divided by a number, all of it is."""

    value: float
    low: float
    high: float
    pairs: tuple[float, ...] = ()

    def __post_init__(self):
        for name in ("value", "low", "high"):
            if getattr(self, name) is None:  # so it was written to a file
                object.__setattr__(self, name, Unknown())

    @classmethod
    def unknown(cls, why: str) -> "Ratio":
        """A ratio that was not measured, and why: it is carried along and shown, and decides nothing."""
        return cls(*[Unknown(why)] * 3)

    @property
    def known(self) -> bool:
        return not isinstance(self.value, Unknown)

    def __truediv__(self, number: float) -> "Ratio":
        parts = (part / number for part in (self.value, self.low, self.high))
        return Ratio(*parts, tuple(pair / number for pair in self.pairs))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})" if self.known else "not measured"


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """Two runs side by side: `memory_ratio` is other / baseline in peak bytes, `speed_ratio` in samples per second.

    Each is unknown where it was not measured: lessons go on, and a claim that it decides is not testable.
    """

    baseline: Run
    other: Run
    memory_ratio: float
    speed_ratio: Ratio

    def __post_init__(self):
        if self.memory_ratio is None:
            object.__setattr__(self, "memory_ratio", Unknown())
        if self.speed_ratio is None:
            object.__setattr__(self, "speed_ratio", Ratio.unknown("not measured"))

    def __repr__(self) -> str:
        unknown = isinstance(self.memory_ratio, Unknown)
        memory = "memory not measured" if unknown else f"{self.memory_ratio:.3f} x the memory"
        speed = f"{self.speed_ratio} x the speed" if self.speed_ratio.known else "speed not measured"
        return f"{self.other.name} against {self.baseline.name}: {memory}, {speed}"

    def _repr_html_(self) -> str:
        from perf_helpers import plots

        return plots.comparison_html(self)
