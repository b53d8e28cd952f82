"""While a course runs several lessons at once, code that measures time waits until no other lesson uses the part of the
machine that this code needs.
"""

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest
from machines import TINY

from trainmem.measure import quiet
from trainmem.measure.interleaving import in_turns
from trainmem.measure.quiet import Need

SHARE, CORE, MACHINE = Need


def waiting(lock, *request):
    """Start a thread that takes a lock; return the thread as soon as it waits for the lock or has ended.

    `lock`: the `QuietLock`; `request`: the arguments of `QuietLock.take`.
    """
    thread = threading.Thread(target=lock.take, args=request, daemon=True)
    thread.start()
    until(lambda: not thread.is_alive() or request[0] in [entry[0] for entry in lock._queue.values()])
    return thread


def until(condition):
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def lock(monkeypatch):
    """Return a `QuietLock` in which no lesson may overtake one that waits for a quiet machine."""
    monkeypatch.setattr(quiet, "PASSED_SECONDS", 0)
    return quiet.QuietLock()


def test_lessons_share_the_machine_and_one_that_waits_to_be_alone_goes_before_later_ones(lock):
    lock.take("a", SHARE)
    lock.take("b", SHARE)  # both at once
    timed, later = waiting(lock, "b", MACHINE), waiting(lock, "c", SHARE)
    assert timed.is_alive() and later.is_alive(), "a still shares, and c came after b"
    again = waiting(lock, "a", SHARE)  # between two experiments
    timed.join()
    assert lock._held == {"b": (MACHINE, 1)} and later.is_alive() and again.is_alive()
    lock.take("b", SHARE)
    later.join()
    again.join()
    assert {*lock._held} == {"a", "b", "c"}


def test_whoever_is_alone_is_so_until_it_ends(lock):
    lock.take("a", MACHINE)
    others = [waiting(lock, "b", SHARE), waiting(lock, "c", MACHINE), waiting(lock, "d", CORE)]
    assert all(other.is_alive() for other in others) and {*lock._held} == {"a"}
    lock.leave("c")  # its lesson was killed while it waited
    others[1].join()
    lock.leave("a")
    others[0].join()
    others[2].join()
    assert {*lock._held} == {"b", "d"}


def test_a_thread_that_is_timed_has_a_core_for_itself(lock):
    lock.take("a", SHARE)
    lock.take("b", SHARE)
    timed = waiting(lock, "c", CORE)
    assert timed.is_alive(), "two lessons share two cores"
    lock.leave("b")
    timed.join()
    more = [waiting(lock, "d", SHARE), waiting(lock, "e", CORE)]
    assert all(each.is_alive() for each in more), "a has the other core"
    lock.leave("a")
    more[0].join()
    assert more[1].is_alive()
    lock.leave("d")
    more[1].join()
    assert lock._held == {"c": (CORE, 1), "e": (CORE, 1)}, "two may be timed on a core each"


def test_ranks_that_share_the_machine_count_by_their_cores(lock):
    lock.take("a", SHARE, 2)
    timed = waiting(lock, "b", CORE)
    assert timed.is_alive()
    lock.leave("a")
    timed.join()
    assert waiting(lock, "a", SHARE, 2).is_alive()


@pytest.mark.parametrize("seconds", [60, 0])
def test_who_waits_for_the_machine_is_passed_for_a_while_by_those_that_keep_the_cores_busy(monkeypatch, seconds):
    monkeypatch.setattr(quiet, "PASSED_SECONDS", seconds)
    lock = quiet.QuietLock()
    lock.take("a", SHARE)
    machine = waiting(lock, "b", MACHINE)
    passing = waiting(lock, "c", CORE)
    if seconds:
        passing.join()
        assert {*lock._held} == {"a", "c"}
        lock.leave("c")
    lock.leave("a")
    machine.join()
    assert {*lock._held} == {"b"}, "one lesson alone leaves a core idle, so it passes nobody"


ROLE = """
import sys, time
from trainmem.measure import quiet
for need in map(quiet.Need, (0, 2, 0, 2, 1)):
    with quiet.experiment(need):
        start = time.monotonic()
        time.sleep(0.2)
        print(int(need), start, time.monotonic(), flush=True)
"""


