"""The library matrix: run the course with the oldest and newest libraries that pyproject.toml admits, and some between.

python benchmarks/matrix.py                        every set of matrix.toml, all lessons, then results/matrix.json
python benchmarks/matrix.py --lessons 05,06        some lessons
python benchmarks/matrix.py --sets oldest newest   some sets; the record keeps the results of the others
python benchmarks/matrix.py --again oldest         run a set even if nothing has changed
python benchmarks/build.py                         make the page from the record

Each set has a folder in build/matrix: `environment`, made by venv and pip (5 GB with torch's CUDA build);
`course/<lesson>`, the output of `perf-helpers course`; and `rehearsal.json` by matrix_rehearsal.py. All sets run the
same source tree. A lesson that ran with the same packages and the same tree is not repeated, even if the environment
was deleted meanwhile. An interrupted matrix therefore continues, and lessons can be added. A set that pip cannot
install is recorded with pip's reason, and the other sets are run.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name
from runner import RESULTS, now, read_record, write_record

from perf_helpers.compare.compare import compare, keyed
from perf_helpers.course.course import find_lessons
from perf_helpers.course.results import load_results
from trainmem.core import hardware

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SETS = HERE / "matrix.toml"
RECORD = RESULTS / "matrix.json"
BUILD = ROOT / "build" / "matrix"
# The files that affect results: if one has changed, earlier results of a set do not count.
SOURCES = ("pyproject.toml", "perf_helpers/**/*", "notebooks/*.ipynb", "benchmarks/matrix_rehearsal.py")
KEPT_OF_MEMORY = ("peak_bytes", "reserved_bytes", "peak_phase", "peak_operation", "breakdown")
PROFILE = "cpu"
REHEARSAL = "rehearsal"  # a set runs it in addition to the lessons


class NotInstalled(Exception):
    """pip could not install a set; the message has pip's reason."""


@dataclass(frozen=True)
class LibrarySet:
    """A set of libraries from matrix.toml: its name, a description, and the requirements for pip."""

    name: str
    what: str
    packages: tuple[str, ...]  # requirements for pip
    constraints: str | None = None  # path of a file in the repository
    higher: dict[str, str] = field(default_factory=dict)  # {a package above pyproject's lower bound: why}

    @property
    def is_open(self) -> bool:
        """Return whether the set pins no versions, so that pip may install other versions on another day."""
        return not self.packages and not self.constraints

    def wanted(self) -> list[str]:
        """Return the set's requirements for pip, including the pins of a constraints file."""
        return [*self.packages, *([(ROOT / self.constraints).read_text()] if self.constraints else [])]


def library_sets() -> list[LibrarySet]:
    """Return the library sets of matrix.toml, the oldest first.

    Versions are not checked here: at installation pip refuses those that pyproject.toml does not admit.
    """
    rows = tomllib.loads(SETS.read_text(encoding="utf-8"))["set"]
    return [LibrarySet(**row | {"packages": tuple(row["packages"])}) for row in rows]


def source_hash(root: Path = ROOT) -> str:
    """Return a hash of the files below `root` that affect the results of a course run."""
    found = sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()})
    state = hashlib.sha256()
    for path in (path for path in found if "__pycache__" not in path.parts):
        state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:12]


# ---- environments


