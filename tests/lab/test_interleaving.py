"""Interleaved runs: functions that are timed by simulated clocks; experiments in threads of one process; experiments in
separate processes.
"""

import platform
import tempfile
import time

import pytest
from machines import TINY

from trainmem.core.arguments import Arguments
from trainmem.core.training import Experiment, pickled
from trainmem.measure import interleaving, processes, quiet
from trainmem.records import CPU, WALL, Ratio
from trainmem.unknown import NeedsValues, Unknown

# ---- functions


class Clock:
    """Hold a simulated wall clock and CPU clock, in seconds; only the functions that `work` returns advance them."""

    def __init__(self):
        self.wall = self.cpu = 100.0

    def work(self, wall, cpu=None):
        def run():
            self.wall += wall
            self.cpu += wall if cpu is None else cpu

        return run


@pytest.fixture
def clock(monkeypatch, copied):
    planted = Clock()
    clocks = copied(interleaving.time, perf_counter=lambda: planted.wall, process_time=lambda: planted.cpu)
    monkeypatch.setattr(interleaving, "time", clocks)
    return planted


def test_each_function_has_its_own_seconds_by_both_clocks(clock):
    busy, waiting = clock.work(0.5), clock.work(2.0, cpu=0.25)
    taken = interleaving.in_turns([busy, waiting], turns=3)
    assert taken == [[(0.5, 0.5)] * 3, [(2.0, 0.25)] * 3]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_each_is_called_once_a_turn_and_once_to_warm_up(clock, count):
    called = []
    works = [lambda number=number: called.append(number) for number in range(count)]
    taken = interleaving.in_turns(works, turns=6)
    assert [len(turns) for turns in taken] == [6] * count
    assert called[:count] == [*range(count)], "the turn that warms up"
    turns = [called[at : at + count] for at in range(0, len(called), count)]
    assert len(turns) == 7 and all(sorted(turn) == [*range(count)] for turn in turns)


def test_at_the_smallest_sizes_one_turn_is_enough(clock, monkeypatch):
    monkeypatch.setenv(quiet.UNTIMED, "1")
    called = []
    (taken,) = interleaving.in_turns([lambda: called.append(1)], turns=5)
    assert len(called) == 2 and len(taken) == 5, "one call warms up"


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_nobody_always_follows_the_same_one(clock, count):
    called = []
    interleaving.in_turns([lambda number=number: called.append(number) for number in range(count)], turns=24)
    follows = {number: set() for number in range(count)}
    for before, after in zip(called[count:], called[count + 1 :], strict=False):
        follows[after].add(before)
    assert all(len(others - {number}) >= min(2, count - 1) for number, others in follows.items())


def test_the_first_turn_is_not_reported(clock):
    first = iter([10.0])
    taken = interleaving.in_turns([lambda: clock.work(next(first, 1.0))()], turns=3)
    assert taken == [[(1.0, 1.0)] * 3]


def test_a_first_call_is_timed_without_a_warm_up(clock):
    calls = []

    def compiled():
        calls.append(1)
        clock.work(20.0 if len(calls) == 1 else 1.0)()
        return "loss"

    assert interleaving.first_call(compiled) == ((20.0, 20.0), "loss")
    assert len(calls) == 1


@pytest.mark.parametrize(("works", "turns"), [([], 3), ([int], 0)])
def test_nothing_to_time_is_refused(works, turns):
    with pytest.raises(ValueError, match="at least one of each"):
        interleaving.in_turns(works, turns)


def test_what_goes_wrong_in_a_function_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        interleaving.in_turns([lambda: 1 / 0], turns=2)


def test_several_processes_give_a_ratio_with_its_floor(clock):
    slow, fast, slower = clock.work(3.0), clock.work(1.0), clock.work(3.3)
    taken = [interleaving.in_turns([slow, fast, slower], turns=4) for _ in range(3)]
    for which in (CPU, WALL):
        ratio = Ratio.of_turns(taken, which, 1.05)
        assert ratio.value == pytest.approx(3.15)
        assert ratio.floor == pytest.approx(1.1), "what the first one differs from itself"


def test_a_rehearsal_runs_each_once_and_has_no_time(monkeypatch):
    monkeypatch.setattr(interleaving, "is_rehearsal", lambda: True)
    called = []
    with pytest.raises(NeedsValues, match="rehearsal"):
        interleaving.in_turns([lambda: called.append("a"), lambda: called.append("b")], turns=5)
    assert called == ["a", "b"]


