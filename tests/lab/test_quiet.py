"""What reads a clock has the machine alone while a course runs several lessons at once."""

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest
from machines import TINY

from perf_helpers.lab import quiet
from perf_helpers.lab.interleaving import in_turns


def waiting(lock, *request):
    """A thread that waits for the lock, once it does."""
    thread = threading.Thread(target=lock.take, args=request, daemon=True)
    thread.start()
    until(lambda: not thread.is_alive() or request[0] in lock._queue.values())
    return thread


def until(condition):
    while not condition():
        time.sleep(0.01)


def test_lessons_share_the_machine_and_one_that_waits_to_be_alone_goes_before_later_ones():
    lock = quiet.QuietLock()
    lock.take("a", alone=False)
    lock.take("b", alone=False)  # both at once
    timed, later = waiting(lock, "b", True), waiting(lock, "c", False)
    assert timed.is_alive() and later.is_alive(), "a still shares, and c came after b"
    again = waiting(lock, "a", False)  # between two experiments
    timed.join()
    assert lock._alone == "b" and later.is_alive() and again.is_alive()
    lock.take("b", alone=False)
    later.join()
    again.join()
    assert lock._sharing == {"a", "b", "c"}


def test_whoever_is_alone_is_so_until_it_ends():
    lock = quiet.QuietLock()
    lock.take("a", alone=True)
    others = [waiting(lock, "b", False), waiting(lock, "c", True)]
    assert all(other.is_alive() for other in others) and lock._alone == "a"
    lock.leave("c")  # its lesson was killed while it waited
    others[1].join()
    lock.leave("a")
    others[0].join()
    assert lock._sharing == {"b"} and lock._alone is None


ROLE = """
import sys, time
from perf_helpers.lab import quiet
for alone in (False, True, False, True):
    with quiet.experiment(alone):
        began = time.monotonic()
        time.sleep(0.2)
        print(alone, began, time.monotonic(), flush=True)
"""


def test_between_processes_nothing_runs_beside_what_is_timed():
    lock = quiet.QuietLock()
    with quiet.served(lock) as address:
        names = ["a", "b", "c"]
        for name in names:
            lock.take(name, alone=False)
        lessons = [
            subprocess.Popen(
                [sys.executable, "-c", ROLE], env=os.environ | quiet.entry(name, 1, address), stdout=subprocess.PIPE
            )
            for name in names
        ]

        def ended(name, lesson):
            lines = lesson.communicate()[0].decode().split("\n")[:-1]
            lock.leave(name)
            return [(name, alone == "True", float(began), float(end)) for alone, began, end in map(str.split, lines)]

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
    assert len(rows) == 12
    for name, alone, began, end in rows:
        beside = [row for row in rows if row[0] != name and row[2] < end and row[3] > began]
        assert not (alone and beside), f"{name} was alone, beside {beside}"


def test_an_experiment_that_shares_the_machine_shares_its_cores():
    code = """
import torch
from perf_helpers import Lab
lab = Lab("tiny")
count = lambda task: torch.get_num_threads()
print(*[lab.run(count, measure=meter).value for meter in ("value", "none", "memory")], torch.get_num_threads())
"""
    lock = quiet.QuietLock()
    lock.take("a", alone=False)
    with quiet.served(lock) as address:
        environment = os.environ | {"OMP_NUM_THREADS": "2"} | quiet.entry("a", 1, address)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout.split() == ["1", "2", "1", "2"]


@pytest.mark.parametrize(
    "clock", ["time.perf_counter()", "time.process_time_ns()", "in_turns([lambda: 1], 1); time.perf_counter()"]
)
def test_a_function_that_reads_a_clock_is_refused_where_others_may_run_beside_it(lab, clock):
    code = f"import time; from perf_helpers.lab.interleaving import in_turns; {clock}"
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


ASKED = {  # what a lesson asks of the lock: to share (False) or to be alone (True), in order
    "lab.run(lambda task: 1, measure='value')": [False],
    "lab.run(lambda task: 1, measure='none')": [True, False],
    "lab.run(lambda task: len(in_turns([int], 2)), measure='value')": [False, True, False],
    "lab.train('a', measure='time', steps=2, per_device_train_batch_size=1)": [False, True, False],
    "lab.compare(*[lab.train(n, measure='value', per_device_train_batch_size=1) for n in 'ab'], turns=4)": [
        *[False, False, False],
        *[True, False, True, False],  # four processes, two at once
    ],
}


@pytest.mark.parametrize("variables", [{}, {quiet.UNTIMED: "1"}], ids=["timed", "smallest sizes"])
def test_only_what_is_timed_has_the_machine_for_itself(variables):
    code = "from perf_helpers import Lab; from perf_helpers.lab.interleaving import in_turns; lab = Lab('tiny')\n"
    code += "\n".join(f"{line}; print('next', flush=True); input()" for line in ASKED)
    asked = []

    class Lock(quiet.QuietLock):
        def take(self, lesson, alone):
            asked.append(alone)
            super().take(lesson, alone)

    lock, found = Lock(), []
    with quiet.served(lock) as address:
        environment = os.environ | quiet.entry("a", 1, address) | variables
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as lesson:
            for _ in ASKED:
                assert lesson.stdout.readline() == "next\n"
                found.append([*asked])
                asked.clear()
                print(file=lesson.stdin, flush=True)
    if variables:
        assert found and True not in itertools.chain(*found), "no time means anything, so nobody waits"
    else:
        assert dict(zip(ASKED, found, strict=True)) == ASKED


def test_libraries_may_read_clocks(lab):
    run = lab.train("trained", task=TINY, measure=("value",), per_device_train_batch_size=1, max_steps=1)
    assert run.ok and run.losses
