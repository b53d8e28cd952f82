"""The comparison of the estimate with recorded GPU runs (benchmarks/build.py), tested on invented runs with known
errors.

Also, what benchmarks/rehearse.py records of a rehearsed course: no rehearsed number is shown as measured.
"""

import dataclasses
import importlib.util
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from perf_helpers.course import published_speedups, results
from perf_helpers.course.ledger import decide, load
from trainmem.core.hardware import Gpu, Machine
from trainmem.core.task import Task, choose_profile
from trainmem.estimate import estimate
from trainmem.records import Run
from trainmem.rehearsal import CARDS

TASK = Task("bert-tiny", seq_len=32)
ROOT = Path(__file__).parents[1]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "results"
TIMES = {"timing", "step_seconds", "samples_per_second", "all_seconds", "seconds", "losses"}


def script(name, monkeypatch=None):
    if monkeypatch:
        monkeypatch.syspath_prepend(BENCHMARKS)  # for what the scripts share
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build():
    with pytest.MonkeyPatch.context() as patch:
        yield script("build", patch)


@pytest.fixture(scope="module")
def rehearse():
    with pytest.MonkeyPatch.context() as patch:
        yield script("rehearse", patch)


def recorded(kind="cuda", **changes):
    """Return {name of a machine: its course run} for one invented machine.

    The course run has one training, which allocated 1 % more and reserved 2 % more than estimated for a GPU.

    `kind`: the machine's kind, "cuda" or "cpu"; `changes`: fields of the training's run to change.
    """
    gpu = Gpu(0, name="NVIDIA A100", memory_bytes=80 * 2**30, capability=(8, 0))
    machine = Machine("NVIDIA A100", kind, gpus=(gpu,))
    arguments = {"per_device_train_batch_size": 2}
    estimated = estimate(TASK, device="cuda", compute_capability=(8, 0), **arguments).memory
    memory = dataclasses.replace(
        estimated,
        kind="allocated",
        peak_bytes=estimated.peak_bytes * 101 // 100,
        reserved_bytes=estimated.reserved_bytes * 102 // 100,
    )
    run = Run("vanilla", "ok", arguments=arguments, task=TASK.to_dict(), memory=memory, **changes)
    return {"a100": {"machine": dataclasses.asdict(machine), "runs": [run.to_dict()]}}


def test_recorded_gpu_runs_make_the_table_of_errors(build):
    rows = build.held_against(recorded())
    table = build.error_table(rows)
    assert "On GPUs, 1 trainings" in table
    assert "| allocated | 1 | 0.99% | 0.99% | 0.99% |" in table and "| reserved | 1 | 1.96% | 1.96% | 1.96% |" in table
    assert "device-used" not in table, "the context of this GPU is not known"
    assert "| optimizer states, share of the peak | 1 | 0.00% |" in table


def test_what_is_no_training_of_a_gpu_is_left_out(build):
    assert build.held_against(recorded(kind="cpu")) == []
    assert build.held_against(recorded(value={"of a function": 1})) == []
    assert "not yet checked" in build.error_table([])


def test_the_percentile_is_one_of_the_errors(build):
    rows = [
        {"peak_bytes": [100 + n, 100], "reserved_bytes": [None, 1], "device_used_bytes": [None, 1]} for n in range(20)
    ]
    table = build.error_table([row | {"breakdown": [None, {}]} for row in rows])
    assert "| allocated | 20 | 9.50% | 18.00% | 19.00% |" in table


# ---- pages


def test_the_readme_counts_the_verdicts_and_the_page_has_every_claim(build):
    measured, cards = results.recorded(RESULTS), build.rehearsals()
    assert measured and cards
    counts, page = build.counts(measured), build.page(measured, cards, {})
    for data in measured.values():
        decided = results.decided_again(data["claims"])
        verdicts = Counter(claim["verdict"] for claim in decided)
        apart = verdicts["not testable here"]
        line = f"{len(decided) - apart} claims {verdicts['refuted']} are refuted, {verdicts['holds']} hold, "
        assert line in counts and f"{apart} more are not testable there" in counts
        assert build.caption(data) in counts and build.caption(data) in page
        assert [claim["id"] for claim in decided if f"`{claim['id']}`" not in page] == []
    for name, data in cards.items():
        number = len(results.decided_again(data["course"]["claims"]))
        assert f"{name}, rehearsed" in page and f"{name}, {number} claims: " in build.rehearsed_counts(cards)


