"""Compare two course runs: list the verdicts, bytes and speeds that changed, and which changes are for the worse.

Memory is counted (on a CPU) or reported by torch's allocator (on CUDA). It has no noise: the same code takes the same
bytes, so every change counts. Memory that the system reports is not compared. A value with an interval has changed if
the two runs differ by more than the noise of both (`is_beyond_noise`). A step time has changed if it grew or fell by
more than a factor. This factor is `LEAST` times a factor for the noise of the runs (results/README.md, "Nights").
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypedDict

from perf_helpers.compare import step_times
from perf_helpers.course import report
from perf_helpers.course.course import run_course
from perf_helpers.course.ledger import Verdict, load
from perf_helpers.course.results import AXES, load_results, measured_text
from perf_helpers.templates import template
from trainmem.records import Memory, Run, write_whole
from trainmem.texts import bytes_text, name_text, seconds_text
from trainmem.unknown import is_measured

ROUNDING = 0.001  # relative; a smaller difference is a changed rounding in a library
FALSE_ALARMS = 0.01  # share of comparisons of equal code with a false alarm, if the intervals are right
LEAST = {"one": 1.15, "all": 1.08}  # least factor of a changed step time: of one recipe, of all recipes together
FAR = 3.0  # multiples of the noise that are added to it; equal code on different days stayed below the limit
MANY = 3  # least number of recipes for a statement about all of them together
_AXIS = {"memory": "memory", "time": "speed"}  # {what decides a claim: the axis of its value}
IDENTITY = ("name", "kind", "cpu_model", "cpu_cores", "gpus")  # bytes and times of machines that differ here differ too
VOLATILE = {"memory_available_bytes", "shm_bytes", "free_bytes", "uuid", "index", "cuda_visible_devices"}
_MORE_IS_BETTER = {"throughput": True, "peak": False}  # by the first word of a claim's quantity
# Verdicts in the order of how much of the promise a claim keeps. An undecided claim has no rank.
_RANK = {Verdict.REFUTED: 0, Verdict.TOO_SMALL: 1, Verdict.SMALLER: 2, Verdict.HOLDS: 3}


class Change(TypedDict):
    """One difference between two course runs: what changed, both values as text, and whether the new one is worse."""

    kind: str  # "lesson", "verdict", "value", "quantity", "run", "memory", "speed", "appeared" or "disappeared"
    axis: str  # one of AXES
    id: str  # a claim's id, a run's "lesson/name", or a lesson's name
    lesson: str
    old: str | None
    new: str | None
    worse: bool | None  # False: better; None: neither, or unknown
    text: str  # the change in one line


@dataclass(frozen=True, slots=True)
class Changes:
    """All differences between two course runs, with warnings and notes; methods return text, HTML or JUnit XML."""

    old: str  # date and machine
    new: str
    warnings: list[str]  # why some numbers are not comparable
    differences: list[str]  # of machine and versions, as "name: before -> after"
    notes: list[str]  # what was compared and what was not
    changes: list[Change]

    def worse(self, axes: Iterable[str] = AXES) -> list[Change]:
        """Return the changes for the worse on `axes`, a selection from "memory", "verdict" and "speed"."""
        return [change for change in self.changes if change["worse"] and change["axis"] in axes]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"old  {self.old}", f"new  {self.new}", *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"differs: {difference}" for difference in self.differences] + self.notes
        words = {True: "WORSE ", False: "better", None: "      "}
        ordered = sorted(self.changes, key=lambda change: (not change["worse"], AXES.index(change["axis"])))
        changed = [f"{words[change['worse']]} {change['text']}" for change in ordered]
        return "\n".join([*lines, *(changed or ["nothing changed"])])

    def to_html(self) -> str:
        """Return the comparison as an HTML page of its own. The course report shows it as a section instead."""
        return template("compare/changes.html.j2").module.page(self).strip() + "\n"

    def to_junit(self, fail_on: Iterable[str]) -> str:
        """Return the comparison as JUnit XML for CI: one test for each axis of change and one for each change.

        `fail_on`: axes ("memory", "verdict", "speed"). A change for the worse on them fails two tests: that of the
        change and that of the axis.
        """
        return report.junit(self.new, report.change_cases(self.changes, fail_on))


def run_nightly(
    out: str | Path = "build/course",
    baseline: str | Path | None = None,
    fail_on: Sequence[str] = AXES,
    speeds: bool = True,
    **options,
) -> tuple[dict[str, Any], list[Change]]:
    """Run the course and compare it with an earlier run; return its results, and the changes for the worse.

    Args:
        out, options: the folder for the results, and further arguments of `run_course`.
        baseline: results.json or folder of the earlier run; None: no comparison.
        fail_on: the axes ("memory", "verdict", "speed") on which a change for the worse counts.
        speeds: also time a step of a few recipes, so that `compare` can compare speeds of different days.

    Raises:
        ValueError: the baseline is damaged, or `run_course` refuses an option.
    """
    old = load_results(baseline) if baseline else None
    data = run_course(out=out, at_the_end=step_times.measure_here if speeds else None, **options)
    changes = compare(old, data) if old else None
    data.update(baseline=changes and changes.to_dict(), fail_on=list(fail_on))
    write_whole(Path(out) / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
    if changes:
        report.report(out)
    return data, changes.worse(fail_on) if changes else []


def compare(old: dict | str | Path, new: dict | str | Path) -> Changes:
    """Compare two course runs: list changed verdicts and bytes, and values and speeds that changed beyond their noise.

    Only lessons that ran in both are compared; a claim's values are compared only if both runs measured the same
    quantity. If the hardware or the profile (the sizes) differs, bytes and seconds are not compared, but claims are.

    Args:
        old, new: the content of a results.json, its path, or the path of its folder.

    Raises:
        ValueError: a file is damaged, or no lesson ran in both.
    """
    old, new = (data if isinstance(data, dict) else load_results(data) for data in (old, new))
    machines = [{key: data["machine"].get(key) for key in IDENTITY} for data in (old, new)]
    other_hardware = bool(differences(*machines))
    other_profile = old.get("profile") != new.get("profile")
    warnings = ["the machines differ, so only ratios are compared, not bytes or seconds"] if other_hardware else []
    if other_profile:
        sizes = f"the profiles, and thus the sizes, differ ({old.get('profile')}, {new.get('profile')})"
        warnings.append(f"{sizes}: bytes and seconds are not compared")
    then, now = ({lesson["name"]: lesson for lesson in data["lessons"]} for data in (old, new))
    both = [name for name in now if name in then]
    if not both and (then or now):
        raise ValueError("the two runs have no lesson in common, so nothing can be compared: run the same lessons")
    comparable = not (other_hardware or other_profile)
    # `Run.experiment` does not cover the code of functions, so runs of functions are compared only if the lesson's code
    # is equal. Old course runs have no digest of the code.
    codes = {name: (then[name].get("code"), now[name].get("code")) for name in both}
    rewritten = [name for name, (before, after) in codes.items() if before and after and before != after]
    pairs = [*_pairs(old["runs"], new["runs"], both)] if comparable else []
    pairs = [pair for pair in pairs if pair[2].kind != "function" or pair[0].partition("/")[0] not in rewritten]
    claims = [[claim for claim in data["claims"] if claim["lesson"] in both] for data in (old, new)]
    speeds, speed_notes = compare_steps(old.get("paces"), new.get("paces")) if comparable else ([], [])
    lessons = [(then[name], now[name]) for name in both]
    changes = [*_lessons(lessons), *_claims(*claims, comparable), *_runs(pairs), *_memory(pairs), *speeds]
    return Changes(
        old=f"{old['date']} · {old['machine'].get('name')}",
        new=f"{new['date']} · {new['machine'].get('name')}",
        warnings=warnings,
        differences=differences(old["machine"], new["machine"]) + differences(old["versions"], new["versions"]),
        notes=[*_notes(then, now, pairs, rewritten), *speed_notes],
        changes=changes,
    )


def is_beyond_noise(old: float, old_interval: Sequence, new: float, new_interval: Sequence, number: int) -> bool:
    """Return whether a value has changed by more than the noise of both measurements.

    Among many values some differ by chance. The limit, in standard deviations, therefore grows with their number
    (Bonferroni). If the code is equal, the probability that any change is reported is at most FALSE_ALARMS.

    Args:
        old, new: the value in each run.
        old_interval, new_interval: 95 % interval (low, high) of the value in each run.
        number: how many values with an interval are compared.
    """
    deviations = [(high - low) / 2 / NormalDist().inv_cdf(0.975) for low, high in (old_interval, new_interval)]
    far = NormalDist().inv_cdf(1 - FALSE_ALARMS / 2 / max(1, number))
    return abs(new - old) > far * math.hypot(*deviations)


def _lessons(lessons: list[tuple[dict, dict]]) -> Iterator[Change]:
    """Yield a change for each lesson whose status differs; `lessons`: pairs of (old, new) entries in results.json."""
    for previous, lesson in lessons:
        name, now, was = lesson["name"], lesson["status"], previous["status"]
        if was != now:
            note = f" ({lesson['message']})" if lesson.get("message") else ""
            yield _change("lesson", "verdict", name, name, was, now, now != "ok" if "ok" in (was, now) else None, note)


def _claims(old: list[dict], new: list[dict], judged: bool) -> Iterator[Change]:
    """Yield a change for each claim that appeared, disappeared, or has another verdict, quantity or value.

    `judged`: whether a changed value counts as better or worse.
    """
    number = sum(bool(claim.get("interval")) for claim in new)
    before, after = ({claim["id"]: claim for claim in claims} for claims in (old, new))
    for id in dict.fromkeys([*before, *after]):
        a, b = before.get(id), after.get(id)
        if a is None or b is None:
            present, kind = (a, "disappeared") if a else (b, "appeared")
            verdicts = (a and a["verdict"], b and b["verdict"])
            yield _change(kind, "verdict", id, present["lesson"], *verdicts, True if a else None)
            continue
        if a["verdict"] != b["verdict"]:
            yield _change("verdict", "verdict", id, b["lesson"], a["verdict"], b["verdict"], _verdict_is_worse(a, b))
        if a.get("quantity") != b.get("quantity"):
            yield _change("quantity", "verdict", id, b["lesson"], a["quantity"], b["quantity"], None)
        elif _moved(a, b, number):
            claim = load().get(id)
            axis = _AXIS.get(claim.decided_by, "verdict") if claim else "verdict"
            worse = _value_is_worse(a, b) if judged and axis != "verdict" else None
            yield _change("value", axis, id, b["lesson"], measured_text(a), measured_text(b), worse)


def _verdict_is_worse(old: dict, new: dict) -> bool | None:
    """Return whether a claim's verdict became worse; False: better, None: neither. `old`, `new`: as in results.json."""
    if Verdict.NOT_TESTABLE in (old["verdict"], new["verdict"]):
        return (not new["as_expected"]) or None
    is_lower = _RANK[Verdict(new["verdict"])] < _RANK[Verdict(old["verdict"])]
    claim = load().get(new["id"])
    if claim and claim.decided_by == "time" and new["as_expected"] and old["as_expected"]:
        return None  # noise may be the cause
    return is_lower


