"""Nightly runs: benchmarks/nightly.sh by cron, and .github/workflows/nightly.yml on a public CI service.

Their commands are checked against the Makefile and the command line, and their shell code is run with stubs of `make`
and `perf-helpers` that only record their arguments.
"""

import fcntl
import itertools
import json
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import stages
import typer
import yaml

from perf_helpers import cli

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "nightly.yml"
SCRIPT = ROOT / "benchmarks" / "nightly.sh"
CI = ROOT / ".ci" / "run"
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> {calls}
[ "$(basename "$0") $1" = "perf-helpers course" ] || exit 0
while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done
echo "worse than the baseline: memory 05/vanilla"
[ -e {silent} ] || echo '{{}}' > "$out/results.json"
exit "$(cat {code} 2>/dev/null || echo 0)"
"""


def steps():
    """Return the steps of the nightly workflow's only job, and the parsed workflow."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (job,) = workflow["jobs"].values()
    return job["steps"], workflow


def commands(text):
    """Return every call of make or perf-helpers in the shell code `text`, as a list of words; `"$@"` and redirections
    are left out.
    """
    found = []
    for line in text.splitlines():
        line = re.sub(r"\$\{\w+:\+(.*?)\}", r"\1", line)  # what is there if a variable is set
        words = [*shlex.shlex(line, posix=True, punctuation_chars=True)]
        for is_command, part in itertools.groupby(words, key=lambda word: not re.fullmatch(r"[;&|<>(){}]+", word)):
            called = [*part]
            if is_command and Path(called[0]).name in ("make", "perf-helpers"):
                found.append([Path(called[0]).name, *(word for word in called[1:] if word != "$@")])
    return found


def problems(words):
    """Return why make or the command line would refuse a command; "" if it would be accepted.

    `words`: the command, of make or perf-helpers.
    """
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        return done.stderr if done.returncode else ""
    group = typer.main.get_command(cli.app)
    if words[1] not in group.commands:
        return f"no command {words[1]}"
    try:
        group.commands[words[1]].make_context(words[1], words[2:])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ci_leaves_no_nightly_stage_out_three_times_in_a_row(monkeypatch):
    minutes, passed, missed = int(re.search(r"MINUTES=(\d+)", CI.read_text())[1]), [0.0], Counter()
    monkeypatch.setattr(stages.time, "monotonic", lambda: 60 * passed[0])
    for run in range(30):
        done = set()
        for name in stages.chosen(stages.NIGHTLY, minutes, run):
            done.add(name)
            passed[0] += stages.NIGHTLY[name][0]
        missed = Counter({name: missed[name] + 1 for name in stages.NIGHTLY.keys() - done})
        assert max(missed.values()) < 3, (run, missed)


def test_every_command_of_a_nightly_run_is_one_that_make_and_the_command_line_take():
    texts = [SCRIPT.read_text(), *(step["run"] for step in steps()[0] if "run" in step)]
    found = [words for text in texts for words in commands(text)]
    assert {words[0] for words in found} == {"make", "perf-helpers"} and len(found) >= 4
    assert any("--strict" in words and "--baseline" in words for words in found)
    assert [(words, reason) for words in found if (reason := problems(words))] == []


@pytest.mark.parametrize(
    "line",
    ["make corse", ".venv/bin/perf-helpers curse 05", '  .venv/bin/perf-helpers course --bassline "$x" || exit 1'],
)
def test_a_command_that_is_none_is_seen(line):
    (words,) = commands(line)
    assert problems(words)


def test_the_workflow_runs_every_night_and_on_demand_and_keeps_what_it_found():
    found, workflow = steps()
    when = workflow[True]  # "on" is a boolean in YAML 1.1
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["schedule"][0]["cron"]) and "workflow_dispatch" in when
    assert workflow["concurrency"]["cancel-in-progress"] is False
    used = {step["uses"].split("@")[0]: step for step in found if "uses" in step}
    assert all(re.fullmatch(r"actions/[\w/-]+@v\d+", step["uses"]) for step in used.values())
    python = used["actions/setup-python"]["with"]
    assert python["cache"] == "pip" and all((ROOT / name).exists() for name in python["cache-dependency-path"].split())
    restored, saved = used["actions/cache/restore"], used["actions/cache/save"]
    assert restored["with"]["path"] == saved["with"]["path"] and restored["with"]["key"] == saved["with"]["key"]
    assert saved["with"]["key"].startswith(restored["with"]["restore-keys"])
    names = [step.get("name") for step in found]
    assert names.index(restored["name"]) < names.index("Tonight") < names.index(saved["name"])
    kept = used["actions/upload-artifact"]
    assert saved["if"] == kept["if"] == "always()" and "steps.tonight.outputs.folder" in kept["with"]["path"]


def test_the_script_and_every_step_are_shell():
    for text in [SCRIPT.read_text(), *(step["run"] for step in steps()[0] if "run" in step)]:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert os.access(SCRIPT, os.X_OK)


