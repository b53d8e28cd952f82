"""Two course runs held against each other: which verdicts, bytes and speeds changed, and which of it is worse.

Memory is exact. What has an interval has moved where the two differ by more than the noise of both; how much that is
takes into account how many such figures are looked at (`Noise`), so that a comparison as a whole is rarely wrong.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypedDict

from perf_helpers.course import memory_changes, speed_changes
from perf_helpers.course.ledger import Verdict, load
from perf_helpers.course.results import load_results, measured_text
from perf_helpers.records import Run
from perf_helpers.unknown import is_measured

AXES = ("memory", "verdict", "speed")  # what a change can be worse in
ROUNDING = 0.001  # relative: less is a library's changed rounding, not a change of what is held
FALSE_ALARMS = 0.01  # of comparisons of the same code, by the intervals' word; what was seen stands in the results
_AXIS = {"memory": "memory", "time": "speed"}  # of a claim's value, by what decides it
IDENTITY = ("name", "kind", "cpu_model", "cpu_cores", "gpus")  # of a machine: where these differ, so do the numbers
VOLATILE = {"memory_available_bytes", "shm_bytes", "free_bytes", "uuid", "index", "cuda_visible_devices"}
_MORE_IS_BETTER = {"throughput": True, "peak": False}  # by the first word of a claim's quantity
# How much of its promise a claim keeps. A claim that was never decided has no rank.
_RANK = {Verdict.REFUTED: 0, Verdict.TOO_SMALL: 1, Verdict.SMALLER: 2, Verdict.HOLDS: 3}


class Change(TypedDict):
    """One thing that is not as it was."""

    kind: str  # "lesson", "verdict", "value", "quantity", "run", "memory", "speed", "appeared" or "disappeared"
    axis: str  # one of AXES
    id: str  # of a claim; lesson/name of a run; the name of a lesson
    lesson: str
    old: str | None
    new: str | None
    worse: bool | None  # False: better; None: neither, or nobody can say
    text: str  # all of it in one line


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference of two course runs."""

    old: str  # date and machine
    new: str
    warnings: list[str]  # why their numbers may not be comparable
    differences: list[str]  # of machine and versions, "name: before -> after"
    notes: list[str]  # what was compared, and what not
    changes: list[Change]

    def worse(self, axes: Iterable[str] = AXES) -> list[Change]:
        """The changes for the worse."""
        return worse_of(self.changes, axes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"old  {self.old}", f"new  {self.new}", *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"differs: {difference}" for difference in self.differences] + self.notes
        words = {True: "WORSE ", False: "better", None: "      "}
        ordered = sorted(self.changes, key=lambda change: (not change["worse"], AXES.index(change["axis"])))
        told = [f"{words[change['worse']]} {change['text']}" for change in ordered]
        return "\n".join([*lines, *(told or ["nothing changed"])])


def worse_of(changes: Iterable[Change], axes: Iterable[str]) -> list[Change]:
    """Those for the worse on one of these axes."""
    return [change for change in changes if change["worse"] and change["axis"] in axes]