def test_on_a_gpu_events_tell_and_the_device_is_waited_for(monkeypatch):
    import torch

    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("end reached")

        def elapsed_time(self, end):
            log.append("asked")
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("idle"))
    taken = interleaving.in_turns([lambda: log.append("work")], turns=1)
    assert taken == [[(0.25, 0.25)]]
    assert log == ["work", "idle", "record", "work", "record", "end reached", "asked"]


# ---- experiments


def training(name, **arguments):
    return Experiment(name, TINY, Arguments.of(arguments | {"per_device_train_batch_size": 2}), threads=1)


def function(name, work, steps):
    """Return an experiment called `name` with `steps` steps; each calls `work(number of the step)` and an optimizer."""

    def loop(task):
        import torch

        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight])
        for number in range(steps):
            work(number)
            optimizer.step()

    return Experiment(name, TINY, function=pickled(loop), threads=1)


def compute(seconds):
    """Compute until this process has used this many CPU seconds."""
    import time

    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def side_by_side(first, second, turns=3, count=1, **options):
    return processes.side_by_side((first, second, first), turns, processes=count, **options)


@pytest.mark.nightly
def test_three_take_turns_and_each_turn_has_its_seconds():
    outcome = side_by_side(training("a"), training("b", gradient_checkpointing=True), turns=4, count=2)
    assert outcome.ok and len(outcome.value) == 2
    for process in outcome.value:
        assert [len(turns) for turns in process] == [4, 4, 4]
        assert all(0 < cpu < 60 and 0 < wall < 60 for turns in process for wall, cpu in turns)


@pytest.mark.nightly
def test_who_waits_computes_nothing_and_who_sleeps_takes_time():
    busy, asleep = (lambda _: compute(0.3)), (lambda _: time.sleep(0.3))
    outcome = side_by_side(function("busy", busy, 5), function("asleep", asleep, 5))
    (first, second, again) = outcome.value[0]
    for wall, cpu in (*first, *again):
        assert 0.24 < cpu < 0.54 and wall > 0.24, "only its own work"
    for wall, cpu in second:
        assert wall > 0.24 and cpu < 0.12
    assert Ratio.of_turns(outcome.value, CPU, 1.05).value > 2


def test_only_one_runs_at_a_time_and_all_in_one_process(tmp_path):
    log = str(tmp_path / "log")

    def noted(name):
        def work(number):
            import os

            for what in ("begins", "ends"):
                with open(log, "a") as file:
                    print(os.getpid(), name, what, file=file)
                time.sleep(0.01)

        return work

    assert side_by_side(function("a", noted("a"), 4), function("b", noted("b"), 4)).ok
    with open(log) as file:
        lines = [line.split() for line in file]
    assert len({pid for pid, *_ in lines}) == 1
    reported = [line[1:] for line in lines]
    assert all(
        [begin, end] == [[begin[0], "begins"], [begin[0], "ends"]]
        for begin, end in zip(reported[::2], reported[1::2], strict=True)
    )


def test_as_many_processes_as_requested_are_there_at_once(tmp_path):
    folder = str(tmp_path)

    def meet(number):
        """Wait until two processes are in this step. If they ran one after the other, the first would wait forever."""
        import os
        import pathlib

        pathlib.Path(folder, f"{number}-{os.getpid()}").touch()
        while len(list(pathlib.Path(folder).glob(f"{number}-*"))) < 2:
            time.sleep(0.01)

    pair = function("a", meet, 5), function("b", lambda _: None, 5)
    outcome = side_by_side(*pair, count=2, at_once=2, timeout=60)
    assert outcome.ok and len(outcome.value) == 2, outcome.message
    assert side_by_side(*pair, count=3, at_once=2, timeout=60).ok, "the third is alone and finds the traces of two"


def test_what_accelerate_keeps_for_a_process_is_each_trainings_own():
    def precision(wanted, steps=4):
        def loop(task):
            import torch
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState

            accelerator = Accelerator(mixed_precision=wanted, cpu=True, gradient_accumulation_steps=steps)
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(steps):
                assert AcceleratorState().mixed_precision == wanted
                assert accelerator.gradient_state.num_steps == steps
                optimizer.step()

        return Experiment(wanted, TINY, function=pickled(loop), threads=1)

    outcome = side_by_side(precision("bf16", 4), precision("no", 5))
    assert outcome.ok, outcome.message