def _value_is_worse(old: dict, new: dict) -> bool | None:
    """Return whether a claim's throughput fell or its peak grew; None for other quantities and unmeasured values."""
    up = _MORE_IS_BETTER.get((new.get("quantity") or "").partition(" ")[0])
    if up is None or not (is_measured(old["value"]) and is_measured(new["value"])):
        return None
    return new["value"] < old["value"] if up else new["value"] > old["value"]


def _moved(before: dict, after: dict, number: int) -> bool:
    """Return whether a claim's value differs between two course runs by more than rounding and noise.

    `before`, `after`: the claim's entry in each results.json; `number`: see `is_beyond_noise`.
    """
    a, b = before["value"], after["value"]
    if a is None or b is None:
        return a != b
    if abs(a - b) <= ROUNDING * max(abs(a), abs(b)):
        return False
    intervals = [claim.get("interval") or (claim["value"],) * 2 for claim in (before, after)]
    return is_beyond_noise(a, intervals[0], b, intervals[1], number)


def _pairs(old: list[dict], new: list[dict], lessons: list[str]) -> Iterator[tuple[str, Run, Run]]:
    """Yield (key as in `keyed`, old run, new run) for each run of `lessons` that both course runs have.

    `old`, `new`: "runs" in the results.json of each course run.
    """
    before = dict(keyed(old))
    for id, row in keyed(new):
        if row["lesson"] in lessons and id in before:
            yield id, Run.from_dict(before[id]), Run.from_dict(row)


