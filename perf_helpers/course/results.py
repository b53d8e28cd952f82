"""results.json: what a course run leaves for machines, checked when it is read, and held against another run's.

{"schema", "date", "machine", "versions", "profile", "strict", "lessons", "claims", "runs", "baseline"}: `_NEEDED` says
what a lesson has, `claim_row` what a claim has. A run is `Run.to_dict` with its lesson, for `Run.from_dict` to read.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf_helpers.course.ledger import Verdict, decide, load
from perf_helpers.texts import number_text

SCHEMA = 1  # of results.json; raise it with a reader for the older ones
_NEEDED = {
    "lessons": ("name", "status", "seconds", "message"),
    "claims": ("id", "lesson", "verdict", "as_expected", "value"),
}
_OF_A_DECISION = ("id", "says", "quantity", "verdict", "expected", "as_expected", "value", "interval", "threshold")
_OF_A_DECISION += ("note", "rehearsed")
ROUNDING = 0.001  # relative: less is a library's changed rounding, not a change of what is held
IDENTITY = ("name", "kind", "cpu_model", "cpu_cores", "gpus")  # of a machine: where these differ, so do the numbers
VOLATILE = {"memory_available_bytes", "shm_bytes", "free_bytes", "uuid", "index", "cuda_visible_devices"}


def load_results(path: str | Path) -> dict[str, Any]:
    """Read results.json (or that of a folder).

    Raises:
        ValueError: there is none, or what is wrong with it.
    """
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"it has schema {data['schema']!r}, this version reads {SCHEMA}")
        for part, names in _NEEDED.items():
            [item[name] for item in data[part] for name in names]
        return data | {"date": str(data["date"]), "machine": dict(data["machine"]), "versions": dict(data["versions"])}
    except FileNotFoundError:
        raise ValueError(f"no results in {path}: name a results.json, or the folder that a course run wrote") from None
    except (ValueError, LookupError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not the results of a course ({what}): run the course again to get one") from None


def recorded(folder: str | Path) -> dict[str, dict[str, Any]]:
    """The newest measured course run of each machine that has a folder in `folder`, as <machine>/<date>.json.

    By the machine's folder, with the file under "file". What was rehearsed is no measurement and left out.

    Raises:
        ValueError: a file that is not a course's results.
    """
    runs = [load_results(path) | {"file": path} for path in sorted(Path(folder).glob("*/*.json"))]
    return {data["file"].parent.name: data for data in runs if not data["machine"].get("rehearsed")}


def claim_row(lesson: str, decision: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a decision (`Decision.to_dict`), under the name of the lesson that made it."""
    row = {"lesson": lesson, **{name: decision.get(name) for name in _OF_A_DECISION}}
    return row | {"reference": decision.get("guide"), "reason": decision.get("missing") or decision.get("reason") or ""}


def decided_anew(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims of a recorded run with the verdicts that today's ledger gives to what was measured then. One that asks
    for another quantity today is left out."""
    ledger, rows = load(), []
    for row in claims:
        if (claim := ledger.get(row["id"])) and row["quantity"] == claim.quantity:
            tested = row["verdict"] != Verdict.NOT_TESTABLE
            value = tuple(row["interval"]) if row.get("interval") else row["value"]
            rows.append(row | {"verdict": decide(claim, value, True) if tested else row["verdict"]})
    return rows


def problems(data: dict[str, Any]) -> list[str]:
    """What keeps a run (the content of results.json) from being ok, one line each."""
    lines = [f"{x['name']} {x['status']}: {x['message']}" for x in data["lessons"] if x["status"] != "ok"]
    lines += unexpected(data["claims"])
    undecided = all(claim["verdict"] == Verdict.NOT_TESTABLE for claim in data["claims"])
    return [*lines, "no claim was decided"] if undecided else lines


def unexpected(claims: list[dict[str, Any]]) -> list[str]:
    """The rows of claims whose verdict the ledger does not expect, one line each."""
    lines = []
    for claim in claims:
        if not claim["as_expected"]:
            why = claim["verdict"] == Verdict.NOT_TESTABLE and claim.get("reason")
            expected = " or ".join(claim.get("expected") or ["nothing"])
            lines.append(f"{claim['id']}: {claim['verdict']}, expected {expected}" + (f" ({why})" if why else ""))
    return lines


def measured_text(claim: dict[str, Any]) -> str:
    """What a claim measured, with its interval if that has a width: "0.58 [0.55, 0.61]", or "not measured"."""
    low, high = claim.get("interval") or (None, None)
    return number_text(claim["value"]) + (f" [{number_text(low)}, {number_text(high)}]" if low != high else "")


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference of two course runs."""

    old: str  # date and machine
    new: str
    warnings: list[str]  # why their numbers may not be comparable
    differences: list[str]  # of machine and versions, "name: before -> after"
    # {kind, id, old, new, text}; kind: lesson, verdict, value, quantity, appeared or disappeared
    changes: list[dict[str, str | None]]

    def to_dict(self) -> dict:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"old  {self.old}", f"new  {self.new}", *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"differs: {difference}" for difference in self.differences]
        return "\n".join([*lines, *([change["text"] for change in self.changes] or ["nothing changed"])])


def compare(old: dict | str | Path, new: dict | str | Path) -> Changes:
    """Name every verdict that changed and every value that moved beyond its noise, between two runs. Values of a claim
    that asks for another quantity now are not compared.

    Each is the content of results.json, or a path to it or to its folder.

    Raises:
        ValueError: a damaged file.
    """
    old, new = (data if isinstance(data, dict) else load_results(data) for data in (old, new))
    machines = ({key: data["machine"].get(key) for key in IDENTITY} for data in (old, new))
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
        changes = [(kind if all(pair) else "disappeared" if pair[0] else "appeared", was, now)] if was != now else []
        if all(pair) and pair[0].get("quantity") != pair[1].get("quantity"):
            changes.append(("quantity", *(item["quantity"] for item in pair)))
        elif all(pair) and kind == "verdict" and _moved(*pair):
            changes.append(("value", *map(measured_text, pair)))
        for what, was, now in changes:
            text = f"{what:11} {name}: {was or 'absent'} -> {now or 'absent'}"
            yield {"kind": what, "id": name, "old": was, "new": now, "text": text}


def _moved(before: dict, after: dict) -> bool:
    """Whether each value lies outside the other's interval (an exact count has none) by more than rounding."""
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
