"""The lab as a user sees it: clean processes, failures as results, mistakes refused before anything is built."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from perf_helpers.lab.hardware import Gpu, Machine
from perf_helpers.lab.lab import Lab
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.processes import Turns
from perf_helpers.lab.runs import Memory, Ratio
from perf_helpers.lab.store import Store
from perf_helpers.lab.task import Task
from perf_helpers.unknown import Unknown

TINY = Task("bert-tiny", seq_len=16, dataset_size=64)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab("cpu", out=tmp_path_factory.mktemp("lab"), timeout=120)


def test_each_experiment_has_a_process_of_its_own(lab):
    def look(_):
        import builtins
        import os

        seen = hasattr(builtins, "left_behind")
        builtins.left_behind = True
        return [os.getpid(), os.getppid(), seen]

    (first, server, dirty_1), (second, server_2, dirty_2) = (lab.run(look, measure=("none",)).value for _ in range(2))
    assert first != second and not dirty_1 and not dirty_2
    assert server == server_2 != os.getpid()  # both forked from one server


def test_the_server_has_imported_torch_and_touched_no_device(lab):
    def look(_):
        import sys

        import torch

        return ["transformers.trainer" in sys.modules, "bitsandbytes" in sys.modules, torch.cuda.is_initialized()]

    without_gpu = not lab.machine.gpus  # bitsandbytes asks for GPUs when it is imported
    assert lab.run(look, measure=("none",)).value == [True, without_gpu, False]


def test_what_is_foreseen_is_the_answer_and_no_answer_is_one_line(lab, capsys):
    assert lab.foresee(lambda a, b: a + b, 1, b=2) == 3 and capsys.readouterr().out == ""

    def refused():
        raise ValueError("a model\nof another kind")

    assert lab.foresee(refused) is None
    assert capsys.readouterr().out == "no estimate: a model\n"


def test_what_takes_too_long_to_foresee_is_given_up(lab, capsys):
    from perf_helpers.estimate import estimate

    def endless(_):
        import time

        time.sleep(600)

    assert lab.foresee(estimate, TINY, device="cpu", function=endless, seconds=1) is None
    assert capsys.readouterr().out.startswith("no estimate: bert-tiny was given up, no result within 1 s")
    assert lab.run(lambda _: 1, measure=("none",)).ok, "what comes later has its own time"


def test_a_lab_that_has_waited_in_vain_for_long_waits_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("perf_helpers.lab.lab.PATIENCE_SECONDS", 1)
    impatient, asked = Lab("cpu", out=tmp_path), []

    def slow():
        asked.append(1)
        impatient.run(lambda _: __import__("time").sleep(600), task=TINY, measure=("none",))
        raise ValueError("no answer")

    assert [impatient.foresee(slow) for _ in range(3)] == [None] * 3
    lines = capsys.readouterr().out.splitlines()
    assert len(asked) == 1 and lines[0] == "no estimate: no answer"
    assert lines[1:] == ["no estimate: earlier ones took too long, this one was not waited for"] * 2


def test_a_strict_lab_raises_where_the_packages_are_supported_ones(tmp_path, monkeypatch, capsys):
    strict = Lab("cpu", strict=True, out=tmp_path)
    with pytest.raises(ZeroDivisionError):
        strict.foresee(lambda: 1 / 0)
    monkeypatch.setattr("perf_helpers.lab.doctor.is_supported", lambda: False)
    assert strict.foresee(lambda: 1 / 0) is None and "no estimate: division by zero" in capsys.readouterr().out


def test_experiments_and_comparisons_end_with_the_time_that_they_are_given_together(lab):
    from perf_helpers.lab import processes

    def endless(_):
        import time

        time.sleep(600)

    with processes.within(1):
        run = lab.run(endless, task=TINY, measure=("none",))
        after = lab.run(lambda _: 1, task=TINY, measure=("none",))
    assert (run.status, run.message) == ("timed out", "no result within 1 s")
    assert after.status == "timed out"


def test_functions_travel_with_what_they_close_over(lab):
    factor = 7

    def function(task):
        import math

        return math.floor(factor * 1.5) + len(task.model)

    assert lab.run(function, task=TINY, measure=("none",)).value == 10 + len("bert-tiny")


def test_environment_and_folder_are_the_callers(lab, monkeypatch, tmp_path):
    monkeypatch.setenv("A_SETTING_OF_THE_TEST", "seen")
    monkeypatch.chdir(tmp_path)

    def look(_):
        import os

        return [os.environ.get("A_SETTING_OF_THE_TEST"), os.getcwd()]

    assert lab.run(look, measure=("none",)).value == ["seen", str(tmp_path)]


def test_what_a_function_prints_reaches_the_caller(lab, capfd):
    lab.run(lambda task: print("hello from", task.model), task=TINY, measure=("none",))
    assert capfd.readouterr().out == "hello from bert-tiny\n"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("raise KeyError('lost')", "crashed", "KeyError: 'lost'"),
        ("import os; os._exit(9)", "crashed", "exit code 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed", "SIGSEGV"),
        ("import torch; torch.empty(10**15)", "out of memory", "allocate"),
        ("raise MemoryError", "out of memory", "MemoryError"),
        ("import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried')", "out of memory", "Tried"),
        ("import sys; sys.exit('enough')", "crashed", "enough"),
        ("return lambda: 0", "crashed", "JSON"),
    ],
)
def test_a_failure_is_a_result_and_the_next_experiment_is_clean(lab, body, status, message):
    namespace = {}
    exec(f"def function(task):\n    {body}", namespace)
    run = lab.run(namespace["function"], measure=("none",))
    assert (run.status, message in run.message) == (status, True), run
    assert run.peak_bytes is None and run.samples_per_second is None
    assert lab.run(lambda task: "fine", measure=("none",)).value == "fine"


def test_a_hang_is_ended_with_everything_it_started(lab, tmp_path):
    def hang(_):
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(child.pid))
        time.sleep(1000)

    run = lab.run(hang, measure=("none",), timeout=3)
    assert run.status == "timed out"
    assert _gone(int((tmp_path / "pid").read_text()))


def _gone(pid):
    """Whether a process ends, or is a zombie that nobody collects here. Waits for it, up to the test's own limit."""
    while psutil.pid_exists(pid):
        with_status = psutil.Process(pid)
        if with_status.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return True