def keyed(runs: list[dict]) -> Iterator[tuple[str, dict]]:
    """Yield (key, run) for each of the `runs` of one course run, as in its results.json.

    The key "lesson/name" identifies a run in other course runs too; a name that repeats in a lesson gets " (2)".
    """
    seen = Counter()
    for run in runs:
        id = f"{run['lesson']}/{run['name']}"
        seen[id] += 1
        yield id + (f" ({seen[id]})" if seen[id] > 1 else ""), run


def _runs(pairs: list[tuple[str, Run, Run]]) -> Iterator[Change]:
    """Yield a change per run whose status differs, e.g. from ok to killed; `pairs`: result of `_pairs`."""
    for id, a, b in pairs:
        if a.status != b.status:
            worse = not b.ok if a.ok or b.ok else None
            message = f" ({b.message})" if b.message else ""
            yield _change("run", "verdict", id, id.partition("/")[0], a.status, b.status, worse, message)


def _memory(pairs: list[tuple[str, Run, Run]]) -> Iterator[Change]:
    for id, a, b in pairs:
        if a.memory and b.memory and a.experiment == b.experiment and (text := _bytes_that_moved(a.memory, b.memory)):
            sizes = [str(run.memory.peak_bytes) for run in (a, b)]
            worse = _is_larger(a.memory, b.memory)
            yield _change("memory", "memory", id, id.partition("/")[0], *sizes, worse, text=text)


