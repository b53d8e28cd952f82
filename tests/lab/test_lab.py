"""The lab from a user's view: mistakes are refused before anything is built, runs are stored, and comparisons are
interleaved.
"""

import itertools
import json
import time

import pytest
from machines import TINY

from perf_helpers.lab.lab import Lab
from trainmem.core.hardware import Gpu, Machine
from trainmem.core.outcomes import Outcome
from trainmem.core.task import Task
from trainmem.core.training import Experiment, pickled
from trainmem.measure import processes, quiet
from trainmem.records import Memory, Ratio, Store
from trainmem.unknown import Unknown


def test_foresee_returns_the_answer_and_reports_a_missing_one_in_one_line(lab, capsys):
    assert lab.foresee(lambda a, b: a + b, 1, b=2) == 3 and capsys.readouterr().out == ""

    def refused():
        raise ValueError("a model\nof another kind")

    assert lab.foresee(refused) is None
    assert capsys.readouterr().out == "no estimate: a model\n"


@pytest.mark.nightly
def test_what_takes_too_long_to_foresee_is_given_up(lab, capsys):
    from trainmem.estimate import estimate

    def endless(_):

        time.sleep(600)

    assert lab.foresee(estimate, TINY, device="cpu", function=endless, seconds=1) is None
    assert capsys.readouterr().out.startswith("no estimate: the estimate of bert-tiny timed out")
    assert lab.run(lambda _: 1, measure=("none",)).ok, "what comes later has its own time"


def test_a_lab_that_has_waited_in_vain_for_long_waits_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("perf_helpers.lab.lab.PATIENCE_SECONDS", 1)
    impatient, calls = Lab("cpu", out=tmp_path), []

    def slow():
        calls.append(1)
        impatient.run(lambda _: __import__("time").sleep(600), task=TINY, measure=("none",))
        raise ValueError("no answer")

    assert [impatient.foresee(slow) for _ in range(3)] == [None] * 3
    lines = capsys.readouterr().out.splitlines()
    assert len(calls) == 1 and lines[0] == "no estimate: no answer"
    assert len(lines) == 3 and all(line.startswith("no estimate: skipped") for line in lines[1:])


def test_a_strict_lab_raises_where_the_packages_are_supported_ones(tmp_path, monkeypatch, capsys):
    strict = Lab("cpu", strict=True, out=tmp_path)
    with pytest.raises(ZeroDivisionError):
        strict.foresee(lambda: 1 / 0)
    monkeypatch.setattr("perf_helpers.lab.doctor.is_supported", lambda: False)
    assert strict.foresee(lambda: 1 / 0) is None and "no estimate: division by zero" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"gradient_acumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"per_device_batch_size": 4}, "per_device_train_batch_size"),
        ({"adafactor": True}, "optim='adafactor'"),
        ({"predict_with_generate": True}, "Seq2SeqTrainer.*leave it out"),
        ({"per_device_train_batch_size": 0}, "at least 1"),
        ({"per_device_train_batch_size": "four"}, "at least 1"),
        ({"gradient_accumulation_steps": -1}, "at least 1"),
        ({"optim": "adamm"}, "adam"),
        ({"bf16": "yes"}, "True or False"),
        ({"dtype": "float8"}, "float16"),
        ({"attn_implementation": "flush"}, "eager"),
        ({"lr_scheduler_type": "linaer"}, "linear"),
        ({"bf16": True, "fp16": True}, "fp16"),
        ({"gradient_checkpointing": True, "activation_checkpointing": True}, "checkpointing"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_built(lab, arguments, hint):
    before = len(lab.runs)
    with pytest.raises(ValueError, match=hint):
        lab.train("mistake", task=TINY, **arguments)
    assert len(lab.runs) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda lab: lab.train("x", measure=("speed",)),
        lambda lab: lab.train("x", processes=0),
        lambda lab: lab.train("x", steps=-3),
        lambda lab: lab.run("not a function"),
        lambda lab: lab.run(None),
        lambda lab: Lab("gpuu"),
        lambda lab: Task("bert-tiny", seq_len=0),
        lambda lab: Task("bert-tiny", data="learned"),
        lambda lab: lab.train("x", task=Task("bert-tiny", seq_len=100_000)),
        lambda lab: lab.train("x", task=Task("no/such-model-anywhere")),
    ],
)
def test_other_mistakes_are_value_errors_too(lab, call):
    with pytest.raises(ValueError):
        call(lab)