@pytest.fixture
def copied(build, tmp_path, monkeypatch):
    """Copy the pages that are generated, or have generated blocks, into a folder of their own, and return it."""
    places = {name: tmp_path / path.relative_to(ROOT) for name, path in build.PLACES.items()}
    for path in {*places.values(), tmp_path / "results/README.md"}:
        path.parent.mkdir(exist_ok=True)
        path.write_text((ROOT / path.relative_to(tmp_path)).read_text())
    monkeypatch.setattr(build, "PLACES", places)
    monkeypatch.setattr(build, "PAGE", tmp_path / "results/README.md")
    monkeypatch.setattr(build, "picture", lambda data: None)
    return tmp_path


@pytest.mark.parametrize("stale", ["README.md", "docs/estimate.md", "docs/rehearsal.md", "results/README.md"])
@pytest.mark.nightly
def test_a_stale_page_is_named_and_building_makes_it_again(build, stale, copied, capsys):
    assert build.main([]) == build.main(["--check"]) == 0
    made = (copied / stale).read_text()
    within = made.rfind("<!-- end of ") if "<!-- end of " in made else len(made)
    (copied / stale).write_text(f"{made[:within]}**refuted**\n{made[within:]}")
    assert build.main(["--check"]) == 1
    assert capsys.readouterr().err == f"{stale} is stale; run python benchmarks/build.py\n"
    assert build.main([]) == 0 and (copied / stale).read_text() == made


def test_a_page_that_lost_a_marker_is_named(build, copied):
    page = copied / "docs/rehearsal.md"
    page.write_text(page.read_text().replace("<!-- end of rehearsed -->", ""))
    reported = r"rehearsal.md has 0 places for <!-- rehearsed: made by benchmarks/build.py -->"
    with pytest.raises(ValueError, match=reported):
        build.main(["--check"])


def test_readme_counts_what_the_picture_of_the_report_counts(build):
    measured = results.recorded(RESULTS)
    data = build.newest(measured)
    number = Counter(claim["verdict"] for claim in results.decided_again(data["claims"]))
    testable = number.total() - number["not testable here"]
    finding = build.finding(measured)
    assert f"{number['refuted']} of {testable} testable" in finding and f"{number['holds']} hold" in finding
    assert f"other {number['not testable here']} of all {number.total()} " in finding
    assert all("profile" not in text for text in (finding, build.lessons(measured)))


def test_readme_lists_every_lesson_with_its_minutes_and_where_to_open_it(build):
    measured = results.recorded(RESULTS)
    rows = [line for line in build.lessons(measured).splitlines() if "notebooks/" in line]
    lessons = build.newest(measured)["lessons"]
    seconds = {each["name"]: each["seconds"] - each.get("waited_seconds", 0) for each in lessons}
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    for name, row in zip(names, rows, strict=True):
        assert f"(notebooks/{name}.ipynb)" in row and f"| {max(round(seconds[name] / 60), 1)} |" in row
        assert row.count(f"/notebooks/{name}.ipynb)") == 2, "Colab and Binder"


def test_one_command_runs_the_course_keeps_it_and_makes_pictures_pages_and_lessons():
    done = subprocess.run(["make", "-n", "record"], cwd=ROOT, capture_output=True, text=True)
    reported = [
        "perf-helpers course --out build/course",
        "benchmarks/build.py --record build/course",
        "notebooks/build.py",
    ]
    places = [done.stdout.find(line) for line in reported]
    assert done.returncode == 0 and -1 not in places and places == sorted(places), done.stdout


def test_every_reference_run_has_its_picture_on_the_page_and_its_column(build):
    measured, cards = results.recorded(RESULTS), build.rehearsals()
    page = build.page(measured, cards, {})
    head = next(line for line in page.splitlines() if line.startswith("| lesson | claim | the guides say |"))
    assert head == f"| lesson | claim | the guides say | their figure | {' | '.join(measured)} |"
    for name, data in measured.items():
        picture = data["file"].with_suffix(".png").relative_to(RESULTS)
        assert (RESULTS / picture).exists() and f"on {name}]({picture})" in page


def test_its_picture_and_column_show_the_guides_ten_recipes_and_no_other_run(build):
    for data in results.recorded(RESULTS).values():
        assert [*build._ten(data)] == [*build.recipes.ROWS]


def test_what_the_time_meter_costs_is_reported_as_it_was_recorded():
    recorded = json.loads((RESULTS / "overhead.json").read_text())
    reported = (ROOT / "docs" / "trust.md").read_text()
    assert (
        f"{100 * recorded['share_inside_the_meter']:.2f} % of a step" in reported and recorded["date"][:10] in reported
    )
    assert recorded["interval"][0] <= recorded["ratio"] <= recorded["interval"][1]


# ---- speed on a CPU

SPEED_CLAIMS = "accumulation-cost accumulation-fill-first accumulation-fewer-updates checkpointing-cost adafactor-cost"


