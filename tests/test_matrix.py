"""The library matrix, benchmarks/matrix.py: its sets of library versions, and how they are run, recorded and shown.

The environments are stubs, except one in which pip fails.
"""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from scripts import RESULTS, script

from perf_helpers.course import ledger

ROOT = Path(__file__).resolve().parents[1]
MEMORY = "accumulation-memory"
LESSON = "05_gradient_accumulation"
NAMES = ("oldest", "between", "tested", "newest")


@pytest.fixture(scope="module")
def matrix():
    return script("matrix")


@pytest.fixture(scope="module")
def page():
    return script("matrix_page")


@pytest.fixture(scope="module")
def every_set(matrix):
    return matrix.library_sets()


@pytest.fixture(autouse=True)
def four_sets(matrix, every_set, monkeypatch):
    """Use four of the library sets, which are enough to test how they are run and recorded."""
    monkeypatch.setattr(matrix, "library_sets", lambda: [one for one in every_set if one.name in NAMES])


# ---- sets


def test_sets_go_from_the_oldest_to_the_newest_that_pyproject_admits(every_set):
    sets = every_set
    assert sets[0].name == "oldest" and sets[-1].is_open and {"torch 2.14"} < {one.name for one in sets}
    torches = [next(p.split("===")[1] for p in one.packages if p.startswith("torch=")) for one in sets[:-1]]
    assert torches == sorted(torches, key=Version) and len(set(torches)) == len(sets) - 1
    (tested,) = [one for one in sets if one.constraints]
    assert f"torch=={torches[-1]}" in (ROOT / tested.constraints).read_text().splitlines()