def test_old_and_new_names_of_an_argument_mean_the_same(lab):
    old = lab.train("old", task=TINY, measure=("memory",), gradient_checkpointing=True)
    new = lab.train("new", task=TINY, measure=("memory",), activation_checkpointing=True)
    assert old.peak_bytes == new.peak_bytes


def test_a_comparison_takes_turns(lab, monkeypatch):
    a = lab.train("a", task=TINY, steps=2, per_device_train_batch_size=2)
    b = lab.train("b", task=TINY, steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    comparison = lab.compare(a, b, turns=3)
    assert comparison.memory_ratio == b.peak_bytes / a.peak_bytes
    for ratio in (comparison.speed_ratio, comparison.wall_ratio):
        assert len(ratio.pairs) == 4, "one in each process, at least"
        assert ratio.low <= ratio.value / ratio.floor and ratio.value * ratio.floor <= ratio.high
        assert ratio.floor >= 1.05
    assert " x by CPU time" in comparison._repr_html_() and "by the clock" in repr(comparison)
    monkeypatch.setenv(quiet.UNTIMED, "1")  # at the smallest sizes
    pairs = lab.compare(a, b, turns=8).speed_ratio.pairs
    assert len(pairs) == 8 and len({*pairs}) == 1, "one turn stands for all"


@pytest.mark.nightly
def test_several_are_compared_with_one_baseline_in_the_same_turns(lab):
    two, many = (lab.train(f"{n}", task=TINY, measure="memory", per_device_train_batch_size=n) for n in (2, 32))
    gone = lab.run(lambda task: 1 / 0, "gone", measure=("memory",))
    found = lab.compare(two, many, gone, two, turns=4)
    assert [each.other.name for each in found] == ["32", "gone", "2"] and all(each.baseline == two for each in found)
    assert [each.speed_ratio.known for each in found] == [True, False, True]
    assert found[0].memory_ratio > 1 == found[2].memory_ratio
    assert found[0].step_seconds[0] == found[2].step_seconds[0] < found[0].step_seconds[1]
    assert type(found[0]).from_dict(json.loads(json.dumps(found[0].to_dict()))) == found[0]
    with pytest.raises(ValueError, match="give another run"):
        lab.compare(two)


@pytest.mark.nightly
def test_inference_is_compared_too(lab):
    small, large = (lab.infer(f"{n}", task=TINY, measure=("time",), per_device_eval_batch_size=n) for n in (2, 64))
    assert small.timing.samples_per_second and len(small.timing.all_cpu_seconds) == small.timing.steps
    assert lab.compare(small, large, turns=8).speed_ratio.low > 1.5, "a forward of 64 takes less than 32 of 2"


@pytest.mark.nightly
def test_several_ranks_have_processes_of_their_own_and_the_wall_decides(lab):
    two = lab.train("two", task=TINY, steps=2, processes=2, measure=("time",))
    comparison = lab.compare(two, two, turns=3)
    assert len(comparison.speed_ratio.pairs) == 3 and comparison.wall_ratio is None
    assert comparison.speed_ratio.floor == 1.3


def test_a_comparison_with_a_run_that_failed_is_unknown_and_says_why(lab):
    fine = lab.train("fine", task=TINY, measure=("memory",), per_device_train_batch_size=2)
    gone = lab.run(lambda task: 1 / 0, "gone", measure=("memory",))
    comparison = lab.compare(fine, gone)
    assert not comparison.speed_ratio.known and isinstance(comparison.memory_ratio, Unknown)
    assert comparison.speed_ratio.value.why.startswith("speed not measured: 'gone' crashed: ZeroDivisionError")
    assert comparison.memory_ratio.why.startswith("memory not measured: 'gone' crashed")
    assert lab.compare(gone, fine).speed_ratio.value.why == comparison.speed_ratio.value.why


def test_a_comparison_whose_turns_fail_is_unknown_and_says_why(lab, monkeypatch, capsys):
    run = lab.train("alone", task=TINY, measure=("memory",), per_device_train_batch_size=2)
    late = Outcome("timed out", "no result within 1 s")
    monkeypatch.setattr("trainmem.measure.processes.side_by_side", lambda *_: late)
    comparison = lab.compare(run, run)
    assert comparison.speed_ratio.value.why.startswith(
        "speed not measured: 'alone and alone in turns' timed out: no result within 1 s."
    )
    assert comparison.memory_ratio == 1 and "in turns' timed out: no result within 1 s" in capsys.readouterr().err
    unmeasured = lab.run(lambda task: 1, "nobody asked", measure=("none",))
    assert lab.compare(unmeasured, unmeasured).memory_ratio.why.endswith("measure=")


@pytest.fixture
def with_gpus(tmp_path):
    """Return a function that takes a number of GPUs and returns (lab on a machine with that many pretended GPUs, list
    of its requests).

    Each request is (name of the function that the lab would run in subprocesses, its arguments). No subprocess starts.
    """

    def make(count=1):
        lab = Lab("cpu", out=tmp_path)
        gpus = tuple(Gpu(n, memory_bytes=80 * 2**30) for n in range(count))
        lab.machine, requests = Machine("rehearsed", "cuda", gpus=gpus), []

        def perform(function, *arguments):
            requests.append((function.__name__, *arguments))
            if function.__name__ in ("alternate", "side_by_side"):
                experiments, turns, *_ = arguments
                return Outcome(value=[[[(1.0, 1.0)] * turns] * len(experiments)])
            return Outcome(memory=Memory(1, "allocated", breakdown={}, phases={}))

        lab._perform = perform
        return lab, requests

    return make


def turns_taken(lab, requests, *runs):
    """Compare runs; return a list with one tuple for each time that the lab requests to interleave experiments.

    A tuple has the name of the interleaving function ("side_by_side" or "alternate") and the number of threads of each
    experiment. `requests`: the list of requests from `with_gpus`; `runs`: the baseline, then the other runs.
    """
    requests.clear()
    lab.compare(*runs, turns=3)
    return [(name, *(each.threads for each in experiments)) for name, experiments, *_ in requests]


@pytest.mark.nightly
def test_the_noise_floor_and_the_threads_follow_where_a_run_ran_and_not_what_the_machine_has(with_gpus):
    lab, requests = with_gpus(count=2)
    on_gpu, on_cpu = (lab.train(str(cpu), task=TINY, use_cpu=cpu) for cpu in (False, True))
    two, three = (lab.run(lambda task: 1, f"{n} ranks", processes=n) for n in (2, 3))
    assert [lab.noise_floor(run) for run in (on_gpu, two, on_cpu, three)] == [1.02, 1.02, 1.3, 1.3]
    assert lab.noise_floor() == 1.02 and lab.noise_floor(on_gpu, on_cpu) == 1.3
    assert lab.ratio([2.0] * 3, on_cpu).low == 2 / 1.3 and lab.ratio([2.0] * 3).low == 2 / 1.02
    assert lab.compare(on_cpu, on_cpu).speed_ratio.high == 1.05 and lab.compare(on_gpu, on_gpu).speed_ratio.high == 1.02
    assert lab.compare(on_cpu, three).speed_ratio.high == 1.3
    inside_one = ("side_by_side", 1, 1, 1)
    assert turns_taken(lab, requests, on_cpu, on_cpu) == [inside_one]
    assert turns_taken(lab, requests, on_gpu, three) == [("alternate", 1, 1)]
    assert turns_taken(lab, requests, on_gpu, two) == [("alternate", None, None)]
    several = turns_taken(lab, requests, on_cpu, on_cpu, three, on_gpu, two)
    assert several == [("side_by_side", 1, 1, 1, 1), ("alternate", 1, 1), ("alternate", 1, 1)]


def test_the_peak_alone_is_that_of_the_memory_and_takes_one_pass(lab, monkeypatch):
    """`measure="peak"` leaves out the second pass, which gives the breakdown."""
    passes, execute = [], processes.execute
    monkeypatch.setattr(processes, "_may_be_paired", lambda _: False)
    monkeypatch.setattr(processes, "execute", lambda *given: passes.append(given[1]) or execute(*given))
    whole, peak = (lab.train(each, task=TINY, measure=each) for each in ("memory", "peak"))
    assert passes == ["memory", "categories", "memory"] and peak.peak_bytes == whole.peak_bytes
    assert whole.memory.breakdown and peak.memory.breakdown is None and peak.memory.phases == whole.memory.phases


@pytest.mark.nightly
def test_two_passes_beside_each_other_count_what_they_count_one_after_the_other(lab, monkeypatch):
    found = []
    for paired in (True, False):
        monkeypatch.setattr(processes, "_may_be_paired", lambda experiment, paired=paired: paired)
        memory = lab.train(f"paired {paired}", task=TINY, measure="memory", per_device_train_batch_size=2).memory
        found.append((memory.peak_bytes, memory.breakdown, memory.phases, memory.peak_operation))
    assert found[0] == found[1] and sum(found[0][1].values()) == found[0][0]


def test_of_two_passes_the_first_ones_failure_is_the_runs(lab, monkeypatch):
    monkeypatch.setattr(processes, "_may_be_paired", lambda experiment: True)
    run = lab.train("no time", task=TINY, measure="memory", timeout=0.01)
    assert run.status == "timed out" and not run.memory


def test_a_function_is_never_paired_for_its_passes_may_share_a_file():
    trained = Experiment("trained", TINY)
    assert not any(map(processes._may_be_paired, (trained.replace(function=b"f"), trained.replace(processes=2))))


def test_on_a_cpu_every_run_has_the_floor_of_a_cpu(lab):
    assert lab.noise_floor() == 1.3 == lab.noise_floor(lab.run(lambda task: 1, measure=("none",)))


def test_a_comparison_of_runs_of_another_lab_is_refused(lab, tmp_path):
    run = Lab("cpu", out=tmp_path).run(lambda task: 1, measure=("none",))
    with pytest.raises(ValueError, match=r"lab\.train or lab\.run"):
        lab.compare(run, run)


def test_an_interval_is_no_narrower_than_the_machines_noise(lab):
    ratio = lab.ratio([2.0, 2.0, 2.0, 2.0])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0 / 1.3, 2.0 * 1.3)
    wide = lab.ratio([0.5, 1.0, 2.0, 4.0, 8.0])
    assert wide.low < 2.0 / 1.3 and wide.high > 2.0 * 1.3
    with pytest.raises(ValueError, match="at least 3"):
        lab.ratio([1.0])