def speed():
    return json.loads((RESULTS / "speed.json").read_text())


def test_a_recipe_compared_with_itself_is_seldom_called_an_effect():
    rows = speed()["itself"]
    called = [row for row in rows if not row["cpu"][1] <= 1 <= row["cpu"][2]]
    assert len(rows) == 200 and len(called) <= 4 and sum(row["busy"] for row in rows) >= 80
    assert speed()["called an effect"]["cpu"] == f"{len(called)} of 200"


@pytest.mark.parametrize("id", SPEED_CLAIMS.split())
def test_claims_about_speed_are_decided_the_same_way_again_and_again(id):
    rows = [row for row in speed()["claims"] if row["name"] == id]
    verdicts = [decide(load()[id], tuple(row["cpu"][1:]), True) for row in rows]
    most = max(set(verdicts), key=verdicts.count)
    assert len(rows) == 20 and most != "too small to tell" and verdicts.count(most) >= 19
    assert verdicts == [row["verdict"] for row in rows]
    assert load()[id].predicted or most in load()[id].expected["cpu"]


def test_they_were_tried_with_the_recipes_of_their_lessons(monkeypatch):
    """benchmarks/measure_speed.py decides claims with the recipes in its `CLAIMS`. These must be the recipes that the
    claims' lessons use: for each of them, a recorded course must have a run of the lesson with this recipe.
    """
    runs = [run for data in results.recorded(RESULTS).values() for run in data["runs"] if data["date"] > "2026-11-22"]
    for id, (changes, *recipes, _) in script("measure_speed", monkeypatch).CLAIMS.items():
        task = choose_profile("cpu").task.replace(**changes).to_dict()
        for recipe in recipes:
            same = [run for run in runs if run["lesson"][:2] == load()[id].lesson and run["task"] == task]
            wanted = {"gradient_accumulation_steps": 1} | recipe
            assert any({"gradient_accumulation_steps": 1} | run["arguments"] == wanted for run in same), (id, recipe)


# ---- rehearsals


def course(path, rehearsed, **claim):
    """Write the results.json of a course run on an A100, with one claim and one training; return its path.

    `path`: the file's path; `rehearsed`: whether the run is a rehearsal; `claim`: fields of the claim to change.
    """
    data = recorded()["a100"]
    data["machine"] |= {"name": "rehearsed A100 80 GiB" if rehearsed else "NVIDIA A100", "rehearsed": rehearsed}
    data["runs"][0]["lesson"] = "14_all_together"
    decision = {"id": "accumulation-memory", "lesson": "05_gradient_accumulation", "verdict": "holds", "value": 0.5}
    decision |= {"as_expected": True, "interval": None, "quantity": "peak / peak", "note": "", "rehearsed": rehearsed}
    versions = {"torch": "2.13.0", "transformers": "5.23.0", "bitsandbytes": "0.50.2"}
    about = {"schema": 1, "date": "2026-11-22T07:00:00+00:00", "profile": "gpu", "versions": versions, "lessons": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data | about | {"claims": [decision | claim]}))
    return path


def rehearsal(name="A100 80 GB", allocated=7 << 30, status="ok", claims=()):
    sizes = {"peak_bytes": allocated, "reserved_bytes": allocated and 2 * allocated}
    row = {"name": "vanilla", "arguments": {}, "guide_mb": 14949, "status": status, "message": ""} | sizes
    about = {"rehearsed": True, "card": name, "capability": [8, 0], "memory_bytes": 80 << 30, "task": TASK.to_dict()}
    about |= {"date": "2026-11-22T07:00:00+00:00", "guide": {"source": "g", "hardware": "V100", "context_mb": 1343}}
    about["versions"] = {"torch": "2.13.0", "transformers": "5.23.0", "bitsandbytes": "0.50.2"}
    kept = {"profile": "gpu", "date": about["date"], "versions": {}, "claims": list(claims)}
    return about | {"rows": [row], "course": kept}


def test_what_was_rehearsed_is_never_read_as_measured(build, monkeypatch, tmp_path):
    measured = course(tmp_path / "nvidia-a100" / "2026-11-21.json", rehearsed=False)
    course(tmp_path / "rehearsed-a100-80-gb" / "2026-11-22.json", rehearsed=True)
    kept = tmp_path / "rehearsed" / "a100-80-gb" / "2026-11-22.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(rehearsal()))
    monkeypatch.setattr(build, "RESULTS", tmp_path)
    monkeypatch.setattr(published_speedups, "RECORDED", tmp_path)
    assert list(results.recorded(tmp_path)) == ["nvidia-a100"] and list(build.rehearsals()) == ["A100 80 GiB"]
    assert published_speedups.nearest_recorded(None, "cuda", (8, 0))["machine"]["name"] == "NVIDIA A100"
    measured.unlink()
    assert results.recorded(tmp_path) == {} and published_speedups.nearest_recorded(None, "cuda", (8, 0)) is None


