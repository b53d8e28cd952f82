"""Plant a mistake that a learner or a library could make in lessons 17 and 18: a claim's verdict must change.

The cells are taken from the lessons' sources; a mistake is planted in the text of a cell, or as a wrong function. No
whole lesson is run.
"""

import ast
import random
from pathlib import Path

import jupytext
import pytest
import torch
from planted import verdict
from torch.nn.functional import cross_entropy

from perf_helpers import Lab
from perf_helpers.course.ledger import Verdict, load

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
HOLDS, SMALLER, REFUTED = Verdict.HOLDS, Verdict.SMALLER, Verdict.REFUTED
LEDGER = load()


def cells(lesson, *names, planted=()):
    """Return {name: value} of a lesson's imports, and of the cells that define one of `names`.

    Args:
        lesson: the lesson's number, e.g. "17".
        planted: pairs (text in one of these cells, its replacement).
    """
    code = [
        cell.source for cell in jupytext.read(next(SOURCES.glob(f"{lesson}_*.py"))).cells if cell.cell_type == "code"
    ]
    setup = next(cell for cell in code if "lab = Lab(" in cell)
    chosen = [cell for cell in code if any(f"def {name}(" in cell or f"class {name}(" in cell for name in names)]
    assert all(sum(cell.count(old) for cell in chosen) == 1 for old, _ in planted)
    made = {"__name__": "__main__", "gpus2": False, "cuda": False, "lab": Lab("cpu")}  # so functions travel by value
    for cell in (setup, *chosen):
        for old, new in planted:
            cell = cell.replace(old, new)
        tree = ast.parse(cell)
        tree.body = [node for node in tree.body if defines(node)]
        exec(compile(tree, lesson, "exec"), made)
    return made


