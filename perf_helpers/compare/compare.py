"""Two course runs held against each other: which verdicts, bytes and speeds changed, and which of it is worse.

Memory is counted (on a CPU) or told by torch's allocator (on CUDA) and has no noise: where the code is the same, so is
every byte. What the system tells, resident memory or that of a whole device, is left out. What has an interval has
moved where the two differ by more than the noise of both (`is_beyond_noise`). A step of a recipe, and those of all
together, have moved where they differ by more than FAR times the noise of both nights beyond LEAST: so much the same
code differed at other times (results/README.md, "Nights").
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

ROUNDING = 0.001  # relative: less is a library's changed rounding, not a change of what is held
FALSE_ALARMS = 0.01  # of comparisons of the same code, by the intervals' word; what was seen stands in the results
LEAST = {"one": 1.15, "all": 1.08}  # the factor of a step that counts at least, of one recipe and of all together
FAR = 3.0
MANY = 3  # recipes that are "all together"
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
        """The changes for the worse, on one of these axes."""
        return [change for change in self.changes if change["worse"] and change["axis"] in axes]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"old  {self.old}", f"new  {self.new}", *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"differs: {difference}" for difference in self.differences] + self.notes
        words = {True: "WORSE ", False: "better", None: "      "}
        ordered = sorted(self.changes, key=lambda change: (not change["worse"], AXES.index(change["axis"])))
        told = [f"{words[change['worse']]} {change['text']}" for change in ordered]
        return "\n".join([*lines, *(told or ["nothing changed"])])

    def to_html(self) -> str:
        """A page of its own; the course's page has a section of its baseline."""
        return template("compare/changes.html.j2").module.page(self).strip() + "\n"

    def to_junit(self, fail_on: Iterable[str]) -> str:
        """For CI, as a file."""
        return report.junit(self.new, report.change_cases(self.changes, fail_on))


