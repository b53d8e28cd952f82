"""The GPU suite, benchmarks/measure_gpu.py: at tiny sizes on a CPU, and with a lab that only records its requests."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from perf_helpers.course.ledger import load
from trainmem.core.hardware import Gpu, Machine
from trainmem.core.task import choose_profile
from trainmem.records import Comparison, Memory, Ratio, Run, Store, Timing

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_claims  # noqa: E402
import gpu_page  # noqa: E402
import gpu_rows  # noqa: E402
import measure_gpu  # noqa: E402

VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0", "bitsandbytes": "0.50.2"}
GIB = 2**30


def card(kind="cuda", name="NVIDIA H100 80GB HBM3", **more):
    gpu = Gpu(0, name=name, memory_bytes=80 * GIB, capability=(9, 0), driver="580.1")
    return Machine(name, kind, gpus=(gpu,) if kind == "cuda" else (), torch_build="2.11.0+cu130", **more)


class RecordingLab:
    """A lab that trains nothing. It calculates memory and speed from the arguments, so that every ratio is known.

    `requests` lists the names of the requested runs and comparisons. A run whose peak is not below `limit` bytes is out
    of memory. `ends` is {name of a run: its status}; a test fills it for runs that should end otherwise.
    """

    def __init__(self, machine=None, profile="gpu", versions=VERSIONS, limit=40 * GIB):
        self.machine, self.versions, self.profile = machine or card(), versions, choose_profile(profile)
        self.limit, self.ends, self.requests = limit, {}, []  # ends: {name: status} of what does not go well

    def train(self, name, *, task, measure, optimizer=None, steps=None, **arguments):
        self.requests.append(name)
        return self._run(name, task, measure, arguments, slow=optimizer is not None)

    def run(self, function, name, *, task, measure):
        self.requests.append(name)
        answers = {"kernels": {"math": True, "flash": True, "efficient": True, "cudnn": False}, "cold_start": [30, 0.5]}
        answers["products"] = {"fp32": [8.0] * 5, "tf32": [2.0] * 5, "bf16": [1.0] * 5, "fp16": [1.0] * 5}
        answers |= {"rates": {"float32": 5e13, "bfloat16": 8e14, "float16": 8e14, "tf32": 4e14}}
        answers["flops_of_a_sample"] = 10**12
        if measure == ("none",):
            return Run(name, self.ends.get(name, "ok"), value=answers[function.__name__], task=task.to_dict())
        return self._run(name, task, measure, {"per_device_train_batch_size": 1}, kind="function")

    def compare(self, first, second):
        a, b = (run.timing.samples_per_second if run.timing else _speed(run.arguments) for run in (first, second))
        self.requests.append(f"{second.name} / {first.name}")
        return Comparison(first, second, 1.0, Ratio(b / a, b / a / 1.02, b / a * 1.02, (b / a,) * 5, 1.02))

    def _run(self, name, task, measure, arguments, slow=False, kind="training"):
        parts = _bytes(task, arguments)
        peak = sum(parts.values())
        status = self.ends.get(name) or ("ok" if peak < self.limit else "out of memory")
        about = {"kind": kind, "arguments": arguments, "task": task.to_dict()}
        if status != "ok":
            return Run(name, status, f"it {status}", **about)
        ends = dict.fromkeys(("forward", "backward", "step"), parts)
        memory = Memory(peak, "allocated", breakdown=parts, phase_breakdowns=ends, timeline={"phase": ["forward"]})
        more = {"reserved_bytes": peak + GIB, "device_used_bytes": peak + 2 * GIB}
        memory = Memory.from_dict(memory.to_dict() | more)
        rate = _speed(arguments) * (0.8 if slow else 1)
        timing = Timing(1 / rate, 0.0, 5, 1, rate, (1 / rate,) * 5) if "time" in measure else None
        return Run(name, "ok", memory=memory, timing=timing, losses=(0.7, 0.6) if timing else None, **about)


def _bytes(task, arguments):
    size = arguments.get("per_device_train_batch_size", 1)
    half = any(arguments.get(name) for name in ("fp16", "bf16"))
    kept = size * (0.6 if half else 1) * (0.4 if arguments.get("gradient_checkpointing") else 1)
    kept *= min(1, (task.seq_len or 512) / 512)
    kept *= 2 if arguments.get("attn_implementation") == "eager" else 1
    states = {"adafactor": 0.1, "adamw_bnb_8bit": 2}.get(arguments.get("optim"), 8)
    parts = {"weights": 4, "weight_copies": 2 * half, "gradients": 4, "optimizer_states": states, "activations": kept}
    return {name: int(part * GIB) for name, part in parts.items()}


def _speed(arguments):
    size, switched = arguments.get("per_device_train_batch_size", 1), [name for name, on in arguments.items() if on]
    factors = {"fp16": 2, "bf16": 2, "tf32": 1.5, "gradient_checkpointing": 0.75, "torch_compile": 1.4}
    sdpa = 1.2 if arguments.get("attn_implementation") == "sdpa" else 1
    return (1 + math.log2(size) / 10) * sdpa * math.prod(factors.get(name, 1) for name in switched)


class FakeEstimate:
    """An estimate of a task and training arguments with 1 % more bytes than `RecordingLab` calculates."""

    def __init__(self, task, arguments):
        arguments = {name: value for name, value in arguments.items() if name not in ("device", "compute_capability")}
        parts = _bytes(task, arguments)
        peak = sum(parts.values())
        self.memory = Memory(peak * 101 // 100, "estimated", breakdown=parts, reserved_bytes=peak + GIB)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Return a function that makes a `Suite` with a simulated clock; all of its suites continue the same file of rows.

    The function's arguments: the lab (None: a new `RecordingLab`), the seconds after which no row begins, and the
    seconds by which each measured row advances the clock; nothing else advances it.
    """
    now = [0.0]
    monkeypatch.setattr(measure_gpu, "monotonic", lambda: now[0])

    def begin(lab=None, seconds=10**6, row_seconds=0.0):
        lab = lab or RecordingLab()
        made = measure_gpu.Suite(lab, tmp_path / "gpu.jsonl", now[0] + seconds)
        found = made._found

        def slowly(row):
            now[0] += row_seconds
            return found(row)

        made._found = slowly
        return made

    return begin


