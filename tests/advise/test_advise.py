"""The advisor: what it proposes fits when it is trained, the next one does not, and what is unknown is called so."""

import dataclasses
import json
import random
import sys
import types
from pathlib import Path

import pytest

from perf_helpers import Lab, Task, cli, hardware
from perf_helpers.advise import advice as advise
from perf_helpers.advise import search, speeds
from perf_helpers.lab.runs import Memory, Run, Timing
from perf_helpers.texts import parse_bytes
from perf_helpers.unknown import Unknown

TASK = Task("bert-tiny", seq_len=32)
MB = 10**6
# Whose advice is asked for: never the machine that the tests run on.
PLAIN = hardware.Machine("a CPU, 2 cores", "cpu", cpu_cores=2, cpu_features=("avx2",))
NATIVE = dataclasses.replace(PLAIN, name="a server's CPU, 2 cores", cpu_features=("avx2", "avx512_bf16", "amx_bf16"))
cpu_only = pytest.mark.skipif(hardware.describe().kind != "cpu", reason="it trains on a CPU")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(out=tmp_path_factory.mktemp("lab"))


def synthetic(task, *, device, processes=1, compute_capability=None, **arguments):
    """An estimate by formula: weights and gradients of 100 MB each, states by optimizer, activations by tokens."""
    states = {"adamw_torch_fused": 200, "adamw_bnb_8bit": 50, "adafactor": 1}.get(arguments["optim"], 0) * MB
    size, half = arguments["per_device_train_batch_size"], bool(arguments.get("bf16"))
    activations = size * task.length() * MB // (40 if arguments.get("gradient_checkpointing") else 4) // (1 + half)
    several = arguments["gradient_accumulation_steps"] > 1
    forward = {"weights": 100 * MB, "gradients": 100 * MB * several, "optimizer_states": states}
    forward |= {"activations": activations}
    update = {"weights": 100 * MB, "gradients": 100 * MB, "optimizer_states": states, "activations": 0}
    peak = max(forward, update, key=lambda parts: sum(parts.values()))
    memory = Memory(sum(peak.values()), "estimated", breakdown=peak, phase_breakdowns={"step": update})
    memory = dataclasses.replace(memory, peak_phase="forward" if peak is forward else "step")
    return types.SimpleNamespace(memory=memory, peak_bytes=memory.peak_bytes, assumptions=())


@pytest.fixture
def followed(monkeypatch):
    """The synthetic model in place of the estimate, no recorded runs; the arguments that were asked for."""
    asked = []

    def estimate(task, **options):
        asked.append(options)
        return synthetic(task, **options)

    monkeypatch.setattr(advise, "estimate", estimate)
    monkeypatch.setattr(speeds, "RECORDED", Path("nowhere"))
    return asked


def ask(**options):
    default = {"memory": 10**9, "effective_batch": 64, "device": "cpu", "runs": [], "machine": PLAIN}
    return advise.advise(TASK, **default | options)


def peak(**arguments):
    return synthetic(TASK, device="cpu", **arguments).peak_bytes


# ---------------------------------------------------------------------------- against real trainings


@cpu_only
@pytest.mark.parametrize(("machine", "precision"), [(PLAIN, {}), (NATIVE, {"bf16": True})], ids=["fp32", "bf16"])
def test_what_is_proposed_fits_when_it_is_trained_and_the_next_micro_batch_does_not(lab, machine, precision):
    only = {"optim": "adamw_torch_fused", "gradient_checkpointing": False} | precision
    advice = advise.advise(TASK, memory="14MB", effective_batch=8, must=only, runs=[], machine=machine)
    (recipe,) = advice.recipes
    verified = advise.verify(advice, lab)
    assert verified.measured_bytes == recipe.needed_bytes <= 14 * MB
    assert verified.difference_bytes == 0 and recipe.headroom_bytes == 14 * MB - verified.measured_bytes
    size = 2 * recipe.arguments["per_device_train_batch_size"]
    more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
    beyond = lab.train("next", task=TASK, measure="memory", **recipe.arguments | more)
    assert beyond.peak_bytes > 14 * MB
    assert f", {size} x {8 // size} needs {beyond.peak_bytes / 1e6:.1f} MB" in recipe.why_not_next