@pytest.mark.nightly
def test_between_processes_nothing_runs_beside_what_is_timed():
    lock = quiet.QuietLock()
    with quiet.served(lock) as address:
        names = ["a", "b", "c"]
        for name in names:
            lock.take(name, SHARE)
        lessons = [
            subprocess.Popen(
                [sys.executable, "-c", ROLE], env=os.environ | quiet.entry(name, 1, address), stdout=subprocess.PIPE
            )
            for name in names
        ]

        def ended(name, lesson):
            lines = lesson.communicate()[0].decode().split("\n")[:-1]
            lock.leave(name)
            return [(name, int(need), float(start), float(end)) for need, start, end in map(str.split, lines)]

        answers = {}
        threads = [
            threading.Thread(target=lambda pair=pair: answers.update({pair[0]: ended(*pair)}))
            for pair in zip(names, lessons, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = [row for each in answers.values() for row in each]
    assert len(rows) == 15
    for name, need, start, end in rows:
        beside = [row for row in rows if row[0] != name and row[2] < end and row[3] > start]
        assert not (need == MACHINE and beside), f"{name} was alone, beside {beside}"


@pytest.mark.nightly
def test_an_experiment_that_shares_the_machine_shares_its_cores():
    code = """
import torch
from perf_helpers import Lab
lab = Lab("tiny")
count = lambda task: torch.get_num_threads()
print(*[lab.run(count, measure=meter).value for meter in ("value", "none", "memory")], torch.get_num_threads())
"""
    lock = quiet.QuietLock()
    lock.take("a", SHARE)
    with quiet.served(lock) as address:
        environment = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"} | quiet.entry("a", 1, address)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout.split() == ["1", "2", "1", "2"]


@pytest.mark.parametrize(
    "clock", ["time.perf_counter()", "time.process_time_ns()", "in_turns([lambda: 1], 1); time.perf_counter()"]
)
@pytest.mark.nightly
def test_a_function_that_reads_a_clock_is_refused_where_others_may_run_beside_it(lab, clock):
    code = f"import time; from trainmem.measure.interleaving import in_turns; {clock}"
    function = eval(f"lambda task: exec({code!r}, {{'__name__': '__main__'}})")
    with pytest.raises(ValueError, match="measure='none'"):
        lab.run(function, "reads", task=TINY, measure="value")
    assert lab.run(function, "reads", task=TINY, measure="none").ok


def test_what_takes_turns_has_a_quiet_machine_and_may_read_clocks(lab):
    def steps(task):
        return len(in_turns([int], 3)[0])

    assert lab.run(steps, "in turns", task=TINY, measure="value").value == 3
    with pytest.raises(ValueError, match="measure='none'"):
        lab.run(steps, "ranks", task=TINY, measure="value", processes=2)


ON_TWO = "(__import__('torch').set_num_threads(2), in_turns([int], 2))"
LOCK_CALLS = {  # what a lesson asks of the lock, in order
    "lab.run(lambda task: 1, measure='value')": [SHARE],
    "lab.run(lambda task: 1, measure='none')": [SHARE],
    "lab.run(lambda task: [time.perf_counter() for _ in 'ab'], measure='none')": [SHARE, MACHINE, SHARE],
    f"lab.run(lambda task: len({ON_TWO.replace('2', '1')}), measure='none')": [SHARE, CORE, SHARE],
    "lab.run(lambda task: 1, measure='none', processes=2)": [MACHINE, SHARE],
    "lab.run(lambda task: len(in_turns([int], 2)), measure='value')": [SHARE, CORE, SHARE],
    f"lab.run(lambda task: len({ON_TWO}), measure='value')": [SHARE, MACHINE, SHARE],
    "lab.run(lambda task: len(in_turns([lambda: __import__('os').system('true')], 2)), measure='value')": [
        *[SHARE, MACHINE, SHARE],  # processes of its own
    ],
    "lab.run(lambda task: first_call(lambda: 1)[1], measure='value')": [SHARE, CORE, SHARE],
    "lab.run(lambda task: [*tqdm([])] + [len(in_turns([int], 2))], measure='value')": [SHARE, CORE, SHARE],
    "lab.train('a', measure='time', steps=2, per_device_train_batch_size=1)": [SHARE, MACHINE, SHARE],
    "lab.compare(*[lab.train(n, measure='value', per_device_train_batch_size=1) for n in 'ab'], turns=4)": [
        *[SHARE, SHARE, SHARE],
        *[MACHINE, SHARE, MACHINE, SHARE],  # four processes, two at once
    ],
}


@pytest.mark.daily(1)
@pytest.mark.parametrize("variables", [{}, {quiet.UNTIMED: "1"}], ids=["timed", "smallest sizes"])
def test_only_what_is_timed_has_the_machine_for_itself(variables):
    code = "import time; from tqdm import tqdm; from perf_helpers import Lab\n"
    code += "from trainmem.measure.interleaving import first_call, in_turns; lab = Lab('tiny')\n"
    code += "\n".join(f"{line}; print('next', flush=True); input()" for line in LOCK_CALLS)
    requested = []

    class Lock(quiet.QuietLock):
        def take(self, lesson, need, cores=1):
            requested.append(need)
            super().take(lesson, need, cores)

    lock, found = Lock(), []
    with quiet.served(lock) as address:
        environment = os.environ | quiet.entry("a", 1, address) | variables
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as lesson:
            for _ in LOCK_CALLS:
                assert lesson.stdout.readline() == "next\n"
                found.append([*requested])
                requested.clear()
                print(file=lesson.stdin, flush=True)
    if variables:
        assert found and {*itertools.chain(*found)} == {SHARE}, "no time means anything, so nobody waits"
    else:
        assert dict(zip(LOCK_CALLS, found, strict=True)) == LOCK_CALLS


def test_libraries_may_read_clocks(lab):
    run = lab.train("trained", task=TINY, measure=("value",), per_device_train_batch_size=1, max_steps=1)
    assert run.ok and run.losses
