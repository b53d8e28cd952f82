"""Lessons 10 to 12 measure correctly: their checks reject mistakes that a learner's or a library's code could have.

The functions are taken from the lessons' sources. The correct function must give the expected verdict, and each wrong
one another verdict.
"""

import ast
import contextlib
import importlib
import math
import multiprocessing
import os
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planted import verdict
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from perf_helpers.course.ledger import Verdict, load
from trainmem.core.task import Task
from trainmem.measure import interleaving
from trainmem.records import CPU, Ratio

HOLDS, REFUTED, TOO_SMALL = Verdict.HOLDS, Verdict.REFUTED, Verdict.TOO_SMALL
LEDGER = load()
SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
HERE = SimpleNamespace(  # a lab that runs what it is given in this process
    machine=SimpleNamespace(rehearsed=False, kind="cpu"),
    run=lambda job, *_, **__: SimpleNamespace(value=job(None)),
)


def lesson(number, *names, **given):
    """Return the objects that a lesson's source defines under `names`.

    `number`: the lesson's number; `given`: {name: value} that the source may use, in addition to the lessons' imports.
    """
    (path,) = SOURCES.glob(f"{number}_*.py")
    taken = [node for node in ast.parse(path.read_text("utf-8")).body if {*_defined(node)} & {*names}]
    assert {name for node in taken for name in _defined(node)} >= {*names}
    modules = dict(torch=torch, math=math, np=np, os=os, time=time, queue=queue, threading=threading)
    modules |= dict(Dataset=Dataset, IterableDataset=IterableDataset, DataLoader=DataLoader, pad_sequence=pad_sequence)
    modules |= dict(get_worker_info=get_worker_info, TorchDispatchMode=TorchDispatchMode, interleaving=interleaving)
    scope = modules | dict(lab=HERE, BATCH=8, CPU=CPU, Ratio=Ratio, cuda=False, clock=CPU) | given
    exec(compile(ast.Module(taken, []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def _defined(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


# ------------------------------------------------------------------------------------------------------------ attention


def tiles(q, k, v, mask, tile=64, keep_last=True, shrinks=True):
    """Compute attention tile by tile with an online softmax, with or without a common mistake; return its output.

    Args:
        q, k, v: queries, keys and values, (..., length, head size).
        mask: true where a query may see a key.
        tile: keys per tile.
        keep_last: whether the last tile is used if it is not full; leaving it out is a mistake.
        shrinks: whether earlier sums shrink when a higher score is found; not shrinking them is a mistake.
    """
    top = torch.full_like(q[..., :1], -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    last = k.shape[-2] if keep_last else k.shape[-2] // tile * tile
    for first in range(0, last, tile):
        part = slice(first, first + tile)
        scores = q @ k[..., part, :].transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask[..., part], -1e30)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink, weights = (top - higher).exp() if shrinks else torch.ones_like(top), (scores - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out, top = out * shrink + weights @ v[..., part, :], higher
    return out / total


RIGHT = {"tiles": tiles, "tiles of another size": lambda *inputs: tiles(*inputs, tile=16)}
WRONG = {
    "no scaling": lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0),
    "zeros": lambda q, k, v, mask: 0 * (q + k + v),
    "uniform weights": lambda q, k, v, mask: v.mean(-2, keepdim=True) + 0 * (q + k),
    "flipped keys": lambda q, k, v, mask: scaled_dot_product_attention(q, k.flip(-2), v, attn_mask=mask),
    "the mask is forgotten": lambda q, k, v, mask: scaled_dot_product_attention(q, k, v),
    "the last tile is left out": lambda *inputs: tiles(*inputs, keep_last=False),
    "a tile's sum is not shrunk": lambda *inputs: tiles(*inputs, shrinks=False),
}


def planted(function):
    """Register an attention function (queries, keys, values, mask) with transformers, and return its registered
    name.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, q, k, v, mask, **_):
        return function(q, k, v, mask).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("planted", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("planted", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return "planted"


@pytest.fixture(autouse=True)
def _unregistered():
    """Remove the registered attention after each test, because a registration lasts for the whole process."""
    yield
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop("planted", None)


SHARP = Task(
    "bert-tiny",
    seq_len=100,
    config=dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1, num_hidden_layers=1),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "expected"),
    [(function, HOLDS) for function in RIGHT.values()] + [(function, REFUTED) for function in WRONG.values()],
    ids=[*RIGHT, *WRONG],
)
def test_attention_that_computes_something_else_is_not_the_same(function, expected):
    apart = lesson("11", "gradients", "apart").apart
    assert verdict("sdpa-same", apart(SHARP, "eager", planted(function))) is expected


def test_torchs_own_attention_is_the_same():
    assert verdict("sdpa-same", lesson("11", "gradients", "apart").apart(SHARP)) is HOLDS


# -------------------------------------------------------------------------------------------------------- torch.compile


class Model(torch.nn.Module):
    def __init__(self, breaks=False, notes=False):
        super().__init__()
        self.layer, self.breaks, self.notes, self.kind = torch.nn.Linear(4, 4), breaks, notes, None

    def forward(self, x):
        x = self.layer(x)
        if self.breaks and x.sum().item() > 1e9:
            x = -x
        if self.notes and self.kind is None:
            self.kind = "noted"  # as BERT's classifier does
        return x.relu()


@pytest.mark.parametrize(
    ("options", "breaks", "again", "expected"),
    [({}, 0, 0, HOLDS), ({"breaks": True}, 1, 0, REFUTED), ({"notes": True}, 0, 1, HOLDS)],
    ids=["whole", "broken", "compiled again"],
)
def test_a_break_turns_the_verdict_and_compiling_again_is_distinguished(options, breaks, again, expected):
    task = SimpleNamespace(build_model=lambda: Model(**options), batch=lambda _: {"x": torch.ones(2, 4)})
    row = lesson("11", "captured", "looked_at").looked_at(task)
    assert (row["breaks"], row["second"]) == (breaks, again)
    assert verdict("compile-captures", row["breaks"]) is expected


def test_the_steps_until_a_start_has_paid_have_an_interval():
    steps_to_pay = lesson("11", "steps_to_pay").steps_to_pay
    few, likely, many = (steps_to_pay(20.0, 0.1, gain) for gain in (1.122, 1.069, 1.018))
    assert likely == pytest.approx((20 - 0.1) / (0.1 - 0.1 / 1.069)) and few < likely < many and many > 6 * few
    assert steps_to_pay(20.0, 0.1, 1.0) == steps_to_pay(20.0, 0.1, 0.9) == math.inf


def twice(graph, _):
    return lambda *inputs: (graph(*inputs), graph(*inputs))[0]


@pytest.mark.parametrize(("backend", "expected"), [("eager", HOLDS), (twice, REFUTED)], ids=["eager", "it runs twice"])
def test_a_backend_that_runs_other_operations_is_not_eager(backend, expected):
    operations_of = lesson("11", "operations_of").operations_of
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)), torch.ones(2, 4)
    compiled, found = torch.compile(model, backend=backend), []
    for function in (model, compiled):
        function(x)
        found.append(operations_of(lambda function=function: function(x)))
    assert verdict("compile-eager", found[1] / found[0]) is expected


@pytest.mark.nightly
@pytest.mark.parametrize(("events", "expected"), [([], REFUTED), (["cudaGraphLaunch"], HOLDS)])
def test_a_graph_that_is_replayed_is_seen(monkeypatch, events, expected):
    """Lesson 11's function `replayed` finds out from the events of a profiler whether a CUDA graph is replayed. Here a
    stub profiler reports `events`, and nothing is compiled.
    """
    profile = SimpleNamespace(events=lambda: [SimpleNamespace(name=name) for name in ["aten::mm", *events]])
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)
    monkeypatch.setattr(torch.profiler, "profile", lambda: contextlib.nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launched, turns = lesson("11", "replayed").replayed(None)
    assert verdict("compile-cudagraphs", int(launched["default"] > 0)) is expected
    assert Ratio.of_turns([turns], CPU, 1.02).value > 0 and len(launched) == 2


# ----------------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(("foreach", "expected"), [(True, HOLDS), (False, REFUTED)])
def test_a_torch_whose_default_is_the_loop_is_noticed(monkeypatch, foreach, expected):
    adam = importlib.import_module("torch.optim.adam")  # torch.optim has a function of that name
    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, foreach))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    counts = lesson("10", "RATE", "TORCH", "tensors", "Operators", "operators_called").operators_called(None)
    assert verdict("multi-tensor-default", counts["no flag"][1] / counts["foreach"][1]) is expected


@pytest.mark.parametrize(("fused", "expected"), [(0.6, HOLDS), (1.0, TOO_SMALL), (1.2, REFUTED)])
def test_a_fused_update_that_is_no_faster_is_noticed(fused, expected):
    speed_ratio = lesson("10", "speed_ratio").speed_ratio
    turns = [[(seconds, seconds)] * 6 for seconds in (1.0, fused, 1.0)]  # the rival, the fused one, the rival
    found = verdict("fused-fastest", speed_ratio([turns] * 3))
    assert found is expected and (found in LEDGER["fused-fastest"].expected["cpu"]) == (expected is HOLDS)


# ---------------------------------------------------------------------------------------------------------- data loader


@pytest.mark.parametrize(("steps", "expected"), [(3, HOLDS), (12, REFUTED), (30, REFUTED)])
def test_workers_beyond_four_help_where_four_do_not_keep_up(steps, expected):
    """By the lesson's model, 4 workers keep up if reading a batch takes as long as 3 training steps, but not if reading
    takes longer.
    """
    taken = lesson("12", "simulate", "total")
    four, sixteen = (taken.total(taken.simulate(steps, count, batches=200)[300:], "wait", "train") for count in (4, 16))
    value = four / sixteen
    assert verdict("workers-not-beyond", Ratio(value, value / 1.3, value * 1.3)) is expected


def test_no_more_batches_are_under_way_than_workers_times_prefetch():
    forked = lesson("12", "forked").forked
    batches = iter(DataLoader(range(100), 5, **forked(2, prefetch_factor=2)))
    outstanding = [batches._tasks_outstanding]
    for _ in range(6):
        next(batches)
        outstanding.append(batches._tasks_outstanding)
    assert max(outstanding) == 4


def test_workers_are_forked_whatever_python_starts_by_default():
    """Python 3.14 starts workers by forkserver, which cannot send a function that is defined in a notebook."""
    taken = lesson("12", "forked", "Reader")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        reader = taken.Reader({"x": torch.ones(8, 2)}, 0)
        batch = next(iter(DataLoader(reader, 4, **taken.forked(1))))
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert batch["when"][0, 0] != os.getpid() and taken.forked()["multiprocessing_context"] is None


def test_a_stream_that_no_worker_divides_is_read_by_each():
    streamed = lesson("12", "forked", "Stream", "streamed").streamed
    assert streamed(False) == [4 * 128, 128]
    assert streamed(True) == [128, 128]


def test_in_a_packed_row_a_token_sees_its_own_sequence_alone():
    taken = lesson("12", "packed", "inputs_of")
    rows = taken.packed([60, 60, 8, 100, 20, 20], 128)
    assert rows == [[60, 60, 8], [100, 20], [20]]
    mask = taken.inputs_of(rows, 128)["attention_mask"]
    assert mask[0, 0, 59].sum() == 60 and mask[0, 0, 60].sum() == 60 and mask[0, 0, 127].sum() == 8
    assert not mask[0, 0, 59, 60] and not mask[1, 0, 100, 99]
    assert taken.inputs_of([[3], [5]], 5)["attention_mask"].sum(1).tolist() == [3, 5]