class Environments:
    """Install and run sets of libraries, each set in its own folder below `folder`."""

    def __init__(self, folder: Path = BUILD):
        self.folder = folder

    def install(self, one: LibrarySet) -> None:
        """Make the environment of a library set, unless there is one with the same requirements.

        Raises:
            NotInstalled: pip refused.
        """
        home = self.folder / one.name / "environment"
        made, requirements = home / "packages.txt", "\n".join([f"python {platform.python_version()}", *one.wanted()])
        if made.exists() and made.read_text() == requirements and not one.is_open:
            return
        if not (one.is_open and self.python(one).exists()):
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
        made.unlink(missing_ok=True)
        command = [self.python(one), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["-e", f"{ROOT}[course]"]
        command += [*one.packages, *(["-c", ROOT / one.constraints] if one.constraints else [])]
        command += ["--upgrade", "--upgrade-strategy", "eager"] if one.is_open else []
        done = subprocess.run(command, capture_output=True, text=True, env=self._variables(one))
        if done.returncode:
            raise NotInstalled(pip_reason(done.stderr))
        made.write_text(requirements)

    def packages(self, one: LibrarySet) -> dict[str, str]:
        """Return {package: exact version} of all packages installed for the set; torch's version includes its build."""
        command = [self.python(one), "-m", "pip", "list", "--format=json", "--exclude-editable"]
        done = self._run(one, command, check=True)
        found = {canonicalize_name(row["name"]): row["version"] for row in json.loads(done.stdout)}
        code = "from trainmem.core.hardware import torch_build; print(torch_build()[0])"
        return found | {"torch": self._run(one, [self.python(one), "-c", code], check=True).stdout.strip()}

    def course(self, one: LibrarySet, lesson: str) -> dict:
        """Run a lesson in the set's environment and return its results, the content of results.json.

        Raises:
            ValueError: the lesson wrote no results; the message has its exit code.
        """
        out = self.folder / one.name / "course" / lesson
        shutil.rmtree(out, ignore_errors=True)
        command = [self.python(one), "-m", "perf_helpers.cli", "course", lesson]
        command += ["--profile", PROFILE, "--no-speeds", "--out", out]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=self._variables(one))
        try:
            return load_results(out)
        except ValueError as error:
            raise ValueError(f"the course ended with exit code {done.returncode}: {error}") from None

    def rehearsal(self, one: LibrarySet) -> dict:
        """Return the results of matrix_rehearsal.py with a library set; if it fails, {"not_rehearsed": reason}."""
        out = self.folder / one.name / "rehearsal.json"
        out.unlink(missing_ok=True)
        done = self._run(one, [self.python(one), HERE / "matrix_rehearsal.py", out])
        if done.returncode:
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            return {"not_rehearsed": plain(reason)}
        return load_results(out)

    def python(self, one: LibrarySet) -> Path:
        return self.folder / one.name / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"

    def _run(self, one: LibrarySet, command: list, **options) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True, env=self._variables(one), **options)

    def _variables(self, one: LibrarySet) -> dict[str, str]:
        """Return {name: value} of the environment variables for a library set's processes.

        PYTHONPATH is removed, so that the processes import only packages of the set's environment. PERF_HELPERS_HOME is
        the set's own cache of runs and operations.
        """
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return environment | {"PERF_HELPERS_HOME": str(self.folder / one.name / "home")}


def pip_reason(stderr: str) -> str:
    """Return pip's errors in one line, without addresses; `stderr` is what pip printed."""
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR: ")]
    known = [line for line in lines if not line.startswith(("Ignored the following", "ResolutionImpossible"))]
    return plain("; ".join(known or lines or stderr.strip().splitlines()[-1:]) or "pip gave no reason")


def plain(text: str) -> str:
    """Return a message without this machine's paths and without addresses, shortened."""
    text = re.sub(
        r"(?:https?|file)://\S+|host='[^']*'", "...", text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    )
    return text if len(text) <= 500 else f"{text[:500]} ..."


# ---- runs


def run(one: LibrarySet, lessons: list[str], environments: Environments, again: bool = False) -> dict:
    """Run lessons and the rehearsal with a library set, unless an earlier call did; return the set's results.

    The results have the keys that `became` describes. The set's `done.json` keeps what ran, so that an interrupted call
    can continue: {"key": the result of `state`, "packages": {package: version}, "date", "ran": {lesson or REHEARSAL:
    results}}.

    `again`: repeat lessons and rehearsal even if an earlier call ran them.
    """
    known, jobs = done(one, environments), [*lessons, REHEARSAL]
    if known and again:
        known["ran"] = {name: found for name, found in known["ran"].items() if name not in jobs}
    if known and known["ran"].keys() >= {*jobs}:
        return became(one, lessons, known)
    try:
        say(f"{one.name}: installing")
        environments.install(one)
        packages = environments.packages(one)
        if known.get("packages") != packages:  # earlier results are of other versions
            known = {"key": state(one), "packages": packages, "date": now(), "ran": {}}
        say(f"{one.name}: torch {packages['torch']}, transformers {packages['transformers']}")
        for name in (name for name in jobs if name not in known["ran"]):
            rehearses = name == REHEARSAL
            known["ran"][name] = environments.rehearsal(one) if rehearses else environments.course(one, name)
            write_record(environments.folder / one.name / "done.json", known)
    except NotInstalled as error:
        return became(one, lessons, {}, "not installed", str(error))
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        return became(one, lessons, known, "not run", plain(str(error)))
    return became(one, lessons, known)


