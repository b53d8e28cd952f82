"""Read results.json, the machine-readable result of a course run, and check it.

The keys are "schema", "date", "machine", "versions", "profile" and "strict" (see `run_course`), "lessons", "claims" and
"runs". A claim is from `claims.Decision.to_dict`. A run is from `Run.to_dict`, with "lesson" added; `Run.from_dict`
reads runs. `NEEDED` lists the fields that each lesson and claim must have. A nightly run (`perf_helpers.compare`) adds
"paces" (step times), "baseline" (changes since an earlier run) and "fail_on" (the kinds of changes, see `AXES`, that
count as failures if they are for the worse).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf_helpers.course.ledger import Verdict, decide, load
from trainmem.texts import number_text, shown

SCHEMA = 1  # version of results.json; if you raise it, add a reader for older versions
AXES = ("memory", "verdict", "speed")  # the kinds of changes in which a run can be worse than its baseline
NEEDED = {  # the least fields of each lesson and each claim
    "lessons": ("name", "status", "seconds", "message"),
    "claims": ("id", "lesson", "verdict", "as_expected", "value"),
}


def load_results(path: str | Path) -> dict[str, Any]:
    """Return the content of a results.json; `path` is the file or the folder of the course run.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}, but this version reads {SCHEMA}")
        for part, names in NEEDED.items():
            [item[name] for item in data[part] for name in names]
        if paths := [name for lesson in data["lessons"] if Path(name := lesson["name"]).name != name]:
            raise ValueError(f"a lesson is called {shown(paths[0])}")  # the lesson's files get this name
        return data | {"date": str(data["date"]), "machine": dict(data["machine"]), "versions": dict(data["versions"])}
    except FileNotFoundError:
        raise ValueError(f"no results in {path}: name a results.json, or the folder of a course run") from None
    except (ValueError, LookupError, TypeError, OSError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not the results of a course ({cause}): run the course again to get one") from None


def recorded(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return {machine's folder name: its newest course run} of the course runs in a folder, see `course_runs`."""
    return {data["file"].parent.name: data for data in course_runs(folder)}


def course_runs(folder: str | Path) -> list[dict[str, Any]]:
    """Return every measured course run in a folder, by machine and then by date; rehearsed runs are left out.

    Files are <machine>/<date>.json; each run gets its path as "file". Raises ValueError if a file is not a course run.
    """
    found = (load_results(path) | {"file": path} for path in sorted(Path(folder).glob("*/*.json")))
    return [data for data in found if not data["machine"].get("rehearsed")]


def decided_again(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims of a recorded run with the verdicts that today's ledger (claims.toml) gives to their values.

    A claim that was not testable keeps this verdict. A claim is left out if today's ledger does not list its id, or if
    the ledger lists this id with another `quantity`.
    """
    ledger, rows = load(), []
    for row in claims:
        if (claim := ledger.get(row["id"])) and row["quantity"] == claim.quantity:
            tested = row["verdict"] != Verdict.NOT_TESTABLE
            value = tuple(row["interval"]) if row.get("interval") else row["value"]
            rows.append(row | {"verdict": decide(claim, value, True) if tested else row["verdict"]})
    return rows


def failures(data: dict[str, Any]) -> list[str]:
    """Return a line per lesson of a results.json whose status is not "ok", and one more if no claim was testable."""
    lines = [f"{x['name']} {x['status']}: {x['message']}" for x in data["lessons"] if x["status"] != "ok"]
    undecided = all(claim["verdict"] == Verdict.NOT_TESTABLE for claim in data["claims"])
    return [*lines, "no claim was decided"] if undecided else lines


def problems(data: dict[str, Any]) -> list[str]:
    """Return one line per failed lesson and per unexpected verdict of a results.json."""
    return failures(data) + unexpected(data["claims"])


def to_send(data: dict[str, Any]) -> list[str]:
    """Return machine, versions and verdicts as lines to report to the authors; [] if all verdicts are as expected."""
    lines, machine, versions = unexpected(data["claims"]), data["machine"], data["versions"]
    if not lines:
        return []
    features = " ".join(machine.get("cpu_features") or ["unknown"])
    cores = f"{machine.get('cpu_cores')} of {machine.get('machine_cores')} cores"
    about = [machine["name"], machine.get("cpu_model") or "", cores, features, machine.get("system") or ""]
    known = [f"{name} {version}" for name, version in versions.items() if version]
    return [" · ".join(filter(None, about)), " · ".join([data["date"], data["profile"], *known]), *lines]


def unexpected(claims: list[dict[str, Any]]) -> list[str]:
    """Return one line per claim whose verdict the ledger (claims.toml) does not expect."""
    lines = []
    for claim in claims:
        if not claim["as_expected"]:
            untested = claim["verdict"] == Verdict.NOT_TESTABLE
            expected = expectation_text(claim.get("expected"), None if untested else claim.get("predicted"))
            reason = claim.get("reason") if untested else f"measured {measured_text(claim)}"
            lines.append(f"{claim['id']}: {claim['verdict']}, {expected}" + (f" ({reason})" if reason else ""))
    return lines


def expectation_text(verdicts: Sequence[str] | None, predicted: Sequence[float] | None) -> str:
    """Return in words what was expected of a claim: verdicts, or the range that other measurements predict.

    Args:
        verdicts: the expected verdicts; None or empty: a prediction decides.
        predicted: (low, high); None: nothing is predicted.
    """
    if predicted:
        return f"other measurements of this machine predict {interval_text(predicted)}"
    return f"expected {' or '.join(verdicts or ['a prediction'])}"


def interval_text(ends: Sequence[float]) -> str:
    """Return an interval in words, e.g. "0.55 to 0.61"; `ends` are its low and its high end."""
    return " to ".join(map(number_text, ends))


def measured_text(claim: dict[str, Any]) -> str:
    """Return a claim's value as text, with its interval unless both ends are equal: "0.58 [0.55, 0.61]", "1343"."""
    low, high = claim.get("interval") or (None, None)
    return number_text(claim["value"]) + (f" [{number_text(low)}, {number_text(high)}]" if low != high else "")