@pytest.mark.parametrize(
    ("second", "status", "message"),
    [
        (function("short", lambda _: None, 2), "crashed", "short: "),
        (function("broken", lambda number: 1 // (2 - number), 5), "crashed", "broken: ZeroDivisionError"),
    ],
)
def test_what_ends_too_early_is_named(second, status, message):
    outcome = side_by_side(training("a"), second)
    assert outcome.status == status and message in outcome.message


@pytest.mark.nightly
def test_turns_that_take_too_long_are_given_up():
    outcome = side_by_side(training("a"), function("slow", lambda _: time.sleep(30), 5), timeout=5)
    assert (outcome.status, outcome.message) == ("timed out", "no result within 5 s")


def test_experiments_in_processes_of_their_own_take_turns_too():
    outcome = processes.alternate((training("a"), function("b", lambda _: time.sleep(0.05), 9)), turns=3)
    ((first, second),) = outcome.value
    assert len(first) == len(second) == 3 and all(wall > 0.04 for wall, _ in second)


@pytest.mark.parametrize("together", [True, False])
def test_what_does_not_fit_beside_the_other_has_a_process_for_each_turn(tmp_path, together):
    """Two experiments take turns. If they do not fit on the device together, every turn must run in a new process.

    `together`: whether they fit. If not, a step of one fails while the other's process exists, even a sleeping one.
    """

    def work(name):
        def step(_):
            import os
            import pathlib

            (own := pathlib.Path(tmp_path, f"{name}-{os.getpid()}")).touch()
            others = {int(path.name.split("-")[1]) for path in pathlib.Path(tmp_path).iterdir()} - {os.getpid()}
            if not together and any(pathlib.Path(f"/proc/{other}").exists() for other in others):
                own.unlink()
                raise MemoryError("two are too many")

        return step

    outcome = processes.alternate([function(name, work(name), 4) for name in "ab"], turns=3)
    assert outcome.ok and [len(turns) for turns in outcome.value[0]] == [3, 3], outcome.message
    assert len({*tmp_path.iterdir()}) == (2 if together else 1 + 6)


def test_turns_of_several_steps_count_the_fastest():
    outcome = side_by_side(function("a", lambda n: compute(0.4 if n % 2 else 0.01), 7), training("b"), steps_per_turn=2)
    assert all(cpu < 0.15 for _, cpu in outcome.value[0][0])


def test_the_floor_is_what_the_first_one_differs_from_itself():
    taken = [[[(1, 1.0)] * 3, [(1, 0.5)] * 3, [(1, 1.2)] * 3]] * 2
    ratio = Ratio.of_turns(taken, CPU, 1.05)
    assert ratio.floor == pytest.approx(1.2) and ratio.value == pytest.approx(2.2)
    assert (ratio.low, ratio.high) == (pytest.approx(2.2 / 1.2), pytest.approx(2.2 * 1.2))
    assert Ratio.of_turns(taken, WALL, 1.05).floor == 1.05
    assert Ratio.of_turns(taken, CPU, 1.05, per_sample=0.5).value == pytest.approx(1.1)


def test_the_interval_is_as_wide_as_processes_differ():
    def process(speed):
        return [[(1, 1.0)] * 4, [(1, 1 / speed)] * 4, [(1, 1.0)] * 4]

    ratio = Ratio.of_turns([process(speed) for speed in (1.0, 1.3, 1.4, 1.7)], CPU, 1.05)
    assert ratio.low < 1.2 and ratio.high > 1.5, "16 pairs, but four processes"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
def test_threads_of_a_fresh_process_have_their_memory_from_one_arena(lab):
    def arenas(task):
        import ctypes
        import threading

        libc = ctypes.CDLL(None)
        libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
        for _ in range(3):
            thread = threading.Thread(target=lambda: [libc.malloc(1000) for _ in range(1000)])
            thread.start(), thread.join()
        with tempfile.NamedTemporaryFile("r") as file:
            stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
            libc.malloc_info(0, stream)
            libc.fclose(stream)
            return file.read().count("<heap nr=")

    assert lab.run(arenas, measure=("none",)).value == 1


def test_turns_that_are_not_known_give_a_ratio_that_is_not():
    taken = [[(1.0, 1.0)] * 5, Unknown("a rehearsal"), [(1.0, 1.0)] * 5]
    ratio = Ratio.of_turns([taken], CPU, 1.05)
    assert not ratio.known and ratio.value.why == "a rehearsal"