def run_night(
    out: str | Path = "build/course",
    baseline: str | Path | None = None,
    fail_on: Sequence[str] = AXES,
    speeds: bool = True,
    **options,
) -> tuple[dict[str, Any], list[Change]]:
    """Run the course and compare it with an earlier run; return its results, and the changes for the worse.

    Args:
        out, options: as in `run_course`.
        baseline: the earlier run: its results.json or its folder; None: no comparison.
        fail_on: which of `AXES` count as worse.
        speeds: also time a step of a few recipes, so that `compare` can compare speeds of different days.

    Raises:
        ValueError: a damaged baseline; or as `run_course`.
    """
    old = load_results(baseline) if baseline else None
    data = run_course(out=out, **options)
    data["paces"] = step_times.tonight(data["profile"]) if speeds else None
    changes = compare(old, data) if old else None
    data.update(baseline=changes and changes.to_dict(), fail_on=list(fail_on))
    write_whole(Path(out) / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
    if changes:
        report.report(out)
    return data, changes.worse(fail_on) if changes else []


def compare(old: dict | str | Path, new: dict | str | Path) -> Changes:
    """Compare two course runs: list changed verdicts and bytes, and values and speeds that changed beyond their noise.

    Only lessons that ran in both are compared, and only claims whose quantity is the same. If the hardware or the
    profile differs, bytes and seconds are not compared; claims are, because they are ratios.

    Args:
        old, new: the content of a results.json, or the path of it or of its folder.

    Raises:
        ValueError: a damaged file, or no lesson that ran in both.
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
    # Of what their functions do, `Run.experiment` does not tell; of an old night the code is not known.
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
    """Whether a figure with an interval has moved. Each interval holds 95 of 100; of `number` that are looked at one
    would often be outside by chance. So the two must differ by as many standard deviations as leave one false alarm in
    1 / FALSE_ALARMS comparisons (Bonferroni)."""
    deviations = [(high - low) / 2 / NormalDist().inv_cdf(0.975) for low, high in (old_interval, new_interval)]
    far = NormalDist().inv_cdf(1 - FALSE_ALARMS / 2 / max(1, number))
    return abs(new - old) > far * math.hypot(*deviations)


def _lessons(lessons: list[tuple[dict, dict]]) -> Iterator[Change]:
    """Lessons that run no more, or run again, of (then, now) of each."""
    for then, lesson in lessons:
        name, now, was = lesson["name"], lesson["status"], then["status"]
        if was != now:
            why = f" ({lesson['message']})" if lesson.get("message") else ""
            yield _change("lesson", "verdict", name, name, was, now, now != "ok" if "ok" in (was, now) else None, why)


def _claims(old: list[dict], new: list[dict], judged: bool) -> Iterator[Change]:
    """Verdicts and values, of every claim that either has."""
    number = sum(bool(claim.get("interval")) for claim in new)
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
        elif _moved(a, b, number):
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


def _moved(before: dict, after: dict, number: int) -> bool:
    """Whether two values differ by more than rounding and, where they have intervals, by more than their noise."""
    a, b = before["value"], after["value"]
    if a is None or b is None:
        return a != b
    if abs(a - b) <= ROUNDING * max(abs(a), abs(b)):
        return False
    intervals = [claim.get("interval") or (claim["value"],) * 2 for claim in (before, after)]
    return is_beyond_noise(a, intervals[0], b, intervals[1], number)


def _pairs(old: list[dict], new: list[dict], lessons: list[str]) -> Iterator[tuple[str, Run, Run]]:
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


def _runs(pairs: list[tuple[str, Run, Run]]) -> Iterator[Change]:
    """Runs whose status changed: out of memory, crashed."""
    for id, a, b in pairs:
        if a.status != b.status:
            worse = not b.ok if a.ok or b.ok else None
            why = f" ({b.message})" if b.message else ""
            yield _change("run", "verdict", id, id.partition("/")[0], a.status, b.status, worse, why)


def _memory(pairs: list[tuple[str, Run, Run]]) -> Iterator[Change]:
    for id, a, b in pairs:
        if a.memory and b.memory and a.experiment == b.experiment and (what := _bytes_that_moved(a.memory, b.memory)):
            sizes = [str(run.memory.peak_bytes) for run in (a, b)]
            worse = _is_larger(a.memory, b.memory)
            yield _change("memory", "memory", id, id.partition("/")[0], *sizes, worse, what=what)


def _is_larger(old: Memory, new: Memory) -> bool | None:
    """True where the peak, what is reserved, or what is held after a phase grew, False where it shrank, None where only
    the parts moved."""
    sizes = [(old.peak_bytes, new.peak_bytes), (old.reserved_bytes, new.reserved_bytes)]
    sizes += [((old.phases or {}).get(phase), size) for phase, size in (new.phases or {}).items()]
    return next((b > a for a, b in sizes if a is not None and b is not None and a != b), None)


def _bytes_that_moved(old: Memory, new: Memory) -> str:
    """What differs between a run's memory then and now, by category, with the operation at the peak and what is held at
    the end of each phase, where a leak shows; empty where nothing does."""
    parts = [_total("peak", old.peak_bytes, new.peak_bytes, old.breakdown, new.breakdown)]
    here, there = (_operation_at_the_peak(memory) for memory in (new, old))
    if here and (here != there or old.peak_bytes != new.peak_bytes):
        parts.append(f"at {here}" + (f", before at {there}" if there and there != here else ""))
    parts.append(_total("reserved", old.reserved_bytes, new.reserved_bytes))
    for phase, size in (new.phases or {}).items():
        breakdowns = [(memory.phase_breakdowns or {}).get(phase) for memory in (old, new)]
        parts.append(_total(f"after {phase}", (old.phases or {}).get(phase, size), size, *breakdowns))
    return "; ".join(filter(None, parts))


def _total(name: str, old: int | None, new: int | None, before: dict | None = None, after: dict | None = None) -> str:
    """One figure that moved, with the categories that moved it, the largest change first; empty if neither did."""
    moved = {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}} if before and after else {}
    largest = sorted((key for key in moved if moved[key]), key=lambda key: -abs(moved[key]))
    parts = ", ".join(f"{name_text(key)} {moved[key]:+,} B" for key in largest)
    if old != new and old is not None and new is not None:
        return f"{name} {bytes_text(old)} -> {bytes_text(new)} ({new - old:+,} B)" + (f": {parts}" if parts else "")
    return f"{name} unchanged, its parts changed: {parts}" if parts else ""


def _operation_at_the_peak(memory: Memory) -> str:
    where = f" of {memory.peak_module}" if memory.peak_module else ""
    return f"{memory.peak_operation}{where} ({memory.peak_phase})" if memory.peak_operation else ""


def compare_steps(old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[list[Change], list[str]]:
    """Which steps became slower or faster between two nights, and notes on what was compared and how well it could be
    told. One recipe is slower where it became so by more than all of them together did.

    Args:
        old, new: of `step_times.measure`; None where a night has none.
    """
    if not old or not new:
        return [], [f"speed not compared: the {'old' if not old else 'new'} run timed no recipes"]
    if old["task"] != new["task"] or old["threads"] != new["threads"]:
        return [], ["speed not compared: the two runs timed different tasks"]
    both = step_times.of_both(old, new)
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
        what = f"a step takes {math.exp(whole):.2f} x as long"
        changes.append(_change("speed", "speed", "all recipes", "", None, None, whole > 0, what=what))
    else:
        whole = 0.0
    for name, ratio in ratios.items():
        if abs(ratio - whole) > limit["one"]:
            sizes = [seconds_text(min(seconds)) for seconds in both[name]]
            what = f"{sizes[0]} -> {sizes[1]}, a step takes {math.exp(ratio):.2f} x as long"
            what += f", all recipes together {math.exp(whole):.2f} x" if whole else ""
            changes.append(_change("speed", "speed", name, "", *sizes, ratio > whole, what=what))
    return changes, notes


def _noise_of_steps(night: Iterable[Sequence[float]]) -> float:
    """How far the fastest process of a recipe lies from the next one, in the mean of all recipes, as a logarithm."""
    pairs = (sorted(seconds)[:2] for seconds in night)
    return statistics.fmean(math.log(pair[-1] / pair[0]) for pair in pairs)


def _change(kind, axis, id, lesson, old, new, worse, why: str = "", what: str | None = None) -> Change:
    what = what or f"{old or 'absent'} -> {new or 'absent'}{why}"
    text = f"{kind:11} {id}: {what}"
    return Change(kind=kind, axis=axis, id=id, lesson=lesson, old=old, new=new, worse=worse, text=text)


def _notes(old: dict, new: dict, pairs: list[tuple[str, Run, Run]], rewritten: list[str]) -> list[str]:
    """What was held against each other, and what could not be, of lessons by name."""
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
    """What differs between two descriptions of a machine, or two lists of versions, one line each."""
    old, new = _flat(old), _flat(new)
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """{dotted name: value} of what lasts, e.g. {"gpus.0.name": "NVIDIA A100"}."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, x in pairs if key not in VOLATILE for k, v in _flat(x, f"{name}.{key}".strip(".")).items()}
