"""Fresh subprocesses: each experiment has its own, and nothing of it is left afterwards."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import cloudpickle
import psutil
import pytest
from machines import TINY

from trainmem.core import optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.training import Experiment
from trainmem.measure import forked, forkserver
from trainmem.unknown import is_measured


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


@pytest.mark.nightly
def test_the_server_imports_only_what_a_job_names():
    """bitsandbytes takes a quarter of the import time, and most jobs do not need it."""
    code = textwrap.dedent(
        """
        from trainmem.measure import processes
        def has(names, optimizer, tell):
            import sys
            return ["".join(names) in sys.modules, "datasets" in sys.modules]
        for optimizer in ("adamw_torch", "adamw_8bit"):
            print(processes.call(has, ["bitsand", "bytes"], optimizer, timeout=300))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[False, True]", "[True, True]"]


@pytest.mark.nightly
@pytest.mark.parametrize("wanted", [False, True])
def test_bitsandbytes_is_imported_beside_the_first_job_where_the_second_will_need_it(lab, wanted):
    if lab.machine.gpus:
        pytest.skip("bitsandbytes asks for GPUs when it is imported: no server does")
    code = textwrap.dedent(
        f"""
        from trainmem.measure import processes
        from trainmem.measure.forkserver import SERVER
        def look(names, tell):
            import gc, sys
            return ["".join(names) in sys.modules, gc.isenabled()]
        SERVER.start(with_bitsandbytes={wanted})
        for _ in range(2):
            print(processes.call(look, ["bitsand", "bytes"], timeout=300))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[False, True]", f"[{wanted}, True]"]


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({}, False),
        ({"optim": "adafactor", "gradient_checkpointing": True}, False),
        ({"optim": "adamw_bnb_8bit"}, True),
        ({"optim": "paged_lion_32bit"}, True),
        ({"load_in_8bit": True, "peft": {"r": 8}}, True),
        ({"quantization_config": {"load_in_4bit": True}, "peft": {"r": 8}}, True),
    ],
)
def test_only_a_job_that_needs_bitsandbytes_waits_for_its_import(given, needs):
    training = Experiment("one", TINY, Arguments(given))
    assert bool(forkserver._BITSANDBYTES.search(cloudpickle.dumps(training))) == needs


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


def test_a_function_that_fails_says_why_also_to_who_reads_its_value_alone(lab, capfd):
    assert not lab.run(lambda task: {}["width"], "grown", measure=("none",)).value
    out, errors = capfd.readouterr()
    assert not out and errors.startswith("grown: KeyError: 'width' (line ")
    lab.run(lambda task: __import__("time").sleep(60), "slow", measure=("none",), timeout=1)
    assert capfd.readouterr().err == "slow: no result within 1 s\n"


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
    assert not is_measured(run.peak_bytes) and not is_measured(run.samples_per_second)
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
    """Wait until a process has ended, or is a zombie that no parent collects; return True.

    The test's time limit ends the wait. `pid`: id of the process.
    """
    while psutil.pid_exists(pid):
        with_status = psutil.Process(pid)
        if with_status.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return True


@pytest.mark.nightly
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
    from trainmem.measure.forkserver import CleanProcess

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


@pytest.mark.nightly
def test_a_killed_server_is_replaced(lab):
    def parent(_):
        import os

        return os.getppid()

    server = lab.run(parent, measure=("none",)).value
    os.kill(server, signal.SIGKILL)
    assert lab.run(parent, measure=("none",)).value != server


def test_a_fresh_process_has_a_folder_that_ends_with_it_and_no_other_process_has_one(lab):
    def look(_):
        from trainmem.measure import forked

        return [forked.own_folder(), os.path.isdir(forked.own_folder())]

    folder, existed = lab.run(look, measure=("none",)).value
    assert existed and not os.path.exists(folder) and forked.own_folder() is None


def test_a_process_of_a_replaced_server_goes_on_and_its_end_is_known(lab, monkeypatch):
    from trainmem.measure.forkserver import SERVER, CleanProcess

    def wait(on_step):
        on_step(1)
        time.sleep(600)

    with CleanProcess(wait) as process:
        assert process.receive(300) == ("step", 1)
        before = SERVER.running
        monkeypatch.setattr(sys, "path", [*sys.path, str(optional_packages.FOLDER / "some_extra")])
        SERVER.start()
        assert SERVER.running is not before and psutil.Process(process.pid).is_running()
        os.kill(process.pid, signal.SIGKILL)
        _, outcome = process.receive(300)
    assert outcome.status == "killed" and "SIGKILL" in outcome.message


def test_a_command_that_is_interrupted_while_the_server_imports_leaves_nothing(tmp_path):
    code = "from trainmem.measure.forkserver import SERVER; from perf_helpers import cli; SERVER.start(); "
    code += "print(SERVER.running.process.pid, flush=True); cli.main()"
    words = [sys.executable, "-c", code, "estimate", "--model", "bert-tiny"]
    command = subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    server = int(command.stdout.readline())
    while not [*tmp_path.glob("perf_helpers-*")]:  # it asks for a fork
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    command.communicate()
    assert command.returncode == 130
    assert _gone(server) and not [*tmp_path.glob("perf_helpers-*")]


@pytest.mark.nightly
def test_a_server_imports_an_offered_deepspeed_once_for_all_its_forks(lab):
    if lab.machine.gpus:
        pytest.skip("DeepSpeed looks for GPUs when it is imported: no server does")
    code = textwrap.dedent(
        """
        from trainmem.core import optional_packages
        from trainmem.measure import processes
        def look(names, tell):
            import sys
            return ["".join(name) in sys.modules for name in names]
        print(optional_packages.offer("deepspeed") is None)
        names = [["deep", "speed"], ["deep", "speed.runtime.zero.muon.muon_optimizer"]]
        print(processes.call(look, names, timeout=300))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.startswith("False"):
        pytest.skip("needs deepspeed")
    assert done.stdout.split("\n")[1] == "[True, True]"