def _is_larger(old: Memory, new: Memory) -> bool | None:
    """Return whether a run's first changed total (peak, reserved, phases) grew; None if no total changed."""
    sizes = [(old.peak_bytes, new.peak_bytes), (old.reserved_bytes, new.reserved_bytes)]
    sizes += [((old.phases or {}).get(phase), size) for phase, size in (new.phases or {}).items()]
    return next((b > a for a, b in sizes if a is not None and b is not None and a != b), None)


def _bytes_that_moved(old: Memory, new: Memory) -> str:
    """Return as text how peak, operation at the peak, reserved memory and phases of a run changed; "": no change."""
    parts = [_total("peak", old.peak_bytes, new.peak_bytes, old.breakdown, new.breakdown)]
    operation, previous = (_operation_at_the_peak(memory) for memory in (new, old))
    if operation and (operation != previous or old.peak_bytes != new.peak_bytes):
        parts.append(f"at {operation}" + (f", before at {previous}" if previous and previous != operation else ""))
    parts.append(_total("reserved", old.reserved_bytes, new.reserved_bytes))
    for phase, size in (new.phases or {}).items():
        breakdowns = [(memory.phase_breakdowns or {}).get(phase) for memory in (old, new)]
        parts.append(_total(f"after {phase}", (old.phases or {}).get(phase, size), size, *breakdowns))
    return "; ".join(filter(None, parts))


def _total(name: str, old: int | None, new: int | None, before: dict | None = None, after: dict | None = None) -> str:
    """Return as text how a total and its categories changed, the largest change first; "" if nothing changed.

    `old`, `new`: bytes of the total; `before`, `after`: {category: bytes}. None: unknown.
    """
    moved = {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}} if before and after else {}
    largest = sorted((key for key in moved if moved[key]), key=lambda key: -abs(moved[key]))
    parts = ", ".join(f"{name_text(key)} {moved[key]:+,} B" for key in largest)
    if old != new and old is not None and new is not None:
        return f"{name} {bytes_text(old)} -> {bytes_text(new)} ({new - old:+,} B)" + (f": {parts}" if parts else "")
    return f"{name} unchanged, its parts changed: {parts}" if parts else ""


def _operation_at_the_peak(memory: Memory) -> str:
    module = f" of {memory.peak_module}" if memory.peak_module else ""
    return f"{memory.peak_operation}{module} ({memory.peak_phase})" if memory.peak_operation else ""


