"""Run the course as a test: execute the lessons, write the verdicts on their claims to results.json, make the report.

A lesson that fails or hangs does not stop the others. `ledger.Verdict` lists the verdicts.
"""

import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from perf_helpers.course import course_server
from perf_helpers.course.ledger import Verdict
from perf_helpers.course.lesson_process import code_of, notify, run_lesson
from perf_helpers.course.report import lesson_page, report
from perf_helpers.course.results import SCHEMA
from trainmem.core import hardware
from trainmem.core.task import TINY, choose_profile
from trainmem.estimate import facts
from trainmem.measure import quiet
from trainmem.records import now, write_whole
from trainmem.texts import nearest_text, positive, shown, whole_number

# Modules that a lesson's process and its kernel import in addition to those of an experiment.
PRELOAD = ("papermill.cli", "ipykernel.kernelapp", "matplotlib.pyplot", "perf_helpers.course.claims")
BACKEND = "module://matplotlib_inline.backend_inline"
# The smallest sizes only test that lessons run. A pool of compilers would compile headers twice, and for six seconds
# inductor would test which instructions this CPU has.
AT_SMALLEST = {quiet.UNTIMED: "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
FIRST = ("12", "15", "16")  # of lessons in parallel these begin first: they wait most, as they time several processes
LESSONS = Path(__file__).resolve().parents[2] / "notebooks"


def run_course(
    lessons: Iterable[str | Path] = (),
    profile: str = "auto",
    strict: bool = False,
    out: str | Path = "build/course",
    timeout_per_lesson: float = 900,
    at_once: int | None = None,
    at_the_end: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Execute lessons, write the report into `out`, and return the content of results.json.

    Lessons that run in parallel share the machine, except while one of them times something: then the others wait.

    Args:
        lessons: numbers, names or paths, as for `find_lessons` (default: all lessons).
        profile: the sizes of models and batches; "auto" picks a profile by the machine's memory.
        strict: fail a lesson if the verdict on a claim is not one that the ledger of claims (claims.toml) expects.
        timeout_per_lesson: seconds after which a lesson is ended; set it to several times the time of the slowest one.
        at_once: lessons that run in parallel; None: up to four on a CPU with enough cores and memory, otherwise one.
        at_the_end: called with the profile's name after the report is written; its result is returned as item "paces".

    Raises:
        ValueError: a lesson or the profile does not exist, or `out` is the folder of the lessons themselves.
    """
    sources = find_lessons(lessons)
    positive("timeout", timeout_per_lesson)
    choose_profile(profile)
    at_once = _at_once() if at_once is None else whole_number("at_once", at_once)
    out = Path(out).resolve()
    if any(source.parent == out for source in sources):
        raise ValueError(f"--out {out} is the folder of the lessons themselves: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA, "date": now()}
    data |= {"machine": hardware.describe().to_dict(), "versions": hardware.versions()}
    data |= {"profile": profile, "strict": strict, "lessons": [], "claims": [], "runs": []}
    cores = hardware.describe().cpu_cores or 1
    lock, stopped, start = quiet.QuietLock(cores), threading.Event(), time.monotonic()
    pages: dict[str, dict[str, Any]] = {}  # {lesson: its page of the report}, made when the lesson has ended

    def run_one(number: int, source: Path, environment: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run one lesson; return (its entry in results.json, content of the JSON file that the lesson wrote).

        `number`: place of the lesson in this course run; `environment`: variables in addition to this process's.
        """
        lock.take(source.stem, quiet.Need.SHARE, threads)
        notify(f"[{number:2}/{len(sources)}] {source.stem} ...")
        started = time.monotonic()
        try:
            status, message, record = run_lesson(source, out, profile, strict, timeout_per_lesson, environment, stopped)
            pages[source.stem] = lesson_page(out, source.stem)
        finally:
            lock.leave(source.stem)
        seconds = round(time.monotonic() - started, 1)
        count = Counter(claim["verdict"] for claim in record.get("claims", []))
        verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict if count[verdict]) or "no verdict"
        name = f"{source.stem}: " if at_once > 1 else ""
        notify(f"        {name}{status} in {seconds:.0f} s: {verdicts}" + (f"\n        {message}" if message else ""))
        lesson = {"name": source.stem, "status": status, "seconds": seconds, "message": message}
        for name, of_lessons in (("alone", lock.alone_seconds), ("waited", lock.waited_seconds)):
            lesson[f"{name}_seconds"] = round(of_lessons[source.stem], 1)
        return lesson | {"code": code_of(source)}, record

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory("-facts", ignore_cleanup_errors=True))
        variables = {facts.FOLDER: folder}
        variables |= AT_SMALLEST if profile == TINY.name else {}  # inductor reads its own when the server imports it
        server = variables | stack.enter_context(course_server.shared(PRELOAD, {"MPLBACKEND": BACKEND} | variables))
        address = stack.enter_context(quiet.served(lock)) if at_once > 1 else ""
        threads = max(1, cores // at_once)
        own = [server | (quiet.entry(source.stem, threads, address) if address else {}) for source in sources]
        stack.enter_context(_terminated_as_interrupted())
        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        order = sorted(zip(sources, own, strict=True), key=lambda one: at_once == 1 or one[0].stem[:2] not in FIRST)
        try:
            running = {one: pool.submit(run_one, number, one, each) for number, (one, each) in enumerate(order, 1)}
            done = [running[source].result() for source in sources]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        data["seconds"] = round(time.monotonic() - start, 1)
        for lesson, record in done:
            data["lessons"].append(lesson)
            data["claims"] += record.get("claims", [])
            data["runs"] += [{"lesson": lesson["name"], **run} for run in record.get("runs", [])]
        write_whole(out / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
        report(out, pages)
        if at_the_end:
            with patch.dict(os.environ, server):  # experiments are forked from the course's server
                data["paces"] = at_the_end(profile)
    return data


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM (a cancelled CI job) as Ctrl-C: the lessons under way are ended, not orphaned."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _at_once() -> int:
    """Return how many lessons to run in parallel: up to four on a CPU with two cores or more, otherwise one."""
    machine = hardware.describe()
    if machine.kind != "cpu" or (machine.cpu_cores or 1) < 2:
        return 1
    # Four, because lessons often wait while another is timed; at most one per 4 GiB of available memory.
    return max(1, min(4, machine.cpu_cores + 2, psutil.virtual_memory().available // (4 * 2**30)))


def find_lessons(lessons: Iterable[str | Path] = ()) -> list[Path]:
    """Return the notebooks of the given lessons, sorted by name; if none are given, the notebooks of all lessons.

    Args:
        lessons: numbers ("05"), names or paths.

    Raises:
        ValueError: a lesson does not exist (the message suggests the nearest name), or the folder has no lessons.
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