def declared():
    """Return {name: requirement} of pyproject.toml's dependencies, including the course's dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["course"]]
    return {canonicalize_name(each.name): each for each in map(Requirement, needed)}


def lower_bounds(ranges):
    """Return {dependency: the lowest version that its range admits}; `ranges` is {dependency: its requirement}, as
    `declared` returns it.
    """
    bounds = {
        name: [s.version for s in requested.specifier if s.operator == ">="] for name, requested in ranges.items()
    }
    return {name: Version(versions[0]) for name, versions in bounds.items() if versions}


def test_the_oldest_set_has_the_lower_bound_of_every_dependency_or_says_why_not(matrix):
    oldest, bounds = matrix.library_sets()[0], lower_bounds(declared())
    pins = dict(pin.replace("===", "==").split("==") for pin in oldest.packages)
    assert bounds.keys() == pins.keys() == declared().keys()
    above = {name for name, bound in bounds.items() if Version(pins[name]) != bound}
    assert above == oldest.higher.keys() and all(oldest.higher.values())


def test_each_set_has_a_name_of_its_own_and_only_what_pyproject_lists_and_admits(every_set):
    sets = every_set
    assert len({one.name for one in sets}) == len(sets)
    ranges = declared()
    for pin in (Requirement(pin) for one in sets for pin in one.packages):
        (exact,) = pin.specifier
        assert exact.version in ranges[canonicalize_name(pin.name)].specifier, pin


# ---- runs


def claim(id, verdict="holds", value=0.5):
    found = ledger.load()[id]
    row = {"id": id, "lesson": LESSON, "verdict": verdict, "value": value, "interval": None, "as_expected": True}
    return row | {"quantity": found.quantity, "expected": ["holds"], "threshold": "", "reason": ""}


def training(name="vanilla", activations=600, operation="aten.mm.default"):
    breakdown = {"weights": 400, "activations": activations}
    memory = {"peak_bytes": sum(breakdown.values()), "kind": "counted", "breakdown": breakdown, "reserved_bytes": None}
    memory |= {"peak_phase": "backward", "peak_operation": operation}
    return {"lesson": LESSON, "name": name, "status": "ok", "kind": "training", "memory": memory}


def results(claims=(), runs=(), status="ok", message="", lesson=LESSON):
    machine = {"name": "CPU, 2 cores", "kind": "cpu", "gpus": []}
    data = {"schema": 1, "date": "2026-11-23T00:00:00+00:00", "machine": machine, "versions": {}, "profile": "cpu"}
    lessons = [{"name": lesson, "status": status, "seconds": 1, "message": message}]
    return data | {"lessons": lessons, "claims": [*claims], "runs": [*runs]}


def rehearsed(size):
    run = training("BERT", activations=size) | {"lesson": "rehearsal"}
    run["memory"] |= {"kind": "allocated", "reserved_bytes": 2**21}
    return results(runs=[run], lesson="rehearsal")


class Made:
    """A stub of `Environments`: nothing is installed, and each library set gives the results in `found`.

    `calls` lists the names of the installed sets; `ran` lists (name of the set, lesson) for each lesson that was run.
    """

    def __init__(self, matrix, folder):
        self.matrix, self.folder, self.calls, self.ran = matrix, folder, [], []
        self.refused, self.silent = {}, {}
        self.found = {
            name: results([claim(MEMORY)], [training()]) for name in ("oldest", "between", "tested", "newest")
        }
        self.bytes = dict.fromkeys(self.found, 1000)

    def install(self, one):
        self.calls.append(one.name)
        if reason := self.refused.get(one.name):
            raise self.matrix.NotInstalled(reason)

    def packages(self, one):
        number = list(self.found).index(one.name)
        return {"torch": f"2.{11 + number}.0", "transformers": f"5.{15 + min(number, 2)}.0", "six": "1.17.0"}

    def course(self, one, lesson):
        self.ran.append((one.name, lesson[:2]))
        if one.name in self.silent:
            raise ValueError(self.silent[one.name])
        return self.found[one.name] if lesson == LESSON else results(lesson=lesson)

    def rehearsal(self, one):
        if self.bytes[one.name] is None:
            return {"not_rehearsed": "torch 2.13.0+cpu is no CUDA build"}
        return rehearsed(self.bytes[one.name])


@pytest.fixture
def made(matrix, tmp_path):
    return Made(matrix, tmp_path / "build")


@pytest.fixture
def run(matrix, made, tmp_path):
    """Return a function (words of the command line) that runs the matrix with stub environments and returns (exit
    code, record).
    """

    def run(*words):
        code = matrix.main(["--lessons", "05", "--out", str(tmp_path / "matrix.json"), *words], made)
        return code, json.loads((tmp_path / "matrix.json").read_text())

    return run


def test_a_record_has_every_set_with_its_versions_lessons_claims_and_bytes(run):
    code, record = run("--note", "beside nothing")
    assert code == 0 and record["lessons"] == [LESSON] and record["note"] == "beside nothing"
    assert [row["packages"]["torch"] for row in record["sets"]] == ["2.11.0", "2.12.0", "2.13.0", "2.14.0"]
    assert all(row["lessons"] == {LESSON: {"status": "ok", "message": ""}} for row in record["sets"])
    assert {record["claims"][MEMORY][row["name"]]["value"] for row in record["sets"]} == {0.5}
    assert record["memory"] == {} and record["runs"] == 1 and len(record["rehearsed"]["rehearsal/BERT"]) == 4
    assert [pair["changes"] + pair["rehearsed"] for pair in record["between"]] == [[], [], []]
    assert record["between"][2]["packages"] == {"torch": ["2.13.0", "2.14.0"]}


def test_what_differs_is_named_between_the_two_sets_that_differ(run, made, page):
    made.found["tested"] = results([claim(MEMORY, "refuted", 1.2)], [training(activations=700, operation="aten.add")])
    made.found["newest"] = made.found["tested"]
    made.bytes["newest"] = 1512
    _, record = run()
    kinds = [[change["kind"] for change in pair["changes"]] for pair in record["between"]]
    assert kinds == [[], ["verdict", "value", "memory"], []]
    assert {name: side["peak_bytes"] for name, side in record["memory"][f"{LESSON}/vanilla"].items()} == {
        "oldest": 1000,
        "between": 1000,
        "tested": 1100,
        "newest": 1100,
    }
    text = page.section(record)
    row = next(line for line in text.splitlines() if f"`{MEMORY}`" in line)
    assert row.endswith("| memory | **holds** (0.5) | **holds** (0.5) | **refuted** (1.2) | **refuted** (1.2) |")
    assert "0 of 1 claims" in text and "0 of 1 runs take the same bytes" in text
    moved = next(line for line in text.splitlines() if line.startswith(f"| between | tested | {LESSON}/vanilla |"))
    assert "activations +100 B" in moved and "aten.add" in moved
    assert next(line for line in text.splitlines() if line.startswith("| tested | newest | BERT |")).count("+512 B")


def test_runs_of_which_the_same_bytes_moved_stand_in_one_row(run, made, page):
    big = {"activations": 10**6}
    made.found["oldest"] = results([claim(MEMORY)], [training(), training("large", **big)])
    for name in NAMES[1:]:
        made.found[name] = results(
            [claim(MEMORY)], [training(activations=700), training("large", activations=10**6 + 100)]
        )
    text = page.section(run()[1])
    assert f"| oldest | between | {LESSON}/vanilla; {LESSON}/large | peak (+100 B): activations +100 B |" in text


def test_where_nothing_differs_the_page_says_so(run, page):
    text = page.section(run()[1])
    assert "1 of 1 claims have the same verdict" in text and "no byte of 1 runs differs" in text
    assert "No byte of them differs" in text and "| lessons that ran | 1 of 1 | 1 of 1 | 1 of 1 | 1 of 1 |" in text


def test_a_set_that_pip_refuses_is_recorded_with_the_reason_and_stops_no_other(run, made, page):
    made.refused["between"] = "Cannot install a and b because these package versions have conflicting dependencies."
    made.found["tested"] = results([claim(MEMORY, "refuted", 1.2)])
    code, record = run()
    assert code == 1 and [row["status"] for row in record["sets"]] == ["ok", "not installed", "ok", "ok"]
    first = record["between"][0]
    assert (first["old"], first["new"]) == ("oldest", "tested") and first["changes"], "compared with the next that ran"
    assert "**between** not installed: Cannot install a and b" in page.section(record)
    made.refused.clear()
    assert run()[0] == 0, "what was refused is tried again"


def test_a_set_whose_course_leaves_nothing_and_a_lesson_that_fails_are_reported(run, made, page):
    made.silent["oldest"] = f"the course ended with exit code 2: no results in {ROOT}/build"
    made.found["newest"] = results([claim(MEMORY)], status="failed", message="In [3]: TypeError: renamed argument")
    code, record = run()
    assert code == 1 and record["sets"][0]["status"] == "not run" and str(ROOT) not in json.dumps(record)
    text = page.section(record)
    assert f"- **newest**, lesson {LESSON} failed: In [3]: TypeError: renamed argument" in text
    assert "| lessons that ran | not run | 1 of 1 | 1 of 1 | 0 of 1 |" in text
    (change,) = (c for pair in record["between"] for c in pair["changes"] if c["kind"] == "lesson")
    assert change["worse"] is True


def test_a_set_that_cannot_be_rehearsed_shows_the_reason(run, made, page):
    made.bytes["tested"] = None
    code, record = run()
    assert code == 0 and [pair["rehearsed"] for pair in record["between"]] == [[], None, None]
    text = page.section(record)
    assert "- **tested** not rehearsed: torch 2.13.0+cpu is no CUDA build" in text
    assert "| BERT | 0.00 / 2.00 | 0.00 / 2.00 | not rehearsed | 0.00 / 2.00 |" in text


def test_a_rehearsal_that_crashed_is_reported_with_its_message(run, made, page, monkeypatch):
    crashed = training("BERT") | {
        "lesson": "rehearsal",
        "status": "crashed",
        "message": "ImportError: x",
        "memory": None,
    }
    good = made.rehearsal
    found = results(runs=[crashed], lesson="rehearsal")
    monkeypatch.setattr(made, "rehearsal", lambda one: found if one.name == "oldest" else good(one))
    text = page.section(run()[1])
    assert "| trainings rehearsed | 0 of 1 | 1 of 1 | 1 of 1 | 1 of 1 |" in text
    assert "- **oldest**, rehearsal/BERT crashed: ImportError: x" in text and "| BERT | crashed | 0.00 / 2.00 |" in text


def test_a_set_is_run_again_only_if_something_changed_or_it_is_requested(run, made, matrix, monkeypatch):
    run()
    run()
    assert made.calls == ["oldest", "between", "tested", "newest"]
    run("--again", "tested")
    assert made.calls[4:] == ["tested"]
    run("--again")
    assert len(made.calls) == 9
    monkeypatch.setattr(matrix, "source_hash", lambda: "another tree")
    _, record = run("--sets", "oldest")
    assert made.calls[9:] == ["oldest"]
    assert [row["status"] for row in record["sets"]] == ["ok", "not run", "not run", "not run"]
    monkeypatch.setattr(matrix, "now", lambda: "2126-01-01T00:00:00+00:00")
    made.calls.clear()
    run()
    assert made.calls == ["between", "tested", "newest"]
    monkeypatch.setattr(matrix, "now", lambda: "2126-01-02T00:00:00+00:00")
    made.calls.clear()
    run()
    assert made.calls == ["newest"], "a set that nothing pins is of its day"


def test_sets_that_ran_another_day_stay_in_the_record(run, made):
    run("--sets", "oldest", "between")
    made.calls.clear()
    code, record = run("--sets", "tested", "newest")
    assert code == 0 and made.calls == ["tested", "newest"]
    assert [row["status"] for row in record["sets"]] == ["ok"] * 4 and len(record["between"]) == 3


def test_an_interrupted_set_goes_on_with_the_lessons_that_it_lacks(run, made, matrix, monkeypatch):
    run("--sets", "oldest", "--lessons", "05")
    monkeypatch.setattr(made, "rehearsal", lambda one: pytest.fail("it was rehearsed already"))
    _, record = run("--sets", "oldest", "--lessons", "05,06")
    assert made.ran == [("oldest", "05"), ("oldest", "06")]
    assert [name[:2] for name in record["sets"][0]["lessons"]] == ["05", "06"]
    _, record = run("--sets", "oldest", "--lessons", "06")
    assert len(made.ran) == 2 and [name[:2] for name in record["sets"][0]["lessons"]] == ["06"]
    packages = made.packages(matrix.library_sets()[0])
    monkeypatch.setattr(made, "packages", lambda one: packages | {"six": "1.18.0"})
    monkeypatch.setattr(made, "rehearsal", lambda one: rehearsed(1000))
    run("--sets", "oldest", "--lessons", "05,06,08")
    assert [lesson for _, lesson in made.ran[2:]] == ["05", "06", "08"], "another version: nothing is known of it"


def test_a_damaged_note_of_an_earlier_run_is_no_run(run, made):
    run("--sets", "oldest")
    (made.folder / "oldest" / "done.json").write_text('{"key": ')
    run("--sets", "oldest")
    assert made.calls == ["oldest", "oldest"]


def test_the_tree_is_what_decides_what_is_measured(matrix, tmp_path):
    decisive = ("pyproject.toml", "perf_helpers/lab/a.py", "notebooks/05_x.ipynb", "benchmarks/matrix_rehearsal.py")
    for name in (*decisive, "perf_helpers/lab/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = matrix.source_hash(tmp_path)
    (tmp_path / "perf_helpers/lab/__pycache__/a.pyc").write_text("2")
    (tmp_path / "README.md").write_text("2")
    assert matrix.source_hash(tmp_path) == before
    for name in decisive:
        (tmp_path / name).write_text("2")
        assert matrix.source_hash(tmp_path) != before, name
        (tmp_path / name).write_text("1")


def test_an_environment_is_made_again_when_its_list_changes_and_brought_up_to_date_when_nothing_pins_it(
    matrix, tmp_path, monkeypatch
):
    called = []

    def run(command, **options):
        called.append("venv" if "venv" in command else "upgrade" if "--upgrade" in command else "install")
        if "venv" in command:
            command[-1].joinpath("bin").mkdir(parents=True)
            command[-1].joinpath("bin", "python").touch()
        return matrix.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    environments = matrix.Environments(tmp_path)
    for packages in (("torch==2.11.0",), ("torch==2.11.0",), ("torch==2.12.0",)):
        environments.install(matrix.LibrarySet("pinned", "x", packages))
        called.append("|")
    assert called == ["venv", "install", "|", "|", "venv", "install", "|"]
    called.clear()
    for _ in range(2):
        environments.install(matrix.LibrarySet("open", "x", ()))
    assert called == ["venv", "upgrade", "upgrade"]


@pytest.mark.nightly
def test_pip_in_an_environment_of_its_own_says_why_it_cannot(matrix, tmp_path, monkeypatch):
    """If pip cannot install a set, the error must give pip's reason, and the set must not count as installed.

    This is the only test that makes a real environment. pip fails in it because it may not use a package index.
    """
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    environments = matrix.Environments(tmp_path)
    one = matrix.LibrarySet("odd", "what", ("torch==2.12.0",))
    with pytest.raises(matrix.NotInstalled, match=r"^\w.*"):
        environments.install(one)
    assert environments.python(one).exists() and not environments.python(one).with_name("packages.txt").exists()


def test_pips_reason_is_its_errors_without_addresses_and_folders(matrix):
    reported = f"WARNING: x\nERROR: Cannot install a==1 and b==2, see https://host.example/simple/a/ in {ROOT}/build\n"
    reported += "ERROR: ResolutionImpossible: for help visit https://host.example/\n"
    assert matrix.pip_reason(reported) == "Cannot install a==1 and b==2, see ... in ./build"
    assert matrix.pip_reason("") == "pip gave no reason"
    assert len(matrix.pip_reason("ERROR: " + "long " * 1000)) < 520


def test_a_known_cause_is_shown_below_the_change_that_it_explains(run, made, page, monkeypatch):
    found = [{"changes": ["rehearsal/BERT"], "says": "a workspace less"}, {"changes": ["rehearsal/GPT"], "says": "odd"}]
    monkeypatch.setattr(page, "causes", lambda: found)
    assert "Why" not in page.section(run()[1])
    made.bytes["newest"] = 1512
    text = page.section(run("--again")[1])
    assert text.endswith("Why, where it was found out:\n\n- BERT: a workspace less")


def test_every_cause_explains_something_that_was_recorded(page):
    record = json.loads((RESULTS / "matrix.json").read_text())
    assert [cause for cause in page.causes() if not {*cause["changes"]} <= page.changed(record)] == []


def test_the_page_is_made_from_the_record(page):
    record = json.loads((RESULTS / "matrix.json").read_text())
    assert page.section(record) in (RESULTS / "README.md").read_text()