def compare_steps(old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[list[Change], list[str]]:
    """Compare the step times of two course runs: return the changes, and notes on what was compared and how precisely.

    If all recipes together became slower or faster, a single recipe is reported only if it differs from the others.

    Args:
        old, new: what `step_times.measure` returned; None if a course run timed no steps.
    """
    if not old or not new:
        return [], [f"speed not compared: the {'old' if not old else 'new'} run timed no recipes"]
    if old["task"] != new["task"] or old["threads"] != new["threads"]:
        return [], ["speed not compared: the two runs timed different tasks"]
    both = step_times.common_seconds(old, new)
    if not both:
        return [], ["speed not compared: no recipe was timed in both"]
    ratios = {name: math.log(min(now) / min(then)) for name, (then, now) in both.items()}
    noise = math.hypot(*(_noise_of_steps(night) for night in zip(*both.values(), strict=True)))
    whole = statistics.median(ratios.values())
    limit = {"one": math.log(LEAST["one"]) + FAR * noise, "all": math.log(LEAST["all"]) + FAR * noise / 2}
    one, every = (f"{math.exp(limit[name]) - 1:.0%}" for name in ("one", "all"))
    limits = f"changes above {one} of one recipe, or {every} of all together, are reported"
    notes, changes = [f"step time: {len(ratios)} recipes compared; {limits}"], []
    if len(ratios) >= MANY and abs(whole) > limit["all"]:
        difference = f"a step takes {math.exp(whole):.2f} x as long"
        changes.append(_change("speed", "speed", "all recipes", "", None, None, whole > 0, text=difference))
    else:
        whole = 0.0
    for name, ratio in ratios.items():
        if abs(ratio - whole) > limit["one"]:
            sizes = [seconds_text(min(seconds)) for seconds in both[name]]
            difference = f"{sizes[0]} -> {sizes[1]}, a step takes {math.exp(ratio):.2f} x as long"
            difference += f", all recipes together {math.exp(whole):.2f} x" if whole else ""
            changes.append(_change("speed", "speed", name, "", *sizes, ratio > whole, text=difference))
    return changes, notes


def _noise_of_steps(night: Iterable[Sequence[float]]) -> float:
    """Return the noise of one course run's step times: the mean of log(second shortest time / shortest time).

    `night`: for each training, the seconds of each process's fastest step.
    """
    pairs = (sorted(seconds)[:2] for seconds in night)
    return statistics.fmean(math.log(pair[-1] / pair[0]) for pair in pairs)


def _change(kind, axis, id, lesson, old, new, worse, reason: str = "", text: str | None = None) -> Change:
    text = text or f"{old or 'absent'} -> {new or 'absent'}{reason}"
    line = f"{kind:11} {id}: {text}"
    return Change(kind=kind, axis=axis, id=id, lesson=lesson, old=old, new=new, worse=worse, text=line)


def _notes(old: dict, new: dict, pairs: list[tuple[str, Run, Run]], rewritten: list[str]) -> list[str]:
    """Return lines that say what was compared and what was not; `rewritten`: lessons whose code changed.

    `old`, `new`: {lesson: its entry in results.json}.
    """
    lines = [f"{len(old.keys() & new.keys())} lessons ran in both, with {len(pairs)} runs of the same name"]
    for lessons, others, when in ((old, new, "old"), (new, old, "new")):
        if only := sorted(lessons.keys() - others.keys()):
            lines.append(f"only in the {when} run, not compared: {', '.join(only)}")
    if rewritten:
        lines.append(f"the code changed, functions are not compared: {', '.join(sorted(rewritten))}")
    if others := [id for id, a, b in pairs if a.experiment != b.experiment]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"the experiment changed, not compared: {', '.join(others[:3])}{more}")
    return lines


def differences(old: dict, new: dict) -> list[str]:
    """Return "name: before -> after" per difference between two descriptions of a machine, or two lists of versions."""
    old, new = _flat(old), _flat(new)
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return {dotted name: value} of nested fields not in `VOLATILE`, e.g. {"gpus.0.name": "T4"}; `name`: a prefix."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, x in pairs if key not in VOLATILE for k, v in _flat(x, f"{name}.{key}".strip(".")).items()}