def became(one: LibrarySet, lessons: list[str], known: dict, status: str = "ok", message: str = "") -> dict:
    """Return the entry of a library set: its description, its versions, and the results of its lessons and rehearsal.

    The keys are "name" and "what" (name and description of the set), "status" and "message" (as given), "packages"
    ({package: installed version}), "date" (when the set ran), and "course" and "rehearsal" (results as in results.json,
    or None). If "rehearsal" is None, "not_rehearsed" has the reason.

    Args:
        one: the set.
        lessons: names of the lessons in "course".
        known: content of the set's `done.json`.
        status: "ok", "not installed" or "not run".
        message: why the set did not run; "" if it did.
    """
    entry = {"name": one.name, "what": one.what, "status": status, "message": message}
    entry |= {"date": known.get("date", now()), "packages": known.get("packages", {})}
    rehearsed = known.get("ran", {}).get(REHEARSAL, {})
    reason = rehearsed.get("not_rehearsed", "")
    ran = [known["ran"][lesson] for lesson in lessons] if status == "ok" else []
    parts = {part: [each for data in ran for each in data[part]] for part in ("lessons", "claims", "runs")}
    course = ran[-1] | parts if ran else None
    return entry | {"course": course, "rehearsal": None if reason else rehearsed or None, "not_rehearsed": reason}


def done(one: LibrarySet, environments: Environments) -> dict:
    """Return the content of a set's `done.json`, or {} if it is missing or anything that the results depend on has
    changed since.
    """
    try:
        known = read_record(environments.folder / one.name / "done.json")
        return known if known["key"] == state(one) else {}
    except (OSError, ValueError, LookupError):  # missing, or cut off
        return {}


def state(one: LibrarySet) -> str:
    """Return a hash of everything that a set's results depend on; the same state is not run twice.

    For a set without pins it includes the date.
    """
    parts = [one.name, *one.wanted(), platform.python_version(), source_hash(), PROFILE]
    parts += [json.dumps(tomllib.loads(SETS.read_text(encoding="utf-8")).get("rehearsal", []))]
    parts += [now()[:10]] if one.is_open else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the record


def record(rows: list[dict], lessons: list[str], note: str = "") -> dict:
    """Return the content of results/matrix.json from the entries of all library sets.

    It has the versions, lessons and claims of each set, the memory of those runs whose memory differs between sets, the
    memory of the rehearsed trainings, and the differences between each set and the next set whose lessons ran.

    Args:
        rows: the entry of each library set, see `became`.
        lessons: names of the lessons that were run.
        note: a remark for readers of the record.
    """
    ran = [row for row in rows if row["course"]]
    claims: dict[str, dict] = {}
    for row in ran:
        for claim in row["course"]["claims"]:
            entry = {name: claim[name] for name in ("verdict", "as_expected", "value", "interval")}
            claims.setdefault(claim["id"], {"lesson": claim["lesson"]})[row["name"]] = entry
    counted = _sizes({row["name"]: row["course"]["runs"] for row in ran})
    rehearsed = {row["name"]: row["rehearsal"]["runs"] for row in ran if row["rehearsal"]}
    differing = {id: sizes for id, sizes in counted.items() if len(set(map(json.dumps, sizes.values()))) > 1}
    return {
        "what": "the course under several sets of libraries, each in an environment of its own",
        "machine": ran[0]["course"]["machine"]["name"] if ran else hardware.describe().name,
        "python": platform.python_version(),
        "profile": PROFILE,
        "date": now(),
        "note": note,
        "source": source_hash(),
        "lessons": lessons,
        "sets": [_set(row) for row in rows],
        "claims": claims,
        "runs": len(counted),
        "memory": differing,
        "rehearsed": _sizes(rehearsed),
        "between": [_between(old, new) for old, new in itertools.pairwise(ran)],
    }


