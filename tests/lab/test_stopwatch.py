"""Seconds of functions in turns. The clocks are planted: no test reads a real one."""

import pytest

from perf_helpers.lab import stopwatch
from perf_helpers.records import CPU, WALL, Ratio
from perf_helpers.unknown import NeedsValues


class Clock:
    """A clock by the wall and one of what was computed; works move them."""

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
    clocks = copied(stopwatch.time, perf_counter=lambda: planted.wall, process_time=lambda: planted.cpu)
    monkeypatch.setattr(stopwatch, "time", clocks)
    return planted


def test_each_function_has_its_own_seconds_by_both_clocks(clock):
    busy, waiting = clock.work(0.5), clock.work(2.0, cpu=0.25)
    taken = stopwatch.in_turns([busy, waiting], turns=3)
    assert taken == [[(0.5, 0.5)] * 3, [(2.0, 0.25)] * 3]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_each_is_called_once_a_turn_and_once_to_warm_up(clock, count):
    called = []
    works = [lambda number=number: called.append(number) for number in range(count)]
    taken = stopwatch.in_turns(works, turns=6)
    assert [len(turns) for turns in taken] == [6] * count
    assert called[:count] == [*range(count)], "the turn that warms up"
    turns = [called[at : at + count] for at in range(0, len(called), count)]
    assert len(turns) == 7 and all(sorted(turn) == [*range(count)] for turn in turns)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_nobody_always_follows_the_same_one(clock, count):
    called = []
    stopwatch.in_turns([lambda number=number: called.append(number) for number in range(count)], turns=24)
    follows = {number: set() for number in range(count)}
    for before, after in zip(called[count:], called[count + 1 :], strict=False):
        follows[after].add(before)
    assert all(len(others - {number}) >= min(2, count - 1) for number, others in follows.items())


def test_the_first_turn_is_not_told(clock):
    first = iter([10.0])
    taken = stopwatch.in_turns([lambda: clock.work(next(first, 1.0))()], turns=3)
    assert taken == [[(1.0, 1.0)] * 3]


@pytest.mark.parametrize(("works", "turns"), [([], 3), ([int], 0)])
def test_nothing_to_time_is_refused(works, turns):
    with pytest.raises(ValueError, match="at least one of each"):
        stopwatch.in_turns(works, turns)


def test_what_goes_wrong_in_a_function_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        stopwatch.in_turns([lambda: 1 / 0], turns=2)


def test_several_processes_give_a_ratio_with_its_floor(clock):
    slow, fast, slower = clock.work(3.0), clock.work(1.0), clock.work(3.3)
    taken = [stopwatch.in_turns([slow, fast, slower], turns=4) for _ in range(3)]
    for which in (CPU, WALL):
        ratio = Ratio.of_turns(taken, which, 1.05)
        assert ratio.value == pytest.approx(3.15)
        assert ratio.floor == pytest.approx(1.1), "what the first one differs from itself"


def test_a_rehearsal_runs_each_once_and_has_no_time(monkeypatch):
    monkeypatch.setattr(stopwatch, "is_rehearsal", lambda: True)
    called = []
    with pytest.raises(NeedsValues, match="no time"):
        stopwatch.in_turns([lambda: called.append("a"), lambda: called.append("b")], turns=5)
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
    taken = stopwatch.in_turns([lambda: log.append("work")], turns=1)
    assert taken == [[(0.25, 0.25)]]
    assert log == ["work", "idle", "record", "work", "record", "end reached", "asked"]