def test_a_ratio_of_pairs_that_are_unknown_is_unknown(lab):
    ratio = lab.ratio([1.0, Unknown("no time"), 2.0])
    assert isinstance(ratio, Ratio) and ratio.value.why == "no time" and ratio.pairs == ()


def test_runs_are_kept_with_machine_versions_and_date(lab):
    run = lab.train("kept", task=TINY, steps=2, per_device_train_batch_size=2)
    kept = [each for each in Store(lab.store.path).read() if each.id == run.id]
    assert kept == [run]
    assert run.machine["cpu_cores"] >= 1 and run.versions["torch"] and run.date.startswith("20")
    assert run.arguments == {"per_device_train_batch_size": 2} and run.task["model"] == "bert-tiny"


def test_an_executor_can_take_the_place_of_this_machine(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as executor:
        lab = Lab("cpu", out=tmp_path, executor=executor)
        run = lab.train("afar", task=TINY, steps=2, per_device_train_batch_size=2)
    assert run.ok and run.peak_bytes and run.step_seconds


def test_a_function_may_say_that_it_uses_the_cpu(lab, monkeypatch):
    values = []

    def performed(experiment, measure, *_):
        values.append(experiment.arguments.get("use_cpu"))
        return Outcome()

    monkeypatch.setattr(processes, "execute", performed)
    for use_cpu in (False, True):
        lab.run(lambda _: 1, measure=("none",), use_cpu=use_cpu)
    assert values == [None, True]


def test_a_function_that_cannot_travel_says_what_to_do(lab):
    import threading

    lock = threading.Lock()
    with pytest.raises(ValueError, match="inside the function"):
        lab.run(lambda task: lock.locked(), measure=("none",))


def test_a_function_that_uses_its_lab_is_sent_without_the_functions_before_it(lab):
    """A function that uses its lab is sent together with the lab; earlier experiments' functions must stay out.

    If they were sent, too, the bytes would double with each experiment. They must grow by about equal amounts instead.
    """

    def uses_lab(_):
        return lab.profile.name

    sizes = []
    for number in range(4):
        assert lab.run(uses_lab, f"uses the lab {number}", measure="value").value == "cpu"
        sizes.append(len(pickled(uses_lab)))
    more = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(more) < 1.1 * min(more), "each run adds its own entry"


def test_fp16_on_a_cpu_is_reported_as_ignored(lab):
    with pytest.warns(UserWarning, match="ignores fp16"):
        run = lab.train("fp16", task=TINY, measure=("memory",), fp16=True, use_cpu=True)
    assert run.memory.breakdown["weight_copies"] == 0