def test_a_rehearsed_course_is_not_recorded_as_a_run(build, tmp_path):
    course(tmp_path / "results.json", rehearsed=True)
    with pytest.raises(ValueError, match="rehearsed, not measured"):
        build.record(tmp_path)


def test_a_run_of_some_lessons_is_not_recorded(build, monkeypatch, tmp_path):
    """A run of some lessons would replace the machine's newest complete run, and with it the claims of all other
    lessons.
    """
    course(tmp_path / "results.json", rehearsed=False)
    monkeypatch.setattr(build, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"lacks .*05_gradient_accumulation"):
        build.record(tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "results.json"]


def test_what_does_not_say_that_it_was_rehearsed_is_no_rehearsal(build, monkeypatch, tmp_path):
    course(tmp_path / "rehearsed" / "a100" / "2026-11-22.json", rehearsed=False)
    monkeypatch.setattr(build, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="is no rehearsal"):
        build.rehearsals()


def test_the_recorded_rehearsals_say_what_they_are_and_have_no_times(build):
    cards = build.rehearsals()
    assert {"A100 80 GiB", "H100 80 GiB", "T4 16 GiB"} <= set(cards)
    for data in cards.values():
        assert data["assumed_context_bytes"] and data["host"] and data["versions"]["torch"] and data["date"]
        assert len(data["rows"]) == 10 and all(row["peak_bytes"] or row["message"] for row in data["rows"])
        assert not TIMES & set(names(data))
        for row in data["rows"]:
            assert row["status"] != "ok" or sum(row["breakdown"].values()) == row["peak_bytes"] <= row["reserved_bytes"]


def names(data):
    """Yield every key in a JSON value."""
    if isinstance(data, dict):
        yield from data
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from names(item)


def test_the_table_has_a_column_for_each_card_and_none_for_two(build, tmp_path):
    claim = {"id": "accumulation-memory", "verdict": "holds", "value": 0.5, "interval": None}
    claim["quantity"] = load()["accumulation-memory"].quantity
    cards = {"A": rehearsal("A", claims=[claim]), "B": rehearsal("B", None, "out of memory")}
    own = json.loads(course(tmp_path / "results.json", rehearsed=False).read_text())
    text = build.rehearsed_recipes(cards, {"nvidia-a100": own}, {}) + build.rehearsed_claims(cards)
    size = " / ".join(f"{own['runs'][0]['memory'][name] / 2**20:.1f}" for name in ("peak_bytes", "reserved_bytes"))
    assert "| recipe | V100, published | A, rehearsed | B, rehearsed | nvidia-a100, measured |" in text
    assert f"| vanilla | 14949 (13606) | 7168 / 14336 | out of memory | {size} |" in text
    assert "| 8681 MB against 14949 MB, on V100-SXM2 16 GB | **holds** (0.5) | not decided |" in text
    assert "speed not measured" not in text, "a GPU has run"
    assert "speed not measured" in build.rehearsed_recipes(cards, {}, {})


def test_only_memory_claims_that_were_decided_are_kept_of_a_rehearsed_course(rehearse, tmp_path):
    card = CARDS["a100"]
    course(tmp_path / "results.json", rehearsed=True)
    (kept,) = rehearse.decided(tmp_path, card)["claims"]
    assert (kept["id"], kept["value"], kept["verdict"]) == ("accumulation-memory", 0.5, "holds")
    for claim in ({"id": "accumulation-cost"}, {"verdict": "not testable here", "value": None}):
        course(tmp_path / "results.json", rehearsed=True, **claim)
        assert rehearse.decided(tmp_path, card)["claims"] == []
    with pytest.raises(ValueError, match="not rehearsed on H100"):
        rehearse.decided(tmp_path, CARDS["h100"])
    path = course(tmp_path / "results.json", rehearsed=False)
    path.write_text(path.read_text().replace("NVIDIA A100", "rehearsed A100 80 GiB"))  # a name alone proves nothing
    with pytest.raises(ValueError, match="not rehearsed on A100"):
        rehearse.decided(tmp_path, card)


def test_a_row_that_crashed_is_no_result(rehearse):
    assert rehearse._row(Run("vanilla", "out of memory", "CUDA out of memory"))["peak_bytes"] is None
    with pytest.raises(RuntimeError, match="crashed"):
        rehearse._row(Run("vanilla", "crashed", "why"))
