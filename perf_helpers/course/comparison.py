"""Two course runs held against each other: verdicts that changed, values that moved, and what else differs.

Notable: a value has moved only if it left the other run's interval, and the other one this run's. An exact count has no
interval, and moves by more than rounding.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf_helpers.course.results import load_results, measured_text

ROUNDING = 0.001  # relative: less is a library's changed rounding, not a change of what is held
IDENTITY = ("name", "kind", "cpu_model", "cpu_cores", "gpus")  # of a machine: where these differ, so do the numbers
VOLATILE = {"memory_available_bytes", "shm_bytes", "free_bytes", "uuid", "index", "cuda_visible_devices"}


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference of two course runs."""

    old: str  # date and machine
    new: str
    warnings: list[str]  # why their numbers may not be comparable
    differences: list[str]  # of machine and versions, "name: before -> after"
    changes: list[dict[str, str | None]]  # {kind, id, old, new, text}; kind: lesson, verdict, value, (dis)appeared

    def to_dict(self) -> dict:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"old  {self.old}", f"new  {self.new}", *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"differs: {difference}" for difference in self.differences]
        return "\n".join([*lines, *([change["text"] for change in self.changes] or ["nothing changed"])])


def compare(old: dict | str | Path, new: dict | str | Path) -> Changes:
    """Name every verdict that changed and every value that moved beyond its noise, between two runs.

    Args:
        old: the content of results.json, or a path to it or to its folder.
        new: likewise.

    Raises:
        ValueError: a damaged file.
    """
    old, new = (data if isinstance(data, dict) else load_results(data) for data in (old, new))
    machines = [{key: data["machine"].get(key) for key in IDENTITY} for data in (old, new)]
    warnings = ["the machines differ: their numbers are not comparable"] if _differences(*machines) else []
    if old.get("profile") != new.get("profile"):
        warnings.append(f"the profiles differ ({old.get('profile')}, {new.get('profile')}): so do the sizes measured")
    changes = [*_changes("lesson", "name", "status", old["lessons"], new["lessons"])]
    changes += _changes("verdict", "id", "verdict", old["claims"], new["claims"])
    return Changes(
        old=f"{old['date']} · {old['machine'].get('name')}",
        new=f"{new['date']} · {new['machine'].get('name')}",
        warnings=warnings,
        differences=_differences(old["machine"], new["machine"]) + _differences(old["versions"], new["versions"]),
        changes=changes,
    )


def _changes(kind: str, key: str, field: str, old: list[dict], new: list[dict]) -> Iterator[dict[str, str | None]]:
    """The changes of lessons' statuses, or of claims' verdicts and values: of everything that either run has."""
    before, after = ({item[key]: item for item in items} for items in (old, new))
    for name in dict.fromkeys([*before, *after]):
        pair = before.get(name), after.get(name)
        was, now = (item and item[field] for item in pair)
        if was != now:
            yield _change(kind if all(pair) else "disappeared" if pair[0] else "appeared", name, was, now)
        if all(pair) and kind == "verdict" and _moved(*pair):
            yield _change("value", name, *map(measured_text, pair))


def _change(kind: str, name: str, before: str | None, after: str | None) -> dict[str, str | None]:
    text = f"{kind:11} {name}: {before or 'absent'} -> {after or 'absent'}"
    return {"kind": kind, "id": name, "old": before, "new": after, "text": text}


def _moved(before: dict, after: dict) -> bool:
    """Whether each value lies outside the other's interval, and they differ by more than rounding."""
    a, b = before["value"], after["value"]
    if a is None or b is None:
        return a != b
    (low, high), (new_low, new_high) = before.get("interval") or (a, a), after.get("interval") or (b, b)
    return not low <= b <= high and not new_low <= a <= new_high and abs(a - b) > ROUNDING * max(abs(a), abs(b))


def _differences(old: dict, new: dict) -> list[str]:
    """What differs between two descriptions of a machine, or two lists of versions, one line each."""
    old, new = _flat(old), _flat(new)
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """{dotted name: value} of what lasts, e.g. {"gpus.0.name": "NVIDIA A100"}."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, x in pairs if key not in VOLATILE for k, v in _flat(x, f"{name}.{key}".strip(".")).items()}