def _set(row: dict) -> dict:
    """Return the facts of one library set for the record's list "sets", without claims and sizes.

    They are the set's description, status, date and package versions, and {"status", "message"} of each of its lessons.

    `row`: all results of the set, as `became` returns them.
    """
    entry = {name: row[name] for name in ("name", "what", "status", "message", "not_rehearsed", "date", "packages")}
    lessons = row["course"]["lessons"] if row["course"] else []
    return entry | {"lessons": {x["name"]: {"status": x["status"], "message": plain(x["message"])} for x in lessons}}


def _sizes(runs: dict[str, list[dict]]) -> dict[str, dict[str, dict]]:
    """Return {run: {library set: memory}} of all runs whose memory was measured or that failed.

    If a run failed with a library set, {"status", "message"} replaces the memory. A run has the same name in all sets.

    `runs`: {library set: its runs, as in results.json}.
    """
    found: dict[str, dict[str, dict]] = {}
    for name, rows in runs.items():
        for id, run in keyed(rows):
            if memory := run.get("memory"):
                found.setdefault(id, {})[name] = {part: memory.get(part) for part in KEPT_OF_MEMORY}
            elif run["status"] != "ok":
                found.setdefault(id, {})[name] = {"status": run["status"], "message": plain(run["message"])}
    return found


def _between(old: dict, new: dict) -> dict:
    """Return the differences between two library sets.

    The keys are "old" and "new" (the sets' names), "packages" ({package: [old version, new version]} if they differ),
    "changes" (differences of the lessons' results, found by `perf_helpers.compare.compare`) and "rehearsed"
    (differences of the rehearsals' results; None unless both sets have a rehearsal).

    `old`, `new`: the entries of the two sets, see `became`.
    """
    names = sorted(old["packages"].keys() | new["packages"].keys())
    pairs = {name: [row["packages"].get(name) for row in (old, new)] for name in names}
    entry = {
        "old": old["name"],
        "new": new["name"],
        "packages": {n: pair for n, pair in pairs.items() if pair[0] != pair[1]},
    }
    entry["changes"] = compare(old["course"], new["course"]).changes
    both = old["rehearsal"] and new["rehearsal"]
    return entry | {"rehearsed": compare(old["rehearsal"], new["rehearsal"]).changes if both else None}


def main(arguments: list[str] | None = None, environments: Environments | None = None) -> int:
    """Run the library sets and write the record. Return the exit code: 1 if a set, or a lesson of a set, did not run.

    Args:
        arguments: words of the command line; None: `sys.argv[1:]`.
        environments: the object that installs and runs the sets; None: one that works in the folder build/matrix.
    """
    parser = argparse.ArgumentParser(description="Run the course under several sets of libraries; record what differs.")
    known = library_sets()
    names = [one.name for one in known]
    parser.add_argument("--lessons", default="all", help="all, or numbers as 05,06")
    parser.add_argument("--sets", nargs="+", choices=names, default=names, help="of matrix.toml; default: all")
    parser.add_argument("--again", nargs="*", choices=names, help="run these, or all, also if nothing changed")
    parser.add_argument("--note", default="", help="what a reader of the record should know, e.g. what ran beside it")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    wanted = () if options.lessons == "all" else options.lessons.split(",")
    lessons = [path.stem for path in find_lessons(wanted)]
    environments, rows = environments or Environments(), []
    again = names if options.again == [] else options.again or ()
    for one in known:
        if one.name in options.sets:
            rows.append(run(one, lessons, environments, one.name in again))
        else:
            before = done(one, environments)
            ran = before.get("ran", {}).keys() >= {*lessons}
            rows.append(became(one, lessons, before) if ran else became(one, lessons, {}, "not run", "not requested"))
    made = record(rows, lessons, options.note)
    write_record(options.out, made)
    print(options.out)
    trouble = []
    for row in (row for row in made["sets"] if row["name"] in options.sets):
        failed = [(name, lesson) for name, lesson in row["lessons"].items() if lesson["status"] != "ok"]
        trouble += [f"{row['name']}: {row['status']}, {row['message']}"] if row["status"] != "ok" else []
        trouble += [f"{row['name']}: {name} {lesson['status']}, {lesson['message']}" for name, lesson in failed]
    say("\n".join(trouble) or "every lesson ran in every requested set")
    return int(bool(trouble))


if __name__ == "__main__":
    sys.exit(main())