def defines(node):
    """Return whether a statement imports, or defines a function, a class or a constant; `node` is its syntax tree."""
    names = [name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    constant = isinstance(node, ast.Assign) and all(name.isupper() for name in names)
    return constant or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


PARALLEL = (
    "summed",
    "Block",
    "ShardedBlock",
    "join_ranks",
    "one_block",
    "ShardedWords",
    "fullest",
    "schedule",
    "received",
    "pipeline",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("planted", "verdicts"),
    [
        ((), (HOLDS, HOLDS)),
        # Nobody sums the gradients of a pair's input: each rank goes on with its own partial sum.
        ([("return summed(gradient, context.group), None", "return gradient, None")], (REFUTED, HOLDS)),
        # The micro-batches' losses are added up, and not averaged: every gradient is 8 times too large.
        ([(" / len(ids)\n", "\n")], (HOLDS, REFUTED)),
    ],
    ids=["nothing", "no sum in backward", "no mean over micro-batches"],
)
def test_a_wrong_gradient_is_noticed(planted, verdicts):
    made = cells("17", *PARALLEL, "place", "gradients", planted=planted)
    ways = {"tensor": {"way": "tensor"}, "pipeline": {"way": "pipeline", "micro_batches": 8}}
    ranks = made["on_ranks"](made["gradients"], "gradients", measure="none", ways=ways)
    tensor, pipeline = (max(rank[way] for rank in ranks) for way in ways)
    assert (verdict("tensor-parallel-same", tensor), verdict("pipeline-parallel-same", pipeline)) == verdicts


def test_losses_under_adamw_would_not_have_noticed():
    made, curves = cells("17", *PARALLEL), []
    (ids, labels), actions = made["sequences"](), made["schedule"]("1F1B", 0, 1, 4)
    for scale in (1, 16):
        model = made["build"](1)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = made["pipeline"](
                model, actions, ids.chunk(4), labels.chunk(4), loss=lambda *y, scale=scale: scale * cross_entropy(*y)
            )
            optimizer.step()
            losses.append(loss / scale)
        curves.append(losses)
    assert max(abs(wrong / right - 1) for right, wrong in zip(*curves, strict=True)) < 1e-3


def test_words_that_stay_whole_and_grids_that_only_make_copies_are_noticed():
    made = cells("17", *PARALLEL)
    fullest, words = made["fullest"], 32000
    assert verdict("tensor-parallel-splits", fullest(1, 2, words) / fullest(1, 1, words)) is HOLDS
    best = min(size for ranks in (1, 2, 4, 8) for size in (fullest(1, ranks), fullest(ranks, 1)) if size)
    assert fullest(1, 8) is fullest(8, 1) is None
    assert verdict("three-d-scales", min(fullest(2, 4), fullest(4, 2)) / best) is HOLDS
    assert verdict("three-d-scales", fullest(2, 2) / best) is SMALLER  # 0.996: eight ranks, of which four are copies
    shard_layers = made["shard_layers"]
    made["shard_layers"] = lambda model, *place: torch.nn.Sequential(
        *(
            layer if type(layer) in (torch.nn.Embedding, torch.nn.Linear) else shard_layers([layer], *place)[0]
            for layer in model
        )
    )
    assert verdict("tensor-parallel-splits", fullest(1, 2, words) / fullest(1, 1, words)) is SMALLER


def test_the_cheapest_cut_is_not_learnt_by_heart():
    made = cells("17", "drawn")
    judge = made["check_cut"]
    assert judge(lambda layers, sent, limit: 6 if limit > 5 else 3).status == "wrong"
    assert judge(lambda layers, sent, limit: sent.index(min(sent)) + 1).status == "wrong"  # forgets the limit


def test_the_dense_model_has_no_gate():
    made = cells(
        "18", "route", "sparse", planted=[("\n\nmodel = sparse(8, 2, 64).build_model()", "\n\nif 0: model = 0")]
    )
    kinds = {type(part).__name__ for part in made["sparse"](1, 1, 64).build_model().modules()}
    assert kinds and not [kind for kind in kinds if "Moe" in kind or "Router" in kind or "Expert" in kind]


def test_a_gate_that_looks_at_the_place_is_noticed():
    guessed = cells("18", "guessed")["guessed"]
    numbers = torch.Generator().manual_seed(0)
    ids, places = torch.randint(64, (512, 16), generator=numbers), torch.arange(16).expand(512, -1)
    for expert, expected in ((ids % 8, REFUTED), (places % 8, HOLDS), ((ids + places) % 8, REFUTED)):
        found = guessed(expert.flatten(), ids)
        assert verdict("moe-position", found["its place"] - found["nothing"]) is expected
    swayed = torch.where(torch.rand(ids.shape, generator=numbers) < 0.2, places % 8, ids % 8)  # one token of five
    found = guessed(swayed.flatten(), ids)
    assert verdict("moe-position", found["its place"] - found["nothing"]) is HOLDS


def test_a_balancing_loss_that_is_left_out_is_noticed():
    assert verdict("moe-balanced", 1.5) is HOLDS
    assert verdict("moe-balanced", 23.9) is REFUTED  # what the gate alone ended with in every recorded run
    assert verdict("moe-balanced", 2.6) is SMALLER


def test_quality_that_no_dense_model_has_is_not_looked_up():
    equal_width = cells("18", "equal_width")["equal_width"]
    equal_width.__globals__["SHAPES"] = {"dense, 32": (1, 1, 32), "dense, 128": (1, 1, 128)}
    for mixture, width in ((1.0, 64), (3.0, None), (0.1, None)):
        equal_width.__globals__["ends"] = {"dense, 32": [2.0], "dense, 128": [0.5], "64 experts": [mixture]}
        assert equal_width(0) == (width and pytest.approx(width))


@pytest.mark.daily(1)
@pytest.mark.parametrize("divided", [False, True])
def test_experts_gradients_that_are_not_divided_are_noticed(divided):
    planted = [] if divided else [("part.grad /= ranks", "pass")]
    made = cells("18", "route", "Exchange", "in_parallel", "layer_step", planted=planted)
    lab, step = made["lab"], made["layer_step"]
    alone = lab.run(step, "one", measure=("none",)).value
    ranks = [rank["value"] for rank in lab.run(step, "two", processes=2, measure=("none",)).ranks]
    for name in ("experts", "x"):
        joined = torch.tensor(ranks[0][name] + ranks[1][name]) / torch.tensor(alone[name])
        assert joined.median().item() == pytest.approx(1.0 if divided else 2.0, rel=1e-3)


def test_one_wide_expert_and_a_row_of_the_lesson_are_no_answers():
    made = cells("18", "check")
    assert made["check"](lambda ffn: {"experts": 16, "k": 1, "width": ffn}).status == "wrong"
    random.seed(0)
    assert made["check"](lambda ffn: {"experts": 64, "k": 4, "width": 128}).status == "wrong"  # right for 512 alone
    made = cells("18", "check_loss")
    made["SHAPES"] = {"64 experts": (64, 2, 16)}
    assert made["check_loss"]({"experts": 64, "k": 2, "width": 16}).status == "wrong"
