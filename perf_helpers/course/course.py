"""The course as a test: every lesson executed and judged, every claim's verdict in results.json, and the report of it.

A lesson that fails or hangs does not stop the others.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perf_helpers.course.ledger import Verdict
from perf_helpers.course.lesson_process import code_of, run_lesson, say
from perf_helpers.course.report import report
from perf_helpers.course.results import SCHEMA
from perf_helpers.lab import hardware
from perf_helpers.lab.task import choose_profile
from perf_helpers.records import now, write_whole
from perf_helpers.texts import nearest_text, positive, shown

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"


def run_course(
    lessons: Iterable[str | Path] = (),
    profile: str = "auto",
    strict: bool = False,
    out: str | Path = "build/course",
    timeout_per_lesson: float = 900,
) -> dict[str, Any]:
    """Execute lessons one after the other and write the report into `out`. Returns the content of results.json.

    Args:
        lessons: as `find_lessons` takes them.
        profile: the lessons' sizes, "auto" by the machine's memory.
        strict: let a lesson fail for a verdict that the ledger does not expect.
        timeout_per_lesson: in seconds, many times what a lesson takes.

    Raises:
        ValueError: a lesson or a profile that does not exist, or `out` is the lessons' own folder.
    """
    sources = find_lessons(lessons)
    positive("timeout", timeout_per_lesson)
    choose_profile(profile)
    out = Path(out).resolve()
    if any(source.parent == out for source in sources):
        raise ValueError(f"--out {out} is the folder of the lessons themselves: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA, "date": now()}
    data |= {"machine": hardware.describe().to_dict(), "versions": hardware.versions()}
    data |= {"profile": profile, "strict": strict, "lessons": [], "claims": [], "runs": []}
    for number, source in enumerate(sources, 1):
        say(f"[{number:2}/{len(sources)}] {source.stem} ...")
        started = time.monotonic()
        status, message, record = run_lesson(source, out, profile, strict, timeout_per_lesson)
        seconds = round(time.monotonic() - started, 1)
        decided = record.get("claims", [])
        lesson = {"name": source.stem, "status": status, "seconds": seconds, "message": message}
        data["lessons"].append(lesson | {"code": code_of(source)})
        data["claims"] += decided
        data["runs"] += [{"lesson": source.stem, **run} for run in record.get("runs", [])]
        count = Counter(claim["verdict"] for claim in decided)
        verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict if count[verdict]) or "no verdict"
        say(f"        {status} in {seconds:.0f} s: {verdicts}" + (f"\n        {message}" if message else ""))
    write_whole(out / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
    report(out)
    return data


def find_lessons(lessons: Iterable[str | Path] = ()) -> list[Path]:
    """The notebooks of the lessons named by number ("05"), name or path, in order; of all where none is named.

    Raises:
        ValueError: no such lesson, with the nearest; or a folder without lessons.
    """
    known = {path.stem: path.resolve() for path in sorted(LESSONS.glob("[0-9][0-9]_*.ipynb"))}
    found = {}
    for lesson in lessons or known:
        path = Path(lesson)
        if path.suffix == ".ipynb" and path.is_file():
            found[path.stem] = path.resolve()
            continue
        number = f"{int(path.name):02}_" if path.name.isdecimal() else "?"
        match = [name for name in known if name.startswith(number) or path.name in (name, name.partition("_")[2])]
        found |= {name: known[name] for name in match}
        if known and not match:
            raise ValueError(f"there is no lesson {shown(str(lesson))} in {LESSONS}. {nearest_text(path.stem, known)}")
    if not found:
        raise ValueError(f"there are no lessons (NN_name.ipynb) in {LESSONS}: run `make lessons`")
    return [found[name] for name in sorted(found)]