def test_nothing_survives_a_killed_kernel(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from perf_helpers import Lab
            lab = Lab("cpu", out={str(tmp_path)!r})
            def hang(_):
                import os, pathlib, time
                pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} {{os.getppid()}}")
                time.sleep(1000)
            lab.run(hang, measure=("none",))
            """
        )
    )
    kernel = subprocess.Popen([sys.executable, str(script)])
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        assert kernel.poll() is None
        time.sleep(0.05)
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    for pid in (tmp_path / "pids").read_text().split():
        assert _gone(int(pid))


def test_an_interrupted_experiment_is_kept_and_nothing_of_it_survives(lab, tmp_path, monkeypatch):
    from perf_helpers.lab.forkserver import CleanProcess

    def hang(_):
        import time

        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(1000)

    def interrupted(self, timeout=None):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CleanProcess, "receive", interrupted)
        lab.run(hang, "interrupted", measure=("none",))
    assert (lab["interrupted"].status, lab["interrupted"].message) == ("killed", "interrupted by the user")
    assert _gone(int((tmp_path / "pid").read_text()))


def test_a_killed_server_is_replaced(lab):
    def parent(_):
        import os

        return os.getppid()

    server = lab.run(parent, measure=("none",)).value
    os.kill(server, signal.SIGKILL)
    assert lab.run(parent, measure=("none",)).value != server


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"gradient_acumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"per_device_batch_size": 4}, "per_device_train_batch_size"),
        ({"adafactor": True}, "optim='adafactor'"),
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


def test_a_model_that_cannot_fit_is_refused_with_numbers(lab):
    run = lab.train("too large", task=Task("llama-3-8b", config={"num_hidden_layers": 320}), measure=("memory",))
    assert run.status == "refused" and "GB" in run.message


def test_old_and_new_names_of_an_argument_mean_the_same(lab):
    old = lab.train("old", task=TINY, measure=("memory",), gradient_checkpointing=True)
    new = lab.train("new", task=TINY, measure=("memory",), activation_checkpointing=True)
    assert old.peak_bytes == new.peak_bytes


def test_two_processes_train_together(lab):
    def reduce(task):
        import torch

        torch.distributed.init_process_group("gloo")
        total = torch.tensor([float(torch.distributed.get_rank() + 1)])
        torch.distributed.all_reduce(total)
        return total.item()

    run = lab.run(reduce, processes=2, measure=("none",))
    assert run.ok and [rank["value"] for rank in run.ranks] == [3.0, 3.0]
    trained = lab.train("ddp", task=TINY, processes=2, steps=2, per_device_train_batch_size=2)
    assert trained.ok, trained.message
    assert trained.samples_per_second == pytest.approx(4 / trained.step_seconds)
    low, high = sorted(rank["peak_bytes"] for rank in trained.ranks)
    # Seen once in many runs, on a busy machine: one rank a bucket higher. Presumably a thread of gloo let go of the old
    # bucket only after the new one was made.
    bucket = 4 * trained.memory.parameters
    assert high == pytest.approx(low, rel=0.01) or high - low == pytest.approx(bucket, rel=0.01)


def test_a_rank_that_fails_ends_the_others(lab):
    def fail(task):
        import torch

        torch.distributed.init_process_group("gloo")
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("rank one has had enough")
        torch.distributed.barrier()

    run = lab.run(fail, processes=2, measure=("none",), timeout=60)
    assert run.status == "crashed" and "rank one has had enough" in run.message


def test_a_comparison_takes_turns(lab):
    a = lab.train("a", task=TINY, steps=2, per_device_train_batch_size=2)
    b = lab.train("b", task=TINY, steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    comparison = lab.compare(a, b, turns=3)
    assert comparison.memory_ratio == b.peak_bytes / a.peak_bytes
    assert len(comparison.speed_ratio.pairs) == 3
    assert comparison.speed_ratio.low <= comparison.speed_ratio.value <= comparison.speed_ratio.high
    assert "ratio" in comparison._repr_html_()


def test_a_comparison_with_a_run_that_failed_is_unknown_and_says_why(lab):
    fine = lab.train("fine", task=TINY, measure=("memory",), per_device_train_batch_size=2)
    gone = lab.run(lambda task: 1 / 0, "gone", measure=("memory",))
    comparison = lab.compare(fine, gone)
    assert not comparison.speed_ratio.known and isinstance(comparison.memory_ratio, Unknown)
    assert comparison.speed_ratio.value.why.startswith("speed not measured: gone crashed, ZeroDivisionError")
    assert comparison.memory_ratio.why.startswith("memory not measured: gone crashed")
    assert lab.compare(gone, fine).speed_ratio.value.why == comparison.speed_ratio.value.why


def test_a_comparison_whose_turns_fail_is_unknown_and_says_why(lab, monkeypatch, capsys):
    run = lab.train("alone", task=TINY, measure=("memory",), per_device_train_batch_size=2)
    late = Turns(status="timed out", message="no result within 1 s")
    monkeypatch.setattr("perf_helpers.lab.processes.alternate", lambda *_: late)
    comparison = lab.compare(run, run)
    assert comparison.speed_ratio.value.why == "speed not measured: timed out, no result within 1 s"
    assert comparison.memory_ratio == 1 and "Speed not measured: timed out" in capsys.readouterr().err
    nobody = lab.run(lambda task: 1, "nobody asked", measure=("none",))
    assert lab.compare(nobody, nobody).memory_ratio.why == "memory not measured: nobody asked for it"


@pytest.fixture
def with_gpus(tmp_path):
    """A function: a lab on a machine that says it has GPUs, and what its processes were asked, for none is started."""

    def make(count=1, free_bytes=20e9, reserved_bytes=6e9):
        lab = Lab("cpu", out=tmp_path)
        gpus = tuple(Gpu(n, memory_bytes=80 * 2**30, free_bytes=free_bytes) for n in range(count))
        lab.machine, asked = Machine("rehearsed", "cuda", gpus=gpus), []

        def perform(function, *arguments):
            asked.append((function.__name__, *arguments))
            if function.__name__ == "alternate":
                turns = arguments[2]
                return Turns((1.0,) * turns, (1.0,) * turns)
            memory = Memory(1, "allocated", breakdown={}, phases={}, reserved_bytes=int(reserved_bytes))
            return Outcome(memory=memory if arguments[1] == "memory" else None)

        lab._perform = perform
        return lab, asked

    return make


def turns_taken(lab, asked, *runs):
    """(threads of each, do both live at once?) of the comparison of two runs, and how many memory runs it took."""
    asked.clear()
    lab.compare(*runs, turns=3)
    *sizes, (name, first, second, _, _, _, together, _) = asked
    assert name == "alternate" and {size[0] for size in sizes} <= {"execute"}
    return (first.threads, second.threads), together, len(sizes)


def test_the_noise_floor_and_the_threads_follow_where_a_run_ran_and_not_what_the_machine_has(with_gpus):
    lab, asked = with_gpus(count=2)
    on_gpu, on_cpu = (lab.train(str(cpu), task=TINY, use_cpu=cpu) for cpu in (False, True))
    two, three = (lab.run(lambda task: 1, f"{n} ranks", processes=n) for n in (2, 3))
    assert [lab.noise_floor(run) for run in (on_gpu, two, on_cpu, three)] == [1.02, 1.02, 1.3, 1.3]
    assert lab.noise_floor() == 1.02 and lab.noise_floor(on_gpu, on_cpu) == 1.3
    assert lab.ratio([2.0] * 3, on_cpu).low == 2 / 1.3 and lab.ratio([2.0] * 3).low == 2 / 1.02
    assert lab.compare(on_cpu, on_cpu).speed_ratio.high == 1.3 and lab.compare(on_gpu, on_gpu).speed_ratio.high == 1.02
    assert turns_taken(lab, asked, on_cpu, on_cpu)[0] == (1, 1) == turns_taken(lab, asked, on_gpu, three)[0]
    assert turns_taken(lab, asked, on_gpu, two)[0] == (None, None)


def test_on_a_cpu_every_run_has_the_floor_of_a_cpu(lab):
    assert lab.noise_floor() == 1.3 == lab.noise_floor(lab.run(lambda task: 1, measure=("none",)))


@pytest.mark.parametrize(("free", "together"), [(20e9, True), (15e9, False), (None, False)])
def test_runs_that_were_only_timed_take_turns_at_once_where_both_fit(with_gpus, free, together):
    lab, asked = with_gpus(free_bytes=free)
    four, one = (lab.train(f"{n}", task=TINY, measure=("time",), per_device_train_batch_size=n) for n in (4, 1))
    assert turns_taken(lab, asked, four, one)[1:] == (together, 2), "one memory run of each"
    assert turns_taken(lab, asked, one, four)[1:] == (together, 0), "and no more of them"
    assert lab.runs == [four, one] and not any(run.memory for run in lab.runs)


def test_the_memory_of_an_equal_run_is_taken_rather_than_measured_again(with_gpus):
    lab, asked = with_gpus()
    lab.train("measured", task=TINY, measure=("memory",), steps=9, per_device_train_batch_size=4, max_steps=2)
    equal = lab.train("timed", task=TINY, measure=("time",), per_device_train_batch_size=4)
    others = [
        lab.train("batch", task=TINY, measure=("time",), per_device_train_batch_size=2),
        lab.train("task", task=TINY.replace(seq_len=8), measure=("time",), per_device_train_batch_size=4),
        lab.run(lambda task: 1, "function", task=TINY, measure=("time",)),
    ]
    assert turns_taken(lab, asked, equal, equal)[1:] == (True, 0)
    for other in others:
        assert turns_taken(lab, asked, equal, other)[1:] == (True, 1), other.name


def test_runs_whose_size_cannot_be_had_take_turns_one_at_a_time(with_gpus):
    lab, asked = with_gpus()
    run, perform = lab.train("timed", task=TINY, measure=("time",)), lab._perform

    def fails(function, *arguments):
        outcome = perform(function, *arguments)
        return Outcome("crashed", "x") if function.__name__ == "execute" else outcome

    lab._perform = fails
    assert turns_taken(lab, asked, run, run)[1:] == (False, 1)


def test_a_comparison_of_runs_of_another_lab_is_refused(lab, tmp_path):
    run = Lab("cpu", out=tmp_path).run(lambda task: 1, measure=("none",))
    with pytest.raises(ValueError, match="not run by this lab"):
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


def test_a_sweep_spreads_over_a_cluster(tmp_path):
    distributed = pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        lab = Lab("cpu", out=tmp_path, executor=client.get_executor())
        run = lab.train("afar", task=TINY, measure=("memory",), per_device_train_batch_size=2)
    assert run.ok and run.peak_bytes


def test_a_function_that_cannot_travel_says_what_to_do(lab):
    import threading

    lock = threading.Lock()
    with pytest.raises(ValueError, match="inside it what it needs"):
        lab.run(lambda task: lock.locked(), measure=("none",))


def test_fp16_on_a_cpu_is_said_to_be_ignored(lab):
    with pytest.warns(UserWarning, match="ignores fp16"):
        run = lab.train("fp16", task=TINY, measure=("memory",), fp16=True, use_cpu=True)
    assert run.memory.breakdown["weight_copies"] == 0