# ---- nights, with a course that runs nothing


class Box:
    """Hold a temporary folder with benchmarks/nightly.sh, in which make and perf-helpers are stubs that run no lesson.

    The file `calls` lists the calls of the stubs.
    """

    def __init__(self, folder):
        self.folder, self.calls, self.silent = folder, folder / "calls", folder / "silent"
        (folder / "benchmarks").mkdir()
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / "benchmarks" / "nightly.sh").write_bytes(SCRIPT.read_bytes())
        stub = STUB.format(calls=self.calls, silent=self.silent, code=folder / "code")
        for path in (folder / ".venv" / "bin" / "perf-helpers", folder / "bin" / "make"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(stub)
            path.chmod(0o755)
        (folder / "benchmarks" / "nightly.sh").chmod(0o755)
        # A made-up clock distinguishes nightly runs of one second.
        clock = folder / "bin" / "date"
        clock.write_text(
            f'#!/usr/bin/env bash\necho x >> {folder}/nights\nprintf "2026-11-%02d" "$(wc -l < {folder}/nights)"\n'
        )
        clock.chmod(0o755)

    def shell(self, text, **variables):
        environment = os.environ | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"} | variables
        command = ["bash", "-e", "-o", "pipefail", "-c", text]  # as the CI service calls it
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)

    def night(self, *words, code=0):
        (self.folder / "code").write_text(str(code))
        self.calls.unlink(missing_ok=True)
        done = self.shell(f"benchmarks/nightly.sh {shlex.join(words)}")
        requested = self.calls.read_text().splitlines() if self.calls.exists() else []
        return done, next((line for line in requested if line.startswith("perf-helpers course")), None)


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


def test_the_first_nightly_run_is_compared_with_nothing_and_the_next_with_it(box):
    done, requested = box.night("05", "--profile", "cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert requested == "perf-helpers course --strict --out build/nights/2026-11-01 05 --profile cpu"
    done, requested = box.night()
    before = "--baseline build/nights/2026-11-01/results.json"
    assert done.returncode == 0 and requested == f"perf-helpers course --strict --out build/nights/2026-11-02 {before}"
    assert box.calls.read_text().splitlines()[-1] == "perf-helpers history build/nights --out build/nights/history.html"
    assert box.night()[1].endswith("--baseline build/nights/2026-11-02/results.json")


@pytest.mark.parametrize("code", [1, 2])
def test_a_bad_nightly_run_is_printed_for_mail_with_its_exit_code(box, code):
    box.night()
    done, _ = box.night(code=code)
    assert done.returncode == code and f"exit code {code}, compared with build/nights/2026-11-01" in done.stdout
    assert "worse than the baseline: memory 05/vanilla" in done.stdout and "build/nights/2026-11-02" in done.stdout
    assert "worse than" in (box.folder / "build/nights/2026-11-02/night.log").read_text()


def test_an_interrupted_nightly_run_is_no_baseline(box):
    box.night()
    box.silent.touch()
    box.night(code=2)
    box.silent.unlink()
    assert box.night()[1].endswith("--baseline build/nights/2026-11-01/results.json")


def test_two_nightly_runs_never_overlap(box):
    box.night()
    with open(box.folder / "build/nights/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, requested = box.night()
    assert (done.returncode, requested) == (2, None) and "still running" in done.stderr
    assert box.night()[0].returncode == 0


def test_an_environment_that_cannot_be_set_up_is_no_nightly_run(box):
    (box.folder / "bin" / "make").write_text("#!/usr/bin/env bash\necho no network\nexit 1\n")
    done, requested = box.night()
    assert (done.returncode, requested) == (2, None) and "no network" in done.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_the_steps_of_the_workflow_run_one_after_the_other(box, code):
    """Run two nights of the CI service: the first starts without a cache, the second with the cache that the first
    stored.

    `code`: exit code of the course in the second night; 1: something is worse.
    """
    for night in (1, 2):
        (box.folder / "code").write_text(str(code if night == 2 else 0))
        output, summary = box.folder / f"output{night}", box.folder / f"summary{night}"
        variables = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "ARGUMENTS": "05 06"}
        codes = {step["name"]: box.shell(step["run"], **variables).returncode for step in steps()[0] if "run" in step}
        assert codes == {"Set up": 0, "Tonight": code if night == 2 else 0, "What there is to see": 0}
        assert output.read_text() == f"folder=build/nights/2026-11-0{night}\n"
        assert "worse than the baseline" in summary.read_text()
    requested = [line for line in box.calls.read_text().splitlines() if line.startswith("perf-helpers course")]
    assert [line.endswith(" 05 06") for line in requested] == [True, True]
    assert ["--baseline" in line for line in requested] == [False, True]
    kept = steps()[0][-1]["with"]["path"]
    assert sorted(json.loads(path.read_text()) == {} for path in box.folder.glob(kept)) == [True, True]
