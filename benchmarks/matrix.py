"""The library matrix: the course under the oldest and the newest libraries pyproject.toml admits, some between.

python benchmarks/matrix.py                        every set of matrix.toml, all lessons, then results/matrix.json
python benchmarks/matrix.py --lessons 05,06        a part of the course
python benchmarks/matrix.py --sets oldest newest   those only: another day the others, and the record has all of them
python benchmarks/matrix.py --again oldest         also if nothing changed since it ran
python benchmarks/build.py                         the page, and what lessons say of versions, from the record

Each set has a folder in build/matrix: `environment`, made by venv and pip (5 GB where torch is its CUDA build);
`course/<lesson>`, as `perf-helpers course` leaves it; `rehearsal.json` by matrix_rehearsal.py. All run the same source
tree. A lesson that ran with the same list of packages and the same tree is not run again, also when the environment has
been removed since; so an interrupted matrix goes on, and more lessons can be added. A set that pip cannot install is
recorded with pip's reason, and the others go on.
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
# What decides what is measured; where it differs, what a set ran is not of this tree.
SOURCES = ("pyproject.toml", "perf_helpers/**/*", "notebooks/*.ipynb", "benchmarks/matrix_rehearsal.py")
KEPT_OF_MEMORY = ("peak_bytes", "reserved_bytes", "peak_phase", "peak_operation", "breakdown")
PROFILE = "cpu"
REHEARSAL = "rehearsal"  # beside the lessons, what a set runs


class NotInstalled(Exception):
    """pip could not install a set; with its reason."""


@dataclass(frozen=True)
class LibrarySet:
    """A set of libraries, as matrix.toml has it."""

    name: str
    what: str
    packages: tuple[str, ...]  # as pip takes them
    constraints: str | None = None  # a file of the repository
    higher: dict[str, str] = field(default_factory=dict)  # {a package above pyproject's lower bound: why}

    @property
    def is_open(self) -> bool:
        """Whether its versions are those of the day: nothing pins them."""
        return not self.packages and not self.constraints

    def wanted(self) -> list[str]:
        """What pip is asked for, one line each; pins of a constraints file included."""
        return [*self.packages, *([(ROOT / self.constraints).read_text()] if self.constraints else [])]


def library_sets() -> list[LibrarySet]:
    """The sets of matrix.toml, the oldest first. What pyproject.toml does not admit in them, pip refuses."""
    rows = tomllib.loads(SETS.read_text(encoding="utf-8"))["set"]
    return [LibrarySet(**row | {"packages": tuple(row["packages"])}) for row in rows]


def source_hash(root: Path = ROOT) -> str:
    """A hash of the files that decide what is measured."""
    found = sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()})
    state = hashlib.sha256()
    for path in (path for path in found if "__pycache__" not in path.parts):
        state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:12]


# ---- environments


class Environments:
    """Where sets are installed and run; each in a folder of its own below `folder`."""

    def __init__(self, folder: Path = BUILD):
        self.folder = folder

    def install(self, one: LibrarySet) -> None:
        """Make the set's environment, unless it is there with the same list.

        Raises:
            NotInstalled: pip refused.
        """
        home = self.folder / one.name / "environment"
        made, asked = home / "packages.txt", "\n".join([f"python {platform.python_version()}", *one.wanted()])
        if made.exists() and made.read_text() == asked and not one.is_open:
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
        made.write_text(asked)

    def packages(self, one: LibrarySet) -> dict[str, str]:
        """The exact versions of everything that is installed, torch with its build."""
        command = [self.python(one), "-m", "pip", "list", "--format=json", "--exclude-editable"]
        done = self._run(one, command, check=True)
        found = {canonicalize_name(row["name"]): row["version"] for row in json.loads(done.stdout)}
        code = "from trainmem.core.hardware import torch_build; print(torch_build()[0])"
        return found | {"torch": self._run(one, [self.python(one), "-c", code], check=True).stdout.strip()}

    def course(self, one: LibrarySet, lesson: str) -> dict:
        """The results of a lesson in the set's environment.

        Raises:
            ValueError: it left none; with its exit code.
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
        """The results of matrix_rehearsal.py in the set's environment; where it cannot, {"not_rehearsed": why}."""
        out = self.folder / one.name / "rehearsal.json"
        out.unlink(missing_ok=True)
        done = self._run(one, [self.python(one), HERE / "matrix_rehearsal.py", out])
        if done.returncode:
            why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            return {"not_rehearsed": plain(why)}
        return load_results(out)

    def python(self, one: LibrarySet) -> Path:
        return self.folder / one.name / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"

    def _run(self, one: LibrarySet, command: list, **options) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True, env=self._variables(one), **options)

    def _variables(self, one: LibrarySet) -> dict[str, str]:
        """Each set keeps runs, and what it learnt of operations, to itself, and takes no code from elsewhere."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {"PERF_HELPERS_HOME": str(self.folder / one.name / "home")}


def pip_reason(stderr: str) -> str:
    """What pip says when it gives up: its errors, without addresses and in one line."""
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR: ")]
    known = [line for line in lines if not line.startswith(("Ignored the following", "ResolutionImpossible"))]
    return plain("; ".join(known or lines or stderr.strip().splitlines()[-1:]) or "pip gave no reason")


def plain(text: str) -> str:
    """A message without this machine's folders and without addresses, and not too long to read."""
    text = re.sub(
        r"(?:https?|file)://\S+|host='[^']*'", "...", text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    )
    return text if len(text) <= 500 else f"{text[:500]} ..."