def compare(old: dict | str | Path, new: dict | str | Path) -> Changes:
    """Name every verdict that changed, every byte that moved, and every value and speed that moved beyond its noise.

    Only lessons that ran in both are held against each other; values of a claim that asks for another quantity now are
    not compared. On different hardware, or under another profile, bytes and seconds are not compared: claims are, which
    are ratios.

    Each is the content of results.json, or a path to it or to its folder.

    Raises:
        ValueError: a damaged file, or no lesson that ran in both.
    """
    old, new = (data if isinstance(data, dict) else load_results(data) for data in (old, new))
    machines = [{key: data["machine"].get(key) for key in IDENTITY} for data in (old, new)]
    other_hardware = bool(differences(*machines))
    other_profile = old.get("profile") != new.get("profile")
    warnings = ["the machines differ: only ratios are compared, no bytes and no seconds"] if other_hardware else []
    if other_profile:
        sizes = f"the profiles differ ({old.get('profile')}, {new.get('profile')}): so do the sizes measured"
        warnings.append(f"{sizes}; no bytes and no seconds are compared")
    both = _names(old) & _names(new)
    if not both and (_names(old) or _names(new)):
        raise ValueError("no lesson ran in both: there is nothing to compare")
    comparable = not (other_hardware or other_profile)
    rewritten = _rewritten(old, new)
    pairs = [*_pairs(old["runs"], new["runs"], both)] if comparable else []
    pairs = [pair for pair in pairs if pair[2].kind != "function" or pair[0].partition("/")[0] not in rewritten]
    claims = [[claim for claim in data["claims"] if claim["lesson"] in both] for data in (old, new)]
    slower, speed_notes = speed_changes.moved(old.get("paces"), new.get("paces")) if comparable else ([], [])
    noise = Noise(sum(bool(claim.get("interval")) for claim in claims[1]))
    changes = [*_lessons(old, new), *_claims(*claims, noise, comparable)]
    changes += [*_runs(pairs), *_memory(pairs), *map(_speed, slower)]
    return Changes(
        old=f"{old['date']} · {old['machine'].get('name')}",
        new=f"{new['date']} · {new['machine'].get('name')}",
        warnings=warnings,
        differences=differences(old["machine"], new["machine"]) + differences(old["versions"], new["versions"]),
        notes=[*_notes(old, new, both, pairs, rewritten), *speed_notes],
        changes=changes,
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """When a figure with an interval has moved. Each interval holds 95 of 100; of `number` that are looked at one would
    often be outside by chance. So the two must differ by as many standard deviations as leave one false alarm in
    1 / FALSE_ALARMS comparisons (Bonferroni)."""

    number: int

    def is_exceeded(self, old: float, old_interval: list, new: float, new_interval: list) -> bool:
        deviations = [(high - low) / 2 / NormalDist().inv_cdf(0.975) for low, high in (old_interval, new_interval)]
        far = NormalDist().inv_cdf(1 - FALSE_ALARMS / 2 / max(1, self.number))
        return abs(new - old) > far * math.hypot(*deviations)


def _lessons(old: dict, new: dict) -> Iterator[Change]:
    """Lessons that run no more, or run again."""
    before = {lesson["name"]: lesson["status"] for lesson in old["lessons"]}
    for lesson in new["lessons"]:
        name, now, was = lesson["name"], lesson["status"], before.get(lesson["name"])
        if was and was != now:
            why = f" ({lesson['message']})" if lesson.get("message") else ""
            yield _change("lesson", "verdict", name, name, was, now, now != "ok" if "ok" in (was, now) else None, why)


def _claims(old: list[dict], new: list[dict], noise: Noise, judged: bool) -> Iterator[Change]:
    """Verdicts and values, of every claim that either has."""
    before, after = ({claim["id"]: claim for claim in claims} for claims in (old, new))
    for id in dict.fromkeys([*before, *after]):
        a, b = before.get(id), after.get(id)
        if a is None or b is None:
            made, kind = (a, "disappeared") if a else (b, "appeared")
            verdicts = (a and a["verdict"], b and b["verdict"])
            yield _change(kind, "verdict", id, made["lesson"], *verdicts, True if a else None)
            continue
        if a["verdict"] != b["verdict"]:
            yield _change("verdict", "verdict", id, b["lesson"], a["verdict"], b["verdict"], _verdict_is_worse(a, b))
        if a.get("quantity") != b.get("quantity"):
            yield _change("quantity", "verdict", id, b["lesson"], a["quantity"], b["quantity"], None)
        elif _moved(a, b, noise):
            claim = load().get(id)
            axis = _AXIS.get(claim.decided_by, "verdict") if claim else "verdict"
            worse = _value_is_worse(a, b) if judged and axis != "verdict" else None
            yield _change("value", axis, id, b["lesson"], measured_text(a), measured_text(b), worse)


def _verdict_is_worse(old: dict, new: dict) -> bool | None:
    """A claim that is not decided any more is worse where the ledger does not excuse it. One that keeps less of its
    promise is worse, unless noise may have done it: of a claim about time only a verdict that nobody expects counts."""
    if Verdict.NOT_TESTABLE in (old["verdict"], new["verdict"]):
        return (not new["as_expected"]) or None
    fell = _RANK[Verdict(new["verdict"])] < _RANK[Verdict(old["verdict"])]
    claim = load().get(new["id"])
    if claim and claim.decided_by == "time" and new["as_expected"] and old["as_expected"]:
        return None
    return fell


def _value_is_worse(old: dict, new: dict) -> bool | None:
    """Whether a value moved for the worse: a throughput that fell, a peak that grew. None for what a claim may measure
    besides, of which nobody can say whether more or less of it is better."""
    up = _MORE_IS_BETTER.get((new.get("quantity") or "").partition(" ")[0])
    if up is None or not (is_measured(old["value"]) and is_measured(new["value"])):
        return None
    return new["value"] < old["value"] if up else new["value"] > old["value"]


def _moved(before: dict, after: dict, noise: Noise) -> bool:
    """Whether two values differ by more than rounding and, where they have intervals, by more than their noise."""
    a, b = before["value"], after["value"]
    if a is None or b is None:
        return a != b
    if abs(a - b) <= ROUNDING * max(abs(a), abs(b)):
        return False
    intervals = [claim.get("interval") or (claim["value"],) * 2 for claim in (before, after)]
    return noise.is_exceeded(a, intervals[0], b, intervals[1])


def _pairs(old: list[dict], new: list[dict], lessons: set[str]) -> Iterator[tuple[str, Run, Run]]:
    """(lesson/name, then, now) of each run that both have in these lessons."""
    before = dict(keyed(old))
    for id, row in keyed(new):
        if row["lesson"] in lessons and id in before:
            yield id, Run.from_dict(before[id]), Run.from_dict(row)


def keyed(runs: list[dict]) -> Iterator[tuple[str, dict]]:
    """A name for each run that it has in another course run too: lesson/name, and which one of that name."""
    seen = Counter()
    for run in runs:
        id = f"{run['lesson']}/{run['name']}"
        seen[id] += 1
        yield id + (f" ({seen[id]})" if seen[id] > 1 else ""), run


def _is_the_same(old: Run, new: Run) -> bool:
    """Whether two runs of one name are of the same experiment, as far as they tell: a function does not, see
    `_rewritten`."""
    what = [(run.kind, dict(run.arguments), dict(run.task), run.processes) for run in (old, new)]
    return what[0] == what[1]


def _rewritten(old: dict, new: dict) -> set[str]:
    """Lessons whose code is another one now."""
    before = {lesson["name"]: lesson.get("code") for lesson in old["lessons"]}
    now = {lesson["name"]: lesson.get("code") for lesson in new["lessons"]}
    return {name for name, code in now.items() if code and before.get(name) and before[name] != code}


def _runs(pairs: list[tuple[str, Run, Run]]) -> Iterator[Change]:
    """Runs whose status changed: out of memory, crashed."""
    for id, a, b in pairs:
        if a.status != b.status:
            worse = not b.ok if a.ok or b.ok else None
            why = f" ({b.message})" if b.message else ""
            yield _change("run", "verdict", id, id.partition("/")[0], a.status, b.status, worse, why)


def _memory(pairs: list[tuple[str, Run, Run]]) -> Iterator[Change]:
    for id, a, b in pairs:
        if a.memory and b.memory and _is_the_same(a, b) and (found := memory_changes.moved(a.memory, b.memory)):
            what, worse = found
            sizes = [str(run.memory.peak_bytes) for run in (a, b)]
            yield _change("memory", "memory", id, id.partition("/")[0], *sizes, worse, what=what)


def _speed(found: speed_changes.SpeedChange) -> Change:
    sizes = (found.old or None, found.new or None)
    return _change("speed", "speed", found.recipe or "all recipes", "", *sizes, found.is_slower, what=found.text)


def _change(kind, axis, id, lesson, old, new, worse, why: str = "", what: str | None = None) -> Change:
    what = what or f"{old or 'absent'} -> {new or 'absent'}{why}"
    text = f"{kind:11} {id}: {what}"
    return Change(kind=kind, axis=axis, id=id, lesson=lesson, old=old, new=new, worse=worse, text=text)


def _names(data: dict) -> set[str]:
    return {lesson["name"] for lesson in data["lessons"]}


def _notes(old: dict, new: dict, both: set[str], pairs: list[tuple[str, Run, Run]], rewritten: set[str]) -> list[str]:
    """What was held against each other, and what could not be."""
    lines = [f"{len(both)} lessons ran in both, with {len(pairs)} runs of one name"]
    for data, other, when in ((old, new, "then"), (new, old, "now")):
        if only := sorted(_names(data) - _names(other)):
            lines.append(f"ran only {when}, not compared: {', '.join(only)}")
    if rewritten:
        lines.append(f"of other code now, their functions are not compared: {', '.join(sorted(rewritten))}")
    if others := [id for id, a, b in pairs if not _is_the_same(a, b)]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"another experiment now, not compared: {', '.join(others[:3])}{more}")
    return lines


def identity_text(machine: dict) -> str:
    """What a machine is called where its runs are told apart from another's."""
    gpus = [gpu.get("name") or "GPU" for gpu in machine.get("gpus") or ()]
    parts = [machine.get("name") or "", machine.get("cpu_model") or "", *gpus]
    told = [part for number, part in enumerate(parts) if part and not any(part in other for other in parts[:number])]
    return " · ".join([*told, *(["rehearsed"] if machine.get("rehearsed") else [])])


def differences(old: dict, new: dict) -> list[str]:
    """What differs between two descriptions of a machine, or two lists of versions, one line each."""
    old, new = _flat(old), _flat(new)
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """{dotted name: value} of what lasts, e.g. {"gpus.0.name": "NVIDIA A100"}."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, x in pairs if key not in VOLATILE for k, v in _flat(x, f"{name}.{key}".strip(".")).items()}
