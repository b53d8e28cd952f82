"""Run the functions of lessons 02 and 04 on simulated devices, with faulty libraries and with disturbed measurements.

A formula gives the times of a device. The verdicts must be those that the device deserves.
"""

import ast
import collections
import functools
import math
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted import verdict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf_helpers.course.ledger import Verdict, load
from perf_helpers.lab.roofline import Ceilings
from perf_helpers.widgets import exercises
from trainmem.core.task import Task
from trainmem.records import CPU, WALL, Ratio

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
STEP, BATCH = "02_anatomy_of_a_step", "04_batch_size"
LEDGER, HOLDS, REFUTED = load(), Verdict.HOLDS, Verdict.REFUTED
SMALLER, TOO_SMALL = Verdict.SMALLER, Verdict.TOO_SMALL
CARDS = {"H100": 132, "A100": 108, "V100": 80, "T4": 40, "L4": 58, "A10": 72, "B200": 148}
TILES = [(256, 128), (128, 256), (128, 128), (256, 192), (192, 128), (128, 96)]


def taken_from(lesson, *names, **given):
    """Execute the top-level statements of a lesson that define `names`, in order; return the defined objects in a
    namespace.

    `lesson`: the lesson's name; `given`: {name: value} that the lesson's code may use.
    """
    space = {"math": math, "torch": torch, "statistics": statistics, "Ratio": Ratio, "CPU": CPU, "WALL": WALL} | given
    found = set()
    for node in ast.parse((SOURCES / f"{lesson}.py").read_text()).body:
        assigned = [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
        targets = [each for target in assigned for each in ast.walk(target)]
        defined = {getattr(each, "name", getattr(each, "id", None)) for each in (node, *targets)} - {None}
        if defined & {*names}:
            exec(compile(ast.Module([node], []), lesson, "exec"), space)
            found |= defined
    assert {*names} <= found, f"{lesson} no longer has {', '.join({*names} - found)}"
    return SimpleNamespace(**space)


def turns(seconds, count=4):
    return [(seconds, seconds)] * count


# ---- 04: tiles and alignment


def products_on(at_once, tile, aligned, tiles=True, sizes=None):
    """Return {claim id: the lesson's verdict} on matmuls of a GPU whose times follow a formula.

    Args:
        at_once: number of tiles that the GPU computes at once (one wave).
        tile: (rows, columns) of a tile.
        aligned: takes (size, dtype) and returns the factor on a matmul's time, e.g. for a size that is not aligned.
        tiles: True: a matmul's time depends on its whole waves of tiles; False: on its FLOPs.
        sizes: matmuls to use in place of the lesson's; None: the lesson's.
    """
    edge = at_once // (2048 // tile[0]) * tile[1]
    given = {"rows_here": 2048, "depth": 4096, "edge": edge, "on_cpu": False, "FLOOR": 1.02}
    lesson = taken_from(BATCH, "waves", "PRODUCTS", "faster", "gain_of_half", **given)
    lesson.PRODUCTS.update(sizes or {})

    def seconds(rows, columns, depth, kind):
        work = lesson.waves(rows, columns, tile, at_once) * math.prod(tile) * at_once if tiles else rows * columns
        return work * depth * math.prod(aligned(size, kind) for size in {rows, columns, depth})

    one = {name: turns(seconds(*product)) for name, product in lesson.PRODUCTS.items()}
    lesson.faster.__globals__["pairs"] = [one | {f"{name} again": each for name, each in one.items()}] * 3
    rate = lesson.faster("within", "beyond")
    values = {
        "multiples-of-eight": lesson.faster("of 8", "odd"),
        "multiples-of-64": lesson.faster("of 64", "of 8"),
        "tile-quantization": rate / ((edge - 8) / (edge + 8)),
        "multiple-varies": Ratio.of_processes([lesson.gain_of_half(one)] * 3, 1.02),
    }
    return {id: verdict(id, value) for id, value in values.items()}


def indifferent(size, kind):
    return 1.0


def by_eights(size, kind):
    return 1.5 if size % 8 and kind == "float16" else 1.0


def by_64(size, kind):
    return 1.3 if size % 64 else 1.0


@pytest.mark.parametrize(("card", "tile"), [*zip(CARDS, [*TILES, (256, 128)], strict=True)])
def test_tiles_alone_are_not_taken_for_alignment(card, tile):
    verdicts = products_on(CARDS[card], tile, indifferent)
    assert HOLDS not in (verdicts["multiples-of-eight"], verdicts["multiples-of-64"], verdicts["multiple-varies"])


def test_sizes_on_either_side_of_an_edge_would_have_been_taken_for_alignment():
    """The lesson once compared 4096 with 4097 and 4104. The larger sizes need one more wave of tiles, so they take
    longer even on a card without alignment effects, and the claims about alignment would hold.
    """
    old = {name: (size,) * 3 + ("float16",) for name, size in {"of 64": 4096, "of 8": 4104, "odd": 4097}.items()}
    beside = {"of 8": (4096,) * 3 + ("float16",)}
    assert products_on(132, (256, 128), indifferent, sizes=old)["multiples-of-64"] is HOLDS
    assert products_on(132, (256, 128), indifferent, sizes=old | beside)["multiples-of-eight"] is HOLDS


@pytest.mark.parametrize("aligned", [indifferent, by_eights, by_64])
@pytest.mark.parametrize("card", ["H100", "T4"])
def test_alignment_alone_is_not_taken_for_tiles(card, aligned):
    assert products_on(CARDS[card], (256, 128), aligned, tiles=False)["tile-quantization"] is not HOLDS


def test_an_odd_column_past_the_edge_would_have_been_taken_for_a_tile():
    edge = 132 // 8 * 128
    old = {name: (2048, edge + away, 4096, "float16") for name, away in {"within": 0, "beyond": 1}.items()}
    assert products_on(132, (256, 128), by_eights, tiles=False, sizes=old)["tile-quantization"] is HOLDS


@pytest.mark.parametrize("card", ["H100", "T4"])
def test_each_effect_that_is_there_is_found(card):
    both = products_on(CARDS[card], (256, 128), by_eights)
    assert both["multiples-of-eight"] is both["tile-quantization"] is both["multiple-varies"] is HOLDS
    assert products_on(CARDS[card], (256, 128), by_64)["multiples-of-64"] is HOLDS
    alike = products_on(CARDS[card], (256, 128), lambda size, kind: by_eights(size, "float16"))
    assert alike["multiple-varies"] is not HOLDS, "every dtype suffers alike"


def test_two_knees_are_reckoned_with_in_the_exercise():
    lesson = taken_from(BATCH, "waves", "LAYERS", "gained")
    gains = {letter: lesson.gained(*layer) for letter, layer in lesson.LAYERS.items()}
    assert {letter for letter, gain in gains.items() if gain >= 1.5} == {"A", "D"}
    assert lesson.gained(512, 1024, 132) == 2 and lesson.gained(4096, 1024, 1) == 1


# ---- 04: steps by batch


def steps_on(one_pass, update, sizes=(1, 4, 12, 25, 51)):
    """Return {claim id: lesson 04's verdict} on a device whose times are given.

    Args:
        one_pass: function of a batch size that returns the seconds of a forward and backward pass.
        update: seconds of an optimizer update.
        sizes: the batch sizes that are measured.
    """
    taken = [[*(turns(one_pass(size) + update) for size in (*sizes, 1, sizes[-1])), turns(update)]] * 3
    lesson = taken_from(BATCH, "speed_of", "by_updates", CLOCK=CPU, FLOOR=1.05, taken=taken)
    last, largest, quarter = len(sizes) - 1, sizes[-1], sizes.index(sizes[-1] // 4)
    return {
        "larger-batch-faster": verdict("larger-batch-faster", lesson.speed_of(0, last, last + 1, largest)),
        "larger-batch-by-updates": verdict("larger-batch-by-updates", lesson.by_updates(taken, largest)),
        "memory-to-the-limit": verdict(
            "memory-to-the-limit", lesson.speed_of(last, quarter, last + 2, sizes[quarter] / largest)
        ),
    }


@pytest.mark.parametrize(
    ("one_pass", "update", "verdicts"),
    [
        (lambda size: 1 + size / 10, 0.0, (HOLDS, REFUTED, HOLDS)),  # updates are free: calls are what is shared
        (lambda size: 1 + size / 10, 0.3, (HOLDS, SMALLER, HOLDS)),  # some of it
        (lambda size: size, 10.0, (HOLDS, HOLDS, HOLDS)),  # updates are all there is to share
        (lambda size: 0.1 + size, 0.5, (HOLDS, HOLDS, TOO_SMALL)),  # the limit brings next to nothing
        (
            lambda size: (3 + size) * (1 if size < 20 else 1.3),
            0.5,
            (HOLDS, SMALLER, REFUTED),
        ),  # the most is at a quarter
    ],
)
def test_a_device_gets_the_verdicts_that_it_deserves(one_pass, update, verdicts):
    assert tuple(steps_on(one_pass, update).values()) == verdicts


def test_the_sweep_ends_at_the_largest_batch_that_fits():
    for fitting in (1, 3, 13, 51):
        lesson = taken_from(BATCH, "quarter", "batches", fitting=fitting, on_cpu=True)
        assert max(lesson.batches) == fitting and {1, lesson.quarter} <= {*lesson.batches}


# ---- 04: how a training ends


def test_a_loss_on_the_floor_is_distinguished_from_one_above_it():
    task = Task("bert-tiny", seq_len=32, data="learnable", config={"vocab_size": 200}, seed=51)
    rule = taken_from(BATCH, "best_rule", learnable=task).best_rule(batch := task.batch(256))
    assert rule.sum(1).allclose(torch.ones(256)) and (rule[batch["labels"] == 1][:, 1] > 0).all()

    def gap(likely):
        return torch.nn.functional.kl_div(likely.log(), rule, reduction="batchmean").item()

    def loss(likely):
        return torch.nn.functional.nll_loss(likely.log(), batch["labels"]).item()

    good, better = (rule.clamp(least, 1 - least) for least in (4e-3, 1e-3))
    assert 1 < loss(good) / loss(better) < 1.1 and gap(good) / gap(better) > 2, "the loss alone sees no difference"
    assert gap(torch.full((256, 2), 0.5)) > 0.5, "a model that answers nothing"


@pytest.mark.parametrize(
    ("factors", "expected"),
    [({8: (1, 2, 4), 128: (1, 4, 16)}, REFUTED), ({8: (4,), 128: (1, 4, 16)}, HOLDS)],  # planted: one rate, too high
)
def test_a_batch_that_is_given_one_rate_alone_may_seem_to_end_worse(factors, expected):
    gaps = {(8, 1): 0.006, (8, 2): 0.004, (8, 4): 0.6, (128, 1): 0.6, (128, 4): 0.015, (128, 16): 0.6}
    curves = {f"{size} {rate} {seed}": ([], gap) for (size, rate), gap in gaps.items() for seed in range(3)}
    lesson = taken_from(BATCH, "gap", "ends", seeds=(0, 1, 2), factors=factors, curves=curves)
    assert verdict("larger-batch-ends-better", lesson.ends(128, 8)) is expected


# ---- 02: a step


def recorder(*more, **given):
    given |= {"TorchDispatchMode": TorchDispatchMode, "tree_leaves": tree_leaves, "namedtuple": collections.namedtuple}
    names = ["PRODUCTS", "PER_ELEMENT", "MOVES", "Row", "group", "flops_of", "bytes_of", "counted", "tensors", "moment"]
    return taken_from(STEP, *names, "Recorder", "activation_counts", *more, DEVICE="cpu", time=time, **given)


def keeps_output(x):
    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            y = x.exp()
            context.save_for_backward(y)
            return y

        @staticmethod
        def backward(context, gradient):
            return gradient * context.saved_tensors[0]

    return Planted.apply(x)


def kept_outputs():
    table = recorder().activation_counts(None)
    return sum(row[-1] == "output" for row in table) / len(table)


def test_what_an_activation_keeps_decides_its_claim(monkeypatch):
    assert verdict("activation-keeps-output", kept_outputs()) is REFUTED
    for name in ("gelu", "silu"):  # planted: a library whose activations are undone from their output
        monkeypatch.setattr(torch.nn.functional, name, keeps_output)
    assert verdict("activation-keeps-output", kept_outputs()) is HOLDS


def products_in_backward(seconds):
    """Return the verdict of the claim "backward-sizes-awkward" if matmuls take the times that `seconds` gives.

    `seconds`: function of the two matrices of a matmul that returns how long the matmul takes.
    """

    class Clock(TorchDispatchMode):
        spent = 0.0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.overloadpacket.__name__ == "mm":
                self.spent += seconds(*args)
            return operation(*args, **(kwargs or {}))

    def in_turns(works, turns):
        found = []
        for work in works:
            with Clock() as clock:
                work()
            found.append([(clock.spent, clock.spent)] * turns)
        return found

    given = {"DEVICE": "cpu", "one_thread": lambda: None, "interleaving": SimpleNamespace(in_turns=in_turns)}
    lesson = taken_from(STEP, "products_of_a_layer", **given)
    processes = [lesson.products_of_a_layer(Task("bert-tiny", seq_len=32))] * 3
    return verdict("backward-sizes-awkward", Ratio.of_turns(processes, CPU, 1.05) / 2)


def test_products_are_awkward_in_backward_where_a_library_is_slow_at_them():
    def at_one_rate(left, right):
        return left.shape[0] * left.shape[1] * right.shape[1]

    assert products_in_backward(at_one_rate) is not HOLDS
    transposed = products_in_backward(lambda left, right: at_one_rate(left, right) * (1 + (not left.is_contiguous())))
    assert transposed is HOLDS


def test_copies_do_not_decide_the_order_of_the_groups():
    """Lesson 02 sorts groups of operations (matmuls, norms, element-wise ones) by FLOPs per byte. Copies compute
    nothing, so they are left out. If a norm has as few FLOPs per byte as an addition, the claim about the order is
    refuted.
    """
    row = recorder().Row
    step = [
        row("forward", "mm", "contraction", 1000, 10, 10),
        row("forward", "_softmax", "normalization", 50, 40, 40),
        row("forward", "add", "element-wise", 20, 40, 40),
    ]

    def ratio(step):
        given = {"step": step, "EXPS": {}, "PER_ELEMENT": {}}
        lesson = taken_from(STEP, "total", "intensity", **given)
        per_byte = [lesson.intensity(name) for name in ("contraction", "normalization", "element-wise")]
        return verdict("op-groups-ordered", min(per_byte[0] / per_byte[1], per_byte[1] / per_byte[2]))

    copies = [row("forward", "copy_", "element-wise", 0, 4000, 4000)]
    assert ratio(step) is ratio(step + copies) is HOLDS
    bare = [step[0], row("forward", "_softmax", "normalization", 20, 40, 40), step[2]]
    assert ratio(bare) is ratio(bare + copies) is REFUTED


# ---- 02: the challenge

PLAIN = Task("bert-tiny", seq_len=32, config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
UNSEEN = PLAIN.replace(seq_len=16, config={"num_hidden_layers": 1, "intermediate_size": 256})
DEVICES = {  # FLOP/s, bytes/s, seconds of a call, seconds between operations, share of an operation's time in a step
    "arithmetic is slow": (1e9, 1e12, 0.0, 0.0, 1.0),
    "memory is slow": (1e13, 1e9, 0.0, 0.0, 1.0),
    "calls are slow": (1e13, 1e12, 1e-5, 0.0, 1.0),
    "launches are slow": (1e13, 1e12, 1e-6, 2e-5, 1.0),
    "the library's attention is faster": (1e11, 2e10, 2e-6, 0.0, 0.8),
}


@functools.cache
def operations():
    """Return two lists with the operations of a training step, as the lesson counts them: one for the plain model, one
    for the model that the learner has not seen before.
    """
    lesson = recorder("one_step", "count", one_thread=lambda: None)
    return [[lesson.Row(*row) for row in lesson.count(task, samples)] for task, samples in ((PLAIN, 4), (UNSEEN, 8))]


class Challenge:
    """Run lesson 02's challenge on a device whose seconds are a formula.

    Args:
        device: a key of `DEVICES`.
        slower: factor on all step times of the challenge; e.g. 1.2: the device is slower than when the lesson timed the
            reference model.
        disturbed: factors on the measured step times of the model that the learner must predict, one per measurement;
            the last one repeats.
    """

    def __init__(self, device, slower=1.0, disturbed=(1.0,)):
        flops, moved, call, between, share = DEVICES[device]
        roof = Ceilings(flops, moved, "float32", "cpu", 1)

        def seconds(row):
            return call + (1 + len(row.name) / 4) * roof.seconds(row.flops, row.moved)

        def step(rows, task):
            return sum(share * seconds(row) + between for row in rows) + 1e-10 * task.parameters()

        def run(*_, **__):
            factor = disturbed[min(self.measurements, len(disturbed) - 1)]
            self.measurements += 1
            return SimpleNamespace(value=[(slower * self.above, slower * factor * self.other)] * 4)

        self.measurements = 0
        rows, self.rows = operations()
        timed = [row._replace(seconds=seconds(row)) for row in rows]
        self.above, self.other = step(rows, PLAIN), step(self.rows, UNSEEN)
        given = {"timed_plain": timed, "roof": roof, "reference": self.above, "unseen": UNSEEN, "exercises": exercises}
        given |= {"lab": SimpleNamespace(run=run), "both_steps": None}
        self.lesson = taken_from(STEP, "total", "side_by_side", "check", "predicted", **given)

    def solution(self):
        update = 1e-10 * PLAIN.parameters()
        passes = self.lesson.predicted(self.rows, self.above - update)
        return passes + update * UNSEEN.parameters() / PLAIN.parameters()

    def status(self, seconds):
        return self.lesson.check(1e3 * seconds).status


@pytest.mark.parametrize("device", DEVICES)
def test_the_solution_predicts_the_unseen_step_on_every_device_and_its_mistake_does_not(device):
    challenge = Challenge(device)
    assert challenge.status(challenge.solution()) == "right"
    assert challenge.status(challenge.above) == "wrong", "as many tokens, so as long"
    assert challenge.status(0.0) == challenge.status(math.nan) == "wrong"


def test_neither_layers_nor_parameters_alone_predict_a_step_whose_arithmetic_is_slow():
    challenge = Challenge("arithmetic is slow")
    assert challenge.status(challenge.above / 2) == "wrong"
    assert challenge.status(challenge.above * UNSEEN.parameters() / PLAIN.parameters()) == "wrong"


@pytest.mark.parametrize("slower", [0.3, 3.0])
def test_a_machine_that_is_slower_since_its_reference_changes_nothing(slower):
    before, after = Challenge("memory is slow"), Challenge("memory is slow", slower)
    for answer in (before.solution(), before.other, 1.3 * before.other, before.above):
        assert before.lesson.check(1e3 * answer) == after.lesson.check(1e3 * answer)


def test_near_the_limit_one_disturbed_measurement_does_not_decide():
    challenge = Challenge("memory is slow", disturbed=(1.5, 1.0))
    assert challenge.status(challenge.other) == "right" and challenge.measurements > 1
    challenge = Challenge("memory is slow", disturbed=(1.1, 1.0))
    assert challenge.status(challenge.above) == "wrong" and challenge.measurements == 1