# ---- runs


def run(one: LibrarySet, lessons: list[str], environments: Environments, again: bool = False) -> dict:
    """What became of a set, as `became` says it, which runs what is not known of an earlier call.

    What ran is kept in `done.json` beside it: {"key", "packages", "date", "ran": {lesson or REHEARSAL: results}}.
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
        if known.get("packages") != packages:  # what was known is of other versions
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
    """{"name", "what", "status", "message", "packages", "date", "course", "rehearsal", "not_rehearsed"} of a set.

    `status` is "ok", "not installed" or "not run"; `course` and `rehearsal` are results, or None, the latter with the
    reason in "not_rehearsed".
    """
    told = {"name": one.name, "what": one.what, "status": status, "message": message}
    told |= {"date": known.get("date", now()), "packages": known.get("packages", {})}
    rehearsed = known.get("ran", {}).get(REHEARSAL, {})
    why = rehearsed.get("not_rehearsed", "")
    ran = [known["ran"][lesson] for lesson in lessons] if status == "ok" else []
    parts = {part: [each for data in ran for each in data[part]] for part in ("lessons", "claims", "runs")}
    course = ran[-1] | parts if ran else None
    return told | {"course": course, "rehearsal": None if why else rehearsed or None, "not_rehearsed": why}


def done(one: LibrarySet, environments: Environments) -> dict:
    """What an earlier call kept of a set, if it is of the same state; else nothing."""
    try:
        known = read_record(environments.folder / one.name / "done.json")
        return known if known["key"] == state(one) else {}
    except (OSError, ValueError, LookupError):  # there is none, or it was cut off
        return {}


def state(one: LibrarySet) -> str:
    """What a set's results depend on, as a hash: the same state is not run twice. A set that nothing pins is of its
    day."""
    parts = [one.name, *one.wanted(), platform.python_version(), source_hash(), PROFILE]
    parts += [json.dumps(tomllib.loads(SETS.read_text(encoding="utf-8")).get("rehearsal", []))]
    parts += [now()[:10]] if one.is_open else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the record


def record(rows: list[dict], lessons: list[str], note: str = "") -> dict:
    """What stands in results/matrix.json, from what became of the sets: versions, lessons, claims in each set, the
    memory of runs that differs, the rehearsed bytes, and what differs between each set and the next that ran."""
    ran = [row for row in rows if row["course"]]
    claims: dict[str, dict] = {}
    for row in ran:
        for claim in row["course"]["claims"]:
            told = {name: claim[name] for name in ("verdict", "as_expected", "value", "interval")}
            claims.setdefault(claim["id"], {"lesson": claim["lesson"]})[row["name"]] = told
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
    """What the record says of a set, less what it measured."""
    told = {name: row[name] for name in ("name", "what", "status", "message", "not_rehearsed", "date", "packages")}
    lessons = row["course"]["lessons"] if row["course"] else []
    return told | {"lessons": {x["name"]: {"status": x["status"], "message": plain(x["message"])} for x in lessons}}


def _sizes(runs: dict[str, list[dict]]) -> dict[str, dict[str, dict]]:
    """{run: {set: its memory}} of every run that has one, by the name that it has in all sets."""
    found: dict[str, dict[str, dict]] = {}
    for name, rows in runs.items():
        for id, run in keyed(rows):
            if memory := run.get("memory"):
                found.setdefault(id, {})[name] = {part: memory.get(part) for part in KEPT_OF_MEMORY}
            elif run["status"] != "ok":
                found.setdefault(id, {})[name] = {"status": run["status"], "message": plain(run["message"])}
    return found


def _between(old: dict, new: dict) -> dict:
    """What differs between two sets that ran: packages, and every change of the course and of the rehearsal."""
    names = sorted(old["packages"].keys() | new["packages"].keys())
    pairs = {name: [row["packages"].get(name) for row in (old, new)] for name in names}
    told = {
        "old": old["name"],
        "new": new["name"],
        "packages": {n: pair for n, pair in pairs.items() if pair[0] != pair[1]},
    }
    told["changes"] = compare(old["course"], new["course"]).changes
    both = old["rehearsal"] and new["rehearsal"]
    return told | {"rehearsed": compare(old["rehearsal"], new["rehearsal"]).changes if both else None}


def main(arguments: list[str] | None = None, environments: Environments | None = None) -> int:
    """Run the sets and write the record; the exit code: 1 where a set or a lesson in one did not run."""
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
            rows.append(became(one, lessons, before) if ran else became(one, lessons, {}, "not run", "not asked for"))
    made = record(rows, lessons, options.note)
    write_record(options.out, made)
    print(options.out)
    trouble = []
    for row in (row for row in made["sets"] if row["name"] in options.sets):
        failed = [(name, lesson) for name, lesson in row["lessons"].items() if lesson["status"] != "ok"]
        trouble += [f"{row['name']}: {row['status']}, {row['message']}"] if row["status"] != "ok" else []
        trouble += [f"{row['name']}: {name} {lesson['status']}, {lesson['message']}" for name, lesson in failed]
    say("\n".join(trouble) or "every lesson ran in every set that was asked for")
    return int(bool(trouble))


if __name__ == "__main__":
    sys.exit(main())
