"""results/tools_pypi.py: how a tool is asked, and what it is when it cannot say."""

import dataclasses
import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "results"


def script(name):
    sys.path.insert(0, str(RESULTS))
    try:
        spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look for it there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(RESULTS))


@pytest.fixture(scope="module")
def pypi():
    return script("tools_pypi")


@pytest.fixture
def asked(pypi):
    return pypi.Question(
        folder="",
        fields={"vocab_size": 100},
        parameters=1000,
        largest_layer=100,
        width=8,
        depth=2,
        heads=2,
        tokens=64,
        size=2,
        precision="bf16",
        mixed=True,
        optimizer="adamw_torch_fused",
        checkpointing=False,
        eager=False,
        card="T4",
    )


def test_a_tool_is_asked_by_its_name_for_an_optimizer_and_refuses_what_it_has_none_for(pypi, asked):
    assert asked.named(adam=pypi.ADAMW, sgd=("sgd",)) == "adam"
    other = dataclasses.replace(asked, optimizer="adafactor")
    said = pypi.answer(lambda one: one.named(adam=pypi.ADAMW, sgd=("sgd",)), other)
    assert said == {"refused": "cannot say the optimizer adafactor"}
    said = pypi.answer(lambda one: (one.length(), 0), dataclasses.replace(asked, tokens=None))
    assert said == {"refused": "cannot say images"}


@pytest.mark.parametrize(("mixed", "precision", "width"), [(True, "bf16", 4), (False, "bf16", 2), (False, "fp32", 4)])
def test_weights_are_as_wide_as_they_are_stored(asked, mixed, precision, width):
    assert dataclasses.replace(asked, mixed=mixed, precision=precision).weight_bytes == width


def test_an_answer_comes_from_a_process_of_its_own(pypi, asked):
    held = bytearray(64 << 20)  # of this process; a forked one counts what it touches itself
    said = pypi.forked(lambda one: (one.parameters, os.getpid()), asked)
    assert said["bytes"] == 1000 and said["total_bytes"] != os.getpid() and held[0] == 0
    assert 0 <= said["seconds"] < 5 and said["own_bytes"] > 1 << 20


def test_a_tool_that_raises_ends_or_hangs_gives_a_reason(pypi, asked, monkeypatch):
    def raises(one):
        raise KeyError("no such\n  model")

    assert pypi.forked(raises, asked) == {"refused": "KeyError: 'no such\\n model'"}
    assert pypi.forked(lambda one: sys.exit("no configuration"), asked) == {"refused": "SystemExit: no configuration"}
    monkeypatch.setattr(pypi, "SECONDS", 1)
    assert pypi.forked(lambda one: time.sleep(30), asked) == {"refused": "no answer in 1 seconds"}
