"""What clean processes learn is given to the next ones, within bounds; their failures are told in words."""

from types import SimpleNamespace

import pytest

from perf_helpers.estimate.knowledge import Knowledge
from perf_helpers.lab import processes
from perf_helpers.lab.outcomes import Invalid, Outcome


@pytest.fixture
def calls(monkeypatch):
    """What each clean process was given as learnt; it learns what it is asked."""
    given = []

    def call(function, question, learned, timeout, on_percent):
        given.append(learned)
        if isinstance(question, Exception):
            raise question
        return SimpleNamespace(learned=question)

    monkeypatch.setattr(processes, "call", call)
    return given


def test_a_clean_process_begins_with_what_earlier_ones_learnt(calls):
    knowledge = Knowledge()
    for question in (b"one", b"", b"two", b""):
        knowledge.ask(None, question, model="m", timeout=1)
    assert calls == [[], [b"one"], [b"one"], [b"one", b"two"]]


def test_beyond_its_bound_the_oldest_is_forgotten(calls):
    knowledge = Knowledge(most_bytes=10)
    for question in (b"1" * 4, b"2" * 4, b"3" * 4, b"4" * 11, b""):
        knowledge.ask(None, question, model="m", timeout=1)
    assert calls[3] == [b"2222", b"3333"] and calls[4] == []


LATE = processes.Failed(Outcome("timed out", "no result within 1 s"))
KILLED = processes.Failed(Outcome("killed", "SIGKILL"))


@pytest.mark.parametrize(
    "failure, message",
    [
        (Invalid("no such model"), "^no such model$"),
        (LATE, "m was given up, no result within 1 s: give it more time with timeout="),
        (KILLED, "m cannot be followed on fake tensors: SIGKILL"),
    ],
    ids=["invalid", "late", "killed"],
)
def test_a_failure_is_a_value_error_that_says_what_to_do(calls, failure, message):
    with pytest.raises(ValueError, match=message):
        Knowledge().ask(None, failure, model="m", timeout=1)
