"""Executors: a run names the machine on which it ran, and reports if that machine's process ended."""

from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor

import pytest
from machines import TINY

from trainmem.core import hardware
from trainmem.core.outcomes import Outcome
from trainmem.core.training import Experiment
from trainmem.measure import executors, processes
from trainmem.records import Memory


def ended(error):
    future = Future()
    future.set_exception(error)
    return future


def test_an_executor_is_queried_what_experiments_see_there(monkeypatch):
    with ThreadPoolExecutor(1) as executor:
        monkeypatch.setattr(hardware, "versions", lambda: {"torch": "there"})
        machine, versions = executors.seen_by(executor)
    assert machine.cpu_cores and versions == {"torch": "there"}


def test_an_outcome_has_the_machine_and_the_versions_of_where_it_was_made():
    with ThreadPoolExecutor(1) as executor:
        outcome = executors.outcome_of(executors.submit(executor, lambda: Outcome(value=5)))
    assert outcome.value == 5 and outcome.machine["cpu_cores"] and outcome.versions["torch"]
    assert outcome.attempts == (), "no worker of a cluster was here"


class KilledWorker(Exception):
    """An exception with the name of Dask's exception of a killed worker."""


@pytest.mark.parametrize("error", [KilledWorker("gone. Look there"), BrokenExecutor("gone")])
def test_the_end_of_whoever_performed_it_is_the_outcome(error):
    outcome = executors.outcome_of(ended(error))
    assert (outcome.status, outcome.message) == ("killed", "gone")


def test_any_other_exception_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        executors.outcome_of(ended(ZeroDivisionError()))


def test_an_interrupted_wait_cancels_what_was_waited_for():
    class Waited(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    future = Waited()
    with pytest.raises(KeyboardInterrupt):
        executors.outcome_of(future)
    assert future.cancelled()


def test_after_a_meter_that_failed_no_other_is_tried(monkeypatch):
    requested, memory = [], Memory(1, "counted")
    monkeypatch.setattr(processes, "account", lambda *_: requested.append("memory") or Outcome(memory=memory))
    monkeypatch.setattr(
        processes, "execute", lambda _, meter, *__: requested.append(meter) or Outcome("crashed", "why")
    )
    outcome = executors.measure(Experiment("any", TINY), ("memory", "time", "none"), 9)
    assert requested == ["memory", "time"] and (outcome.status, outcome.memory) == ("crashed", memory)
