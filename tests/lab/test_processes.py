"""Work in fresh subprocesses, and its time limits."""

import os
import time

import pytest
from machines import TINY

from trainmem.core.outcomes import Invalid, Outcome
from trainmem.core.training import Experiment
from trainmem.measure import processes
from trainmem.records import CATEGORIES, Memory


@pytest.mark.nightly
def test_experiments_and_comparisons_end_with_the_time_that_they_are_given_together(lab):
    from trainmem.measure import processes

    def endless(_):
        import time

        time.sleep(600)

    with processes.within(1):
        run = lab.run(endless, task=TINY, measure=("none",))
        after = lab.run(lambda _: 1, task=TINY, measure=("none",))
    assert (run.status, run.message) == ("timed out", "no result within 1 s")
    assert after.status == "timed out"


def test_a_function_is_called_in_a_fresh_process_with_what_it_may_tell():
    def tell_and_add(one, other, tell):
        tell(50)
        return {one + other: os.getpid()}

    reported = []
    (added,) = processes.call(tell_and_add, 1, 2, timeout=60, on_percent=reported.append).items()
    assert added[0] == 3 and added[1] != os.getpid() and reported == [50]


def _refuse(tell):
    raise Invalid("there is no such thing")


def _hang(tell):
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_refuse, Invalid, "no such thing"),
        (_hang, processes.Failed, "no result within 1 s"),
        (lambda tell: 1 / 0, processes.Failed, "ZeroDivisionError"),
        (lambda tell: os._exit(3), processes.Failed, "exit code 3"),
    ],
)
def test_a_function_without_an_answer_says_why(function, error, message):
    with pytest.raises(error, match=message):
        processes.call(function, timeout=1 if function is _hang else 60)


def test_who_fits_beside_others_only_by_giving_back_is_out_of_memory(monkeypatch):
    import torch

    stats, reported = {"num_alloc_retries": 0}, []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(processes.worker, "perform", lambda experiment, measure, on_step: on_step(1) or Outcome())
    assert processes._in_what_is_left(None, reported.append).ok and reported == [1]
    stats["num_alloc_retries"] = 1
    with pytest.raises(MemoryError):
        processes._in_what_is_left(None, reported.append)


def test_each_rank_has_the_breakdown_of_the_second_pass(monkeypatch):
    """Measurements on GPUs need two passes: one counts the total, a second tracks the tensors. Each rank's memory must
    combine its own total with the second pass' bytes by category.
    """

    def outcome(breakdown):
        memories = [
            Memory(size, "allocated", {"forward": size}, breakdown=breakdown, phase_breakdowns={}) for size in (50, 70)
        ]
        ranks = tuple(Outcome(memory=memory) for memory in memories)
        return ranks[0].replace(ranks=ranks)

    passes = {"memory": outcome(None), "categories": outcome(dict.fromkeys(CATEGORIES, 0) | {"weights": 40})}
    monkeypatch.setattr(processes, "execute", lambda experiment, meter, *_: passes[meter])
    found = processes.account(Experiment("two", TINY, function=b"", processes=2))
    assert [rank.memory.breakdown["weights"] for rank in (found, *found.ranks)] == [40, 40, 40]
    assert [sum(rank.memory.breakdown.values()) for rank in found.ranks] == [50, 70]