@cpu_only
def test_the_largest_micro_batch_takes_one_real_run_where_halving_runs_out_of_memory(lab):
    from accelerate.utils import find_executable_batch_size

    limit = lab.train("9", task=TASK, measure="memory", per_device_train_batch_size=9).peak_bytes - 1
    attempts = []

    @find_executable_batch_size(starting_batch_size=12)
    def train(batch_size):
        attempts.append(batch_size)
        run = lab.train("attempt", task=TASK, measure="memory", per_device_train_batch_size=batch_size)
        if run.peak_bytes > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return batch_size

    assert train() == 8
    found = advise.largest_micro_batch(TASK, memory=limit, most=12, confirm=True, lab=lab)
    assert found.micro_batch == 8 and found.next_bytes == limit + 1
    assert [run.peak_bytes for run in found.runs] == [found.needed_bytes]
    assert len(attempts) == 4, "three attempts of theirs run out of memory, none of ours"


# ---------------------------------------------------------------------------- the search


@pytest.mark.parametrize("memory", range(340, 1200, 60))
def test_every_recipe_takes_the_largest_micro_batch_that_fits(followed, memory):
    advice = ask(memory=memory * MB, most=99)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert advice.recipes
    for recipe in advice.recipes:
        names = {name: value for name, value in recipe.arguments.items() if "size" not in name and "steps" not in name}
        peaks = {n: peak(**names, per_device_train_batch_size=n, gradient_accumulation_steps=64 // n) for n in sizes}
        assert recipe.arguments["per_device_train_batch_size"] == max(n for n in sizes if peaks[n] <= memory * MB)
        assert recipe.needed_bytes == peaks[recipe.arguments["per_device_train_batch_size"]]
    assert 0 < len(followed) == advice.estimates <= 16


def test_one_micro_batch_may_fit_where_several_do_not(followed):
    """Their gradients, 100 MB, wait during the next forward, whose activations take 8 MB a sample."""
    advice = ask(memory=404 * MB, effective_batch=4, must={"optim": "adamw_torch_fused"}, avoid=["checkpointing"])
    assert [recipe.arguments["gradient_accumulation_steps"] for recipe in advice.recipes] == [1]


def test_a_recipe_that_only_adds_costs_is_left_out(followed):
    (plain,) = ask(memory="64GB").recipes
    assert plain.costs == () and plain.arguments["per_device_train_batch_size"] == 64 and len(followed) == 2


def test_a_bend_in_the_peak_does_not_mislead_the_search():
    def bent(size):
        return max(1000, 20 * size + 100, 50 * size - 3000)

    def counted(size):
        asked.append(size)
        return bent(size)

    for limit in range(1000, 9000, 200):
        asked = []
        place = search.Search(range(1, 257), counted, limit).run()
        assert place + 1 == max(size for size in range(1, 257) if bent(size) <= limit)
        assert len(asked) < 12


def test_the_search_ends_whatever_it_is_told():
    rng = random.Random(0)
    for _ in range(500):
        sizes, asked = range(1, rng.randrange(2, 300)), []

        def anything(size, asked=asked):
            asked.append(size)
            return rng.randrange(1000)

        slope = rng.choice([None, 0.0, -3.0, 5.0])
        found = search.Search(sizes, anything, rng.randrange(1000), slope, rng.choice([None, sizes[-1]]))
        place = found.run(rng.choice([None, 0]), rng.choice([-1, -1, 0]))
        assert -1 <= place < len(sizes) and len(asked) == len(set(asked)) <= len(sizes)


def test_what_must_be_is_and_what_is_avoided_is_not(followed):
    advice = ask(memory=450 * MB, must={"optim": "sgd", "gradient_accumulation_steps": 4}, most=99)
    assert {recipe.arguments["optim"] for recipe in advice.recipes} == {"sgd"}
    assert {recipe.arguments["per_device_train_batch_size"] for recipe in advice.recipes} == {16}
    assert all("convergence" in " ".join(recipe.costs) for recipe in advice.recipes)
    advice = ask(memory=450 * MB, avoid=["gradient_checkpointing", "Adafactor", "accumulation"], most=99)
    assert not advice.recipes and len(followed) < 20
    assert advice.smallest.arguments == {
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "optim": "adamw_bnb_8bit"
    }  # fmt: skip
    halves = ask(memory=450 * MB, processes=2)
    assert all(
        a["per_device_train_batch_size"] * a["gradient_accumulation_steps"] == 32
        for a in (recipe.arguments for recipe in halves.recipes)
    )


def test_on_a_cpu_that_computes_in_bf16_recipes_with_it_are_proposed_too(followed):
    plain, native = (ask(memory=450 * MB, most=99, machine=machine) for machine in (PLAIN, NATIVE))
    lower = {recipe.name for recipe in native.recipes if "bf16" in recipe.name}
    assert lower and {recipe.name for recipe in plain.recipes} == {r.name for r in native.recipes} - lower
    assert not any(recipe.arguments.get("bf16") for recipe in plain.recipes)


def test_advice_ends_when_its_time_is_up_and_says_what_was_not_looked_at(followed, monkeypatch):
    whole = ask(memory=450 * MB, most=99)
    monkeypatch.setattr(advise, "seconds_left", lambda _: 0.0)
    late = ask(memory=450 * MB, most=99)
    assert late.recipes == whole.recipes[:1] and late.estimates < whole.estimates
    assert any("time was up" in note and "not looked at" in note for note in late.notes)


def test_lower_precision_is_for_devices_that_compute_in_it():
    def names(kind, capability, **machine):
        return {t.name for t in advise._precisions(hardware.Machine("m", kind, **machine), kind, capability)}

    assert names("cuda", (8, 0)) == {"bf16", "bf16 weights"} and names("cuda", (7, 5)) == {"fp16"}
    assert names("cpu", (9, 0), cpu_features=("avx2",)) == set()
    assert names("cpu", (9, 0), cpu_features=("amx_bf16",)) == {"bf16", "bf16 weights"}


# ---------------------------------------------------------------------------- speed


def timed(speed, minute, **arguments):
    timing = Timing(1.0, 0.0, 5, 1, speed)
    date = f"2026-01-01T00:{minute:02}:00+00:00"
    arguments = {"per_device_train_batch_size": 4} | arguments
    task, machine = dataclasses.asdict(TASK), {"name": PLAIN.name}
    return Run("r", "ok", arguments=arguments, task=task, timing=timing, machine=machine, date=date)


def pairs(speed, count=3, **arguments):
    return [run for n in range(count) for run in (timed(10.0, 2 * n), timed(speed, 2 * n + 1, **arguments))]


def speeds_of(advice):
    return {recipe.name: recipe.speed for recipe in advice.recipes}


def test_speed_is_what_runs_of_this_machine_say_and_unknown_where_they_are_silent(followed):
    options = {"memory": 420 * MB, "avoid": ["adamw_bnb_8bit"]}
    unknown = ask(**options)
    assert speeds_of(unknown) == {"AdamW, 2 x 32": 1.0, "checkpointing, AdamW, 64 x 1": None, "Adafactor, 16 x 4": None}
    assert "checkpointing: not measured here" in unknown.recipes[1].speed_source
    slower = speeds_of(ask(**options, runs=pairs(5.0, gradient_checkpointing=True)))
    assert slower["checkpointing, AdamW, 64 x 1"] == 0.5 and slower["Adafactor, 16 x 4"] is None
    fewer = [pairs(5.0, count=2, gradient_checkpointing=True), pairs(9.0, gradient_checkpointing=True)]
    assert speeds_of(ask(**options, runs=fewer[0])) == speeds_of(unknown), "two pairs are not told from noise"
    assert speeds_of(ask(**options, runs=fewer[1]))["checkpointing, AdamW, 64 x 1"] == 1.0, "10 % is too small to tell"
    faster = ask(**options, runs=pairs(20.0, optim="adafactor"))
    assert faster.recipes[0].name == "Adafactor, 16 x 4" and faster.recipes[1].speed == 0.5
    untimed = [dataclasses.replace(run, timing=Timing(*[Unknown()] * 5)) for run in pairs(5.0, optim="adafactor")]
    assert speeds_of(ask(**options, runs=untimed)) == speeds_of(unknown), "of a rehearsal nobody knows the time"
    foreign = [dataclasses.replace(run, machine={"name": "another"}) for run in pairs(5.0, optim="adafactor")]
    assert speeds_of(ask(**options, runs=foreign)) == speeds_of(unknown)
    small = [run for n in range(3) for run in (timed(10.0, 2 * n), timed(4.0, 2 * n + 1, **one_by_four()))]
    known = ask(**options | {"memory": 410 * MB}, runs=small + pairs(10.0, optim="adafactor"))
    assert speeds_of(known)["AdamW, 1 x 64"] == 0.4 and speeds_of(known)["Adafactor, 16 x 4"] == 1.0


def one_by_four():
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


def test_where_nothing_ran_here_the_nearest_recorded_machine_speaks(followed, monkeypatch):
    monkeypatch.setattr(speeds, "RECORDED", Path(__file__).resolve().parents[2] / "results")
    found = {recipe.name: recipe for recipe in ask(memory=420 * MB).recipes}
    source = " ".join(found["checkpointing, AdamW, 64 x 1"].speed_source)
    assert 0.6 < found["checkpointing, AdamW, 64 x 1"].speed < 0.7 and "recorded on AMD EPYC, 2 cores" in source
    assert found["Adafactor, 16 x 4"].speed == 1.0 and "too small" in " ".join(found["Adafactor, 16 x 4"].speed_source)


def test_no_ratio_of_a_cpu_is_taken_for_a_gpu(followed, monkeypatch):
    monkeypatch.setattr(speeds, "RECORDED", Path(__file__).resolve().parents[2] / "results")
    advice = ask(memory="4GB", device="cuda", most=99)
    sources = {source for recipe in advice.recipes for source in recipe.speed_source}
    assert sources and not any("recorded on" in source for source in sources)
    assert any("fp16-faster of the 2023 guide, V100-SXM2 16 GB" in source for source in sources)
    free = 4 * 10**9 - 1341 * 2**20
    assert all(recipe.peak_bytes + recipe.headroom_bytes == free for recipe in advice.recipes)


# ---------------------------------------------------------------------------- nothing fits, bad input


def test_where_nothing_fits_it_says_by_how_much_and_what_would(followed):
    advice = ask(memory=150 * MB, effective_batch=64)
    assert advice.status == "nothing fits" and advice.recipes == ()
    assert -advice.smallest.headroom_bytes == advice.smallest.needed_bytes - 150 * MB
    assert advice.smallest.needed_bytes == 201 * MB
    changes = {change.name: change for change in advice.changes}
    assert changes["sharding"].fits and changes["sharding"].text == "over 2 devices, at most 64 samples each at a time"
    assert changes["sharding"].needed_bytes == 201 * MB // 2 and changes["sharding"].assumption
    assert not changes["offload"].fits and changes["offload"].needed_bytes == 200 * MB
    assert not changes["fewer tokens"].fits
    assert "nothing fits" in repr(advice) and "51.0 MB over" in repr(advice)
    only = ask(memory=330 * MB, must={"optim": "adamw_torch_fused", "gradient_checkpointing": False})
    assert {change.name for change in only.changes if change.fits} == {"sharding", "offload"}


def test_a_shorter_sequence_is_the_longest_that_fits(followed):
    task = Task("bert-tiny", seq_len=256)
    fixed = {"optim": "sgd", "gradient_checkpointing": False, "per_device_train_batch_size": 32}
    advice = advise.advise(task, memory=1163 * MB, effective_batch=64, must=fixed, device="cpu", runs=[], machine=PLAIN)
    change = next(change for change in advice.changes if change.name == "fewer tokens")
    assert change.text.startswith("seq_len=120 instead of 256") and change.needed_bytes == 1160 * MB


@pytest.mark.parametrize("memory", ["16", "16 gigs", "16gb", "-1GB", "", "GB", 0, True, None, 16, float("nan"), "1kB"])
def test_memory_is_read_strictly(memory):
    with pytest.raises(ValueError, match=r"memory=.*'16GB'"):
        parse_bytes(memory)


def test_memory_in_its_units():
    found = [parse_bytes(text) for text in ("16GB", "16 GiB", "1.5MB", 2_000_000, 3e9)]
    assert found == [16 * 10**9, 16 * 2**30, 1_500_000, 2_000_000, 3_000_000_000]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"effective_batch": 0}, "effective_batch=0"),
        ({"processes": 3}, "does not divide"),
        ({"device": "tpu"}, "'cpu' or 'cuda'"),
        ({"must": {"optm": "sgd"}}, "optim"),
        ({"must": {"optim": "adafactr"}}, "adafactor"),
        ({"must": {"per_device_train_batch_size": 5}}, "64 samples"),
        ({"must": {"gradient_accumulation_steps": 2}, "avoid": ["accumulation"]}, "keep one"),
        ({"must": {"optim": "adafactor"}, "avoid": ["adafactor"]}, "keep one"),
        ({"avoid": ["chekpointing"]}, "did you mean 'checkpointing'"),
        ({"avoid": "checkpointing"}, "list of names"),
        ({"avoid": ["adamw_torch_fused", "adafactor", "8-bit Adam"]}, "fix one with must"),
    ],
)
def test_a_mistake_is_named(followed, options, hint):
    with pytest.raises(ValueError, match=hint):
        ask(**options)
    assert not followed