def lines(suite):
    return suite.store.read()


# ---- for real, at tiny sizes


BLOCKED = ("IPython", "dask", "distributed", "ipykernel", "ipywidgets", "jupyter_client", "jupyter_core", "jupyterlab")
BLOCKED += ("jupytext", "matplotlib", "nbclient", "nbconvert", "nbformat", "notebook", "papermill", "playwright")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def without_notebooks(tmp_path):
    """Return environment variables under which Python can import no package for notebooks or pictures."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    paths = [str(folder), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.nightly
def test_a_part_that_was_killed_goes_on_where_it_stopped_and_needs_no_notebook(tmp_path, without_notebooks):
    for name in ("papermill", "IPython.display"):
        tried = subprocess.run([sys.executable, "-c", f"import {name}"], env=without_notebooks, capture_output=True)
        assert b"is blocked" in tried.stderr, "the modules are not blocked: this test would say nothing"
    command = [sys.executable, str(BENCHMARKS / "measure_gpu.py"), "--tiny", "--part", "bf16", "--out", str(tmp_path)]
    rows = tmp_path / "tiny.jsonl"

    first = subprocess.Popen(command, env=without_notebooks, stderr=subprocess.DEVNULL)
    while first.poll() is None and not (rows.exists() and rows.read_bytes().endswith(b"\n")):
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)  # in the middle of the second row
    assert first.wait() == -signal.SIGKILL, "it had ended: nothing was cut off"
    before = rows.read_bytes()
    assert [json.loads(line)["name"] for line in before.splitlines()] == ["bf16"]

    done = subprocess.run(command, env=without_notebooks, capture_output=True, text=True)
    assert done.returncode == 0 and "nothing is left" in done.stderr, done.stderr
    assert rows.read_bytes().startswith(before)
    run, pair = Store(rows, gpu_rows.StoredRow).read()
    assert (run.name, pair.name) == ("bf16", "bf16 against fp32") and run.ok and pair.ok, done.stderr
    assert run.peak_bytes > 0 and run.runs[0]["timing"]["samples_per_second"] > 0 and run.runs[0]["losses"]
    assert len(pair.speed_ratio.pairs) > 3 and pair.speed_ratio.low < pair.speed_ratio.value < pair.speed_ratio.high
    made = gpu_page.content(Store(rows, gpu_rows.StoredRow).read())
    assert made["profile"] == "tiny" and not made["machine"]["rehearsed"] and len(made["rows"]) == 2
    with pytest.raises(ValueError, match="tiny sizes"):
        gpu_page.keep(rows, tmp_path)

    again = subprocess.run(command, env=without_notebooks, capture_output=True, text=True)
    assert again.returncode == 0 and len(rows.read_bytes().splitlines()) == 2


def test_without_a_gpu_it_says_what_can_be_done(tmp_path, monkeypatch, capsys):
    class OnCpu(RecordingLab):
        def __init__(self, profile, **_):
            super().__init__(card("cpu", "AMD EPYC, 2 cores", cuda_reason="no NVIDIA driver"), "cpu")

    monkeypatch.setattr(measure_gpu, "Lab", OnCpu)
    assert measure_gpu.main(["--out", str(tmp_path)]) == 1
    assert "no GPU here (no NVIDIA driver): --tiny" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_what_is_missing_is_reported_before_anything_begins(tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    absent = {"datasets", "bitsandbytes"}
    monkeypatch.setattr(
        measure_gpu.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name)
    )
    assert measure_gpu.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "this Python has no datasets: install them, or carry their wheels\n"
    assert measure_gpu.main(["--part", "eleven"]) == measure_gpu.main(["--part", "10"]) == 1
    assert "no part eleven: choose from ten, batch" in capsys.readouterr().err


def test_the_list_has_every_part_with_its_rows_and_how_long_a_call_may_take(suite):
    (made := suite()).run("bf16")
    text = measure_gpu.listing(made, [*gpu_rows.PARTS], 470)
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in heads] == [f"{n} {name}" for n, name in enumerate(gpu_rows.PARTS, 1)]
    assert "2 rows as far as is known, 0 left; a call takes 0 s at most" in heads[4], "all of bf16 is known"
    assert "20 rows as far as is known, 20 left; a call takes 570 s at most" in heads[0]
    assert "\n    half precision against vanilla\n" in text
    assert measure_gpu._chosen(["3", "ten"]) == ["fp16", "ten"]


def test_on_a_cpu_what_it_lacks_is_named_and_not_made_up(suite):
    lab = RecordingLab(card("cpu", "AMD EPYC, 2 cores"), "tiny")
    rows = [row for part in ("ten", "fp16", "tf32", "attention") for row in gpu_rows.PARTS[part](suite(lab).here, {})]
    for row in rows:
        needs = "fp16" in json.dumps(row.settings()) or "tf32" in json.dumps(row.settings())
        needs |= row.name in ("products", "kernels") or row.function is gpu_rows.recipes.loop
        assert row.lacks == ("needs an NVIDIA GPU" if needs else ""), row.name
    (first := suite(lab)).run("tf32")
    assert {row.status for row in lines(first)} == {"not testable here"} and not lab.requests


# ---- plans


def test_the_estimate_has_forty_trainings_of_six_models(suite):
    rows = [*gpu_rows.estimates(suite().here, {})]
    runs = [row for row in rows if row.kind == "run"]
    assert len(runs) == len(rows) == 40 and len({row.task.model for row in runs}) == 6
    ten = [row for row in gpu_rows.ten(suite().here, {}) if row.kind == "run"]
    assert [row.name for row in ten] == [*gpu_rows.recipes.ROWS] and len(ten) == 10
    assert ten[0].task == choose_profile("gpu").task


def test_every_part_comes_to_an_end_and_no_row_is_done_twice(suite):
    lab = RecordingLab()
    made = suite(lab)
    for part in gpu_rows.PARTS:
        made.run(part)
    assert not [row.name for part in gpu_rows.PARTS for row in made.left(part)]
    kept = lines(made)
    assert max(Counter((row.part, row.name) for row in kept).values()) == 1
    assert {row.status for row in kept} == {"ok", "out of memory", "not testable here"}
    assert [row.name for row in kept if row.status == "not testable here"] == [
        "sdpa, cudnn, 2048",
        "sdpa, cudnn, 2048 against eager, 2048",
    ]
    requested = len(lab.requests)
    for part in gpu_rows.PARTS:
        suite(lab).run(part)
    assert len(lab.requests) == requested and len(lines(made)) == len(kept)


def test_the_batch_sweep_ends_at_what_does_not_fit(suite):
    (made := suite(RecordingLab(limit=40 * GIB))).run("batch")
    names = [(row.name, row.status) for row in lines(made)]
    ok = [(f"batch {size}", "ok") for size in (1, 2, 4, 8, 16)]
    pairs = [("batch 16 against batch 1", "ok"), ("batch 4 against batch 16", "ok")]
    assert names == [*ok, ("batch 32", "out of memory"), *pairs]


def test_the_best_recipe_is_the_fastest_in_no_more_memory(suite):
    (made := suite()).run("best")
    rows = {row.name: row for row in lines(made)}
    first = rows["guides' vanilla"].peak_bytes
    tried = [name for name in rows if name.startswith("+ larger batch") and " against " not in name]
    assert tried == ["+ larger batch, 6", "+ larger batch, 8", "+ larger batch, 12"]
    assert [rows[name].peak_bytes <= first for name in tried] == [True, True, False]
    assert rows["best, timed"].runs[0]["arguments"]["per_device_train_batch_size"] == 8
    assert rows["best, timed"].runs[0]["arguments"]["torch_compile"], "the fastest of those that fit"
    assert "+ workers against + larger batch, 8" in rows and "+ larger batch, 12 against guides' vanilla" not in rows


# ---- going on


def test_a_call_stops_between_rows_and_the_next_one_goes_on(suite):
    lab = RecordingLab()
    (first := suite(lab, seconds=470, row_seconds=160)).run("ten")
    done = [row.name for row in lines(first)]
    assert done == ["vanilla", "accumulation", "accumulation against vanilla"]  # begun at 0, 160 and 320 s
    assert lab.requests == ["vanilla", "accumulation", "accumulation / vanilla"], "a row was begun after the deadline"
    (second := suite(lab, seconds=470, row_seconds=160)).run("ten")
    names = [row.name for row in lines(second)]
    assert names[:3] == done and len(names) == len({*names}) == 6


def test_a_row_at_the_end_of_a_call_is_cut_off_and_begun_again(suite, capsys):
    lab = RecordingLab()
    (first := suite(lab, seconds=470, row_seconds=290)).run("ten")  # the second one may take 280 s
    assert [row.name for row in lines(first)] == ["vanilla"] and "accumulation: cut off" in capsys.readouterr().err
    (second := suite(lab, seconds=470, row_seconds=290)).run("ten")
    assert [row.name for row in lines(second)] == ["vanilla", "accumulation"]


def test_what_crashed_is_tried_once_more_by_a_later_call(suite):
    lab = RecordingLab()
    lab.ends = {"bf16": "crashed"}
    for tried in (1, 2, 2, 2):
        (made := suite(lab)).run("bf16")
        assert [row.status for row in lines(made) if row.name == "bf16"] == ["crashed"] * tried
    assert made.left("bf16") == []
    report = gpu_page.content(lines(made))
    assert "bf16, bf16: crashed (it crashed)" in gpu_page.section("h100", report, {})


def test_what_went_well_the_second_time_counts(suite):
    lab = RecordingLab()
    lab.ends = {"bf16": "crashed"}
    suite(lab).run("bf16")
    lab.ends = {}
    (made := suite(lab)).run("bf16")
    report = gpu_page.content(lines(made))
    assert {row["name"]: row["status"] for row in report["rows"]} == {"bf16": "ok", "bf16 against fp32": "ok"}


def test_out_of_memory_is_a_result(suite):
    lab = RecordingLab(limit=GIB)
    suite(lab).run("bf16")
    (made := suite(lab)).run("bf16")
    assert [row.status for row in lines(made)] == ["out of memory", "out of memory"]  # the run, and the pair


@pytest.mark.parametrize("change", ["machine", "versions", "profile", "settings"])
def test_what_was_measured_otherwise_is_measured_again(suite, monkeypatch, change):
    (before := suite(RecordingLab())).run("bf16")
    if change != "settings":
        before.run("tf32")  # no row of which belongs into the other's report
    lab = RecordingLab()
    if change == "machine":
        lab.machine = card(name="NVIDIA A100")
    elif change == "versions":
        lab.versions = VERSIONS | {"transformers": "5.23.0"}
    elif change == "profile":
        lab.profile = choose_profile("t4")
    else:
        monkeypatch.setattr(gpu_rows.recipes, "FOUR", {"per_device_train_batch_size": 3})
    (made := suite(lab)).run("bf16")
    names = [row.name for row in lines(made) if row.part == "bf16"]
    assert "bf16" in lab.requests and names == ["bf16", "bf16 against fp32"] * 2
    if change != "settings":
        about = gpu_page.content(lines(made))
        assert len(about["rows"]) == 2, "two machines are in one report"


# ---- the report and the page


def whole_suite(suite):
    made = suite()
    for part in gpu_rows.PARTS:
        made.run(part)
    return made


def whole(suite):
    return json.loads(json.dumps(gpu_page.content(lines(whole_suite(suite)))))


def test_every_claim_that_rows_decide_is_decided(suite):
    report = whole(suite)
    assert gpu_claims.VALUES.keys() <= load().keys()
    found = {claim["id"]: claim for claim in report["claims"]}
    assert found.keys() == gpu_claims.VALUES.keys()
    assert not {id: claim["missing"] for id, claim in found.items() if claim["missing"]}
    values = {id: claim["value"] for id, claim in found.items()}
    assert values["accumulation-memory"] == pytest.approx(17 / 20) and values["all-three-8bit-speed"] == 1
    assert found["accumulation-memory"]["verdict"] == "holds" and found["accumulation-memory"]["interval"] is None
    assert found["checkpointing-cost"]["interval"] == pytest.approx([0.75 / 1.02, 0.75 * 1.02])
    assert values["larger-batch-faster"] == pytest.approx(1.4) and values["memory-to-the-limit"] == pytest.approx(
        1.2 / 1.4
    )
    assert values["tf32-faster"] == 4 and values["fp16-up-to-5x"] == 8 and values["sdpa-fused-kernels"] == 2
    assert (
        found["fp16-faster"]["verdict"] == "holds"
        and "ten: half precision against vanilla" in found["fp16-faster"]["rows"]
    )
    assert values["table-batch-speed"] == pytest.approx(1.2) and values["adam8bit-memory"] == pytest.approx(6 / 7.9)


def test_a_claim_without_its_rows_says_what_is_missing(suite):
    (made := suite()).run("bf16")
    claims = gpu_page.content(lines(made))["claims"]
    assert {claim["verdict"] for claim in claims} == {"not testable here"}
    assert claims[0]["missing"] == "ten, vanilla: not measured" and claims[0]["value"] is None


def test_the_page_shows_what_was_measured(suite, build, tmp_path, monkeypatch):
    kept = gpu_page.keep(whole_suite(suite).store.path, tmp_path / "results")
    report = json.loads(kept.read_text())
    assert kept.parent == tmp_path / "results" / "nvidia-h100-80gb-hbm3" / "gpu"
    suites, cards = gpu_page.suites(tmp_path / "results"), build.rehearsals()
    text = build.gpu_suites(suites, cards)
    head = "| run | MiB allocated / reserved | MiB device-used | samples/s | against | MB, V100 (guide) |"
    assert "**The guides' ten recipes, and their speeds against each other.**" in text and "Forty trainings" not in text
    assert f"{head} H100 80 GiB, rehearsed |" in text, "of the cards that are rehearsed the one of the same kind"
    assert "| vanilla | 20480 / 21504 | 22528 | 1.2 |  | 14949 | 7158 / 7626 |" in text
    half = "vanilla: 2.00 (1.96 to 2.04) x, memory 1.02 x"
    assert f"| half precision | 20890 / 21914 | 22938 | 2.4 | {half} | 13939 | 6578 / 6758 |" in text
    assert "| batch 32 | out of memory | not measured | not measured |  |" in text
    assert "| + tf32 | 24576 / 25600 | 26624 | not measured | guides' vanilla: 1.5" in text
    assert "| fp32: 2.00 (1.96 to 2.04) x, memory 1.02 x |" in text
    assert "model FLOPs utilization, the first recipe" in text and "% of 50 TFLOP/s (float32)" in text
    assert "% of 800 TFLOP/s (bfloat16)" in text and "torch.compile: 30.0 s for a cold" in text
    assert "| `fp16-faster` |" in text and "**holds** (2 [1.961, 2.04])" in text
    assert "driver 580.1, torch 2.11.0+cu130, transformers 5.17.0" in text
    own = build.rehearsed_recipes(cards, {}, suites)
    assert "| nvidia-h100-80gb-hbm3, measured by the suite |" in own and "speed not measured" not in own
    monkeypatch.setattr(build, "estimate", lambda task, **arguments: FakeEstimate(task, arguments))
    ran = sum(row["status"] == "ok" for row in report["rows"] if row["part"] == "estimate")
    table = build.error_table(build.held_against({name: build.of_suite(data) for name, data in suites.items()}))
    assert f"On GPUs, {ran} trainings" in table and f"| allocated | {ran} | 1.00% |" in table and ran > 30


def test_without_a_report_the_page_says_not_measured(build, tmp_path):
    assert gpu_page.suites(tmp_path) == {} and "not measured" in build.gpu_suites({}, {})
    assert "speed not measured" in build.rehearsed_recipes(build.rehearsals(), {}, {})


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"machine": card(rehearsed=True).to_dict()}, "was rehearsed"),
        ({"setup": {"profile": "tiny"}}, "tiny sizes"),
        ({"machine": card("cpu").to_dict()}, "without a GPU"),
    ],
)
def test_what_was_not_measured_on_a_gpu_is_refused(suite, build, monkeypatch, tmp_path, change, reason):
    (made := suite()).run("bf16")
    rows = [json.loads(line) for line in made.store.path.read_text().splitlines()]
    rows = [row | change | {"setup": row["setup"] | change.get("setup", {})} for row in rows]
    made.store.path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(build, "RESULTS", tmp_path / "results")
    with pytest.raises(ValueError, match=reason):
        build.main(["--suite", str(made.store.path)])
    assert not (tmp_path / "results").exists()


def test_what_has_no_rows_is_refused(tmp_path):
    (tmp_path / "gpu.jsonl").write_text('{"suite": "course"}\n')
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="no rows"):
        gpu_page.keep(tmp_path / "gpu.jsonl", tmp_path)


def test_a_rehearsal_decides_by_memory_alone(suite):
    lab = RecordingLab(card(rehearsed=True))
    lab.compare = None  # there is no time
    for part in ("ten", "bf16"):
        (made := suite(lab)).run(part)
    report = gpu_page.content(lines(made))
    assert report["machine"]["rehearsed"] and report["what"].startswith("memory by torch's own CUDA allocator")
    decided = [claim for claim in report["claims"] if claim["verdict"] != "not testable here"]
    assert {load()[claim["id"]].decided_by for claim in decided} == {"memory"}
    rows = {(row.part, row.name): row for row in lines(whole_suite(suite))}
    for machine, kinds in ((card(rehearsed=True), {"memory"}), (card(), {"memory", "time", "values"})):
        decided = [claim for claim in gpu_claims.decided(rows, machine, "gpu") if claim["value"] is not None]
        assert {load()[claim["id"]].decided_by for claim in decided} == kinds, "whatever rows there are"
    assert not [row for row in report["rows"] if row["speed_ratio"] or any(run["timing"] for run in row["runs"])]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build", BENCHMARKS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
