"""Progress bars are shown only if somebody watches, one at a time, and disappear at the end."""

import io
import threading
from types import SimpleNamespace

import pytest

from perf_helpers import Lab
from trainmem.advise import advise
from trainmem.core import progress
from trainmem.core.task import Task
from trainmem.estimate import estimate


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Replace standard error by a stub of a terminal for the bars, because pytest captures sys.stderr."""
    system = SimpleNamespace(modules={}, stderr=Terminal())
    monkeypatch.setattr(progress, "sys", system)
    return system.stderr


def test_a_bar_tells_how_far_it_is_and_goes_away(terminal):
    with progress.bar("training", 4, mininterval=0) as bar:
        bar.update(1)
        assert "training:  25%" in terminal.getvalue() and "1/4" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r"), "the line is cleared"


def test_a_bar_that_ends_short_is_filled_first(terminal):
    with progress.percent("estimating") as bar:
        bar.update(40)
    assert bar.n == bar.total == 100


def test_a_bar_in_a_bar_is_not_shown_and_the_next_one_is(terminal):
    with progress.bar("outer", unit="estimate") as outer, progress.bar("inner", 3) as inner:
        inner.update(1)
        assert inner.disable and not outer.disable
    assert "inner" not in terminal.getvalue()
    with progress.bar("next", 1) as bar:
        assert not bar.disable


def test_a_bar_is_closed_by_an_error_too(terminal):
    with pytest.raises(KeyboardInterrupt), progress.bar("training", 4):
        raise KeyboardInterrupt
    with progress.bar("next", 1) as bar:
        assert not bar.disable


@pytest.mark.parametrize("where", ["in a file", "in a thread", "hidden", "quiet"])
def test_nothing_is_drawn_where_nobody_looks(terminal, monkeypatch, where):
    if where == "in a file":
        monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    bars = []

    def work():
        with progress.hidden(where == "hidden"), progress.bar("training", 2, quiet=where == "quiet") as bar:
            bar.update(1)
            bar.set_postfix_str("peak 3 MB")
            bar.reset()
            bars.append(bar)

    if where == "in a thread":
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    assert bars[0].disable and terminal.getvalue() == ""


@pytest.mark.nightly
def test_what_takes_long_shows_a_bar(terminal, tmp_path, monkeypatch):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    lab, task = Lab("cpu"), Task("bert-tiny", seq_len=16, dataset_size=40)
    one, other = (lab.train(name, task=task, steps=2, measure="time") for name in ("one", "other"))
    lab.compare(one, other, turns=3)
    estimate(task, device="cpu")
    advise(task, memory="300MB", effective_batch=4, avoid=["checkpointing"], must={"optim": "sgd"}, device="cpu")
    shown = {line.partition(":")[0] for line in terminal.getvalue().split("\r")} - {""}
    names = {line for line in shown if line.strip()}
    assert names == {"one", "other", "one and other in turns", "estimating bert-tiny", "advising"}


@pytest.mark.nightly
def test_a_lab_that_writes_results_hides_its_own_bars_and_no_others(terminal, tmp_path):
    unwatched, task = Lab("cpu", out=tmp_path), Task("bert-tiny", seq_len=16, dataset_size=40)
    unwatched.train("unwatched", task=task, steps=2, measure="time")
    unwatched.foresee(estimate, task, device="cpu")
    assert terminal.getvalue() == ""
    Lab("cpu", out=tmp_path / "other")
    with progress.bar("mine", 1) as bar:
        assert not bar.disable