def test_a_micro_batch_is_not_given_to_who_looks_for_it():
    with pytest.raises(ValueError, match="leave it out"):
        advise.largest_micro_batch(TASK, memory="1GB", per_device_train_batch_size=4)


def test_an_advice_for_another_device_is_not_verified_here(followed, lab):
    other = {"cpu": "cuda", "cuda": "cpu"}[lab.machine.kind]
    with pytest.raises(ValueError, match="verify it where it will run"):
        advise.verify(ask(memory="64GB", device=other), lab)


# ---------------------------------------------------------------------------- how it shows itself


def test_it_shows_itself_as_text_as_html_and_as_json(followed):
    advice = ask(memory=420 * MB, must={"dtype": "float32"})
    text, page = repr(advice), advice._repr_html_()
    assert "TrainingArguments(" in text and "from_pretrained(..., dtype='float32')" in text
    assert "<table>" in page and all(recipe.name in page for recipe in advice.recipes)
    data = json.loads(json.dumps(advice.to_dict()))
    assert data["status"] == "ok" and data["recipes"][0]["text"] == advice.recipes[0].text
    assert len(data["recipes"]) == len(advice.recipes) > 1


def test_what_is_to_be_pasted_is_python_that_transformers_takes(followed, tmp_path):
    from transformers import TrainingArguments

    for recipe in ask(memory=420 * MB).recipes:
        given = eval(recipe.text, {"TrainingArguments": dict})
        assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given).optim == recipe.arguments["optim"]


@pytest.fixture
def plain(monkeypatch):
    """The command line is on a machine of its own."""
    monkeypatch.setattr(advise.hardware, "describe", lambda: PLAIN)


def command(monkeypatch, *words):
    words = ["perf-helpers", "advise", "--model", "bert-tiny", "--seq_len", "16", *words]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@cpu_only
def test_the_command_prints_one_json_object_and_verifies_it(plain, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    words = ["--memory", "1GB", "--effective-batch", "2", "--must", "optim=sgd", "--avoid", "accumulation"]
    assert command(monkeypatch, *words, "--verify", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "ok" and found["recipes"][0]["arguments"]["optim"] == "sgd"
    assert found["verification"]["difference_bytes"] == 0 < found["verification"]["measured_bytes"]


def test_the_command_ends_with_0_where_nothing_fits(followed, plain, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    words = ["--memory", "150MB", "--effective-batch", "64", "--device", "cpu"]
    assert command(monkeypatch, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "nothing fits"
    assert command(monkeypatch, *words) == 0 and "nothing fits" in capsys.readouterr().out


def test_the_command_names_a_mistake_and_ends_with_2(monkeypatch, capsys):
    assert command(monkeypatch, "--memory", "lots", "--effective-batch", "2") == 2
    printed = capsys.readouterr()
    assert "'16GB'" in printed.err and not printed.out
