"""Plant faults in lesson 19's measurements: the verdict must change."""

import ast
import itertools
import tempfile
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted import verdict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from perf_helpers.course.ledger import Verdict
from trainmem.records import Ratio

HOLDS, REFUTED, TOO_SMALL = Verdict.HOLDS, Verdict.REFUTED, Verdict.TOO_SMALL
SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "19_cpus.py"
FUNCTIONS = {"flagged", "note_type", "taken", "predicted_speed", "an_update", "seconds", "faster", "in_types", "parts"}
FUNCTIONS |= {"backward_of", "step_of"}
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=256)


def lesson(**planted):
    """Return the lesson's functions with the names that they use; `planted`, {name: value}, replaces some of these
    names.
    """
    taken = [node for node in ast.parse(SOURCE.read_text("utf-8")).body if getattr(node, "name", None) in FUNCTIONS]
    assert {node.name for node in taken} == FUNCTIONS
    scope = dict(torch=torch, F=torch.nn.functional, tempfile=tempfile, itertools=itertools, warnings=warnings)
    scope |= dict(partial=partial, Path=Path, SIZES=SIZES, WALL=0, CPU=1, turns=3)
    scope |= dict(LlamaConfig=LlamaConfig, LlamaForCausalLM=LlamaForCausalLM, PrinterCallback=PrinterCallback)
    scope |= dict(Trainer=Trainer, TrainingArguments=TrainingArguments, LINEAR={(32, 32): 1})
    scope["QUIET"] = dict(report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1)
    scope["KINDS"] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    scope["lab"] = SimpleNamespace(ratio=lambda turns: Ratio.of_pairs(turns, 1.05))
    scope |= planted
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    return SimpleNamespace(scope=scope, **{name: scope[name] for name in FUNCTIONS})


class Obeying(Trainer):
    """A Trainer that, unlike transformers', applies fp16 on a CPU."""

    def compute_loss(self, *given, **named):
        with torch.autocast("cpu", torch.float16, enabled=self.args.fp16):
            return super().compute_loss(*given, **named)


@pytest.mark.nightly
@pytest.mark.parametrize(("trainer", "expected"), [(Trainer, REFUTED), (Obeying, HOLDS)])
def test_a_trainer_that_obeyed_fp16_would_be_seen(trainer, expected):
    found = lesson(Trainer=trainer).flagged(None)
    kinds = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    obeyed = sum(found[flag]["type"] == kind for flag, kind in kinds.items()) / 2
    assert verdict("cpu-flags-alike", obeyed) is expected


@pytest.mark.nightly
def test_the_type_of_the_weight_would_say_that_bf16_is_dropped_too():
    wrong = lesson(note_type=None)
    wrong.scope["note_type"] = lambda seen, layer, inputs, output: seen.append(str(layer.weight.dtype))
    assert {each["type"] for each in wrong.flagged(None).values()} == {"torch.float32"}


@pytest.mark.parametrize(
    ("arguments", "expected"), [(TrainingArguments, REFUTED), (lambda folder, **ignored: None, HOLDS)]
)
def test_arguments_that_take_anything_would_take_the_old_flags(arguments, expected):
    takes = lesson(TrainingArguments=arguments).taken
    assert verdict("ipex-flags", sum(map(takes, ("use_ipex", "jit_mode_eval", "no_cuda")))) is expected


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_checkpoint_that_is_loaded_in_fp32_is_no_fp16(dtype):
    class Loading(LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, folder):
            return LlamaForCausalLM.from_pretrained(folder, **({"dtype": dtype} if dtype else {}))

    def once(works, turns):
        return [[(work() and None, 1.0)] for work in works]

    found = lesson(LlamaForCausalLM=Loading, in_turns=once).in_types(None)["loaded"]
    assert (found["fp16"] == "torch.float16") is (dtype is None)


# ---- predictions


@pytest.mark.parametrize(
    ("fp16", "measured", "expected"),
    [(90e-3, 0.2, REFUTED), (10e-3, 1.0, HOLDS)],  # emulated; as fast as bf16
)
def test_the_prediction_from_the_parts_contains_the_measured_step(fp16, measured, expected):
    low, high = lesson().predicted_speed({"fp32": 20e-3, "bf16": 10e-3, "fp16": fp16}, 30e-3)
    assert low < measured < high
    assert verdict("cpu-fp16-as-bf16", Ratio.of_pairs([measured] * 7, 1.05)) is expected


def test_one_large_batch_alone_would_hide_that_bf16_saves_nothing_with_a_small_one():
    shares = {1: 1.0, 4: 0.94, 16: 0.85, 64: 0.80}  # AMD EPYC, torch 2.13.0, transformers 5.23.0, 2026-11-25
    assert verdict("cpu-bf16-memory", max(shares.values())) is REFUTED
    assert verdict("cpu-bf16-memory", shares[64]) is HOLDS


# ---- layouts


class Linear(torch.nn.Module):
    """A model with one weight that records in `seen` the labels that it gets."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(1)), []

    def forward(self, labels):
        self.seen += labels.tolist()
        return SimpleNamespace(loss=(self.weight * labels).mean())


def seen_by(rank, ranks, micro):
    model = Linear()
    alone = lesson(dist=SimpleNamespace(get_rank=lambda: rank))
    alone.scope["torch"] = SimpleNamespace(**vars(torch) | {"nn": SimpleNamespace(parallel=SimpleNamespace())})
    alone.scope["torch"].nn.parallel.DistributedDataParallel = lambda model: model
    mean = alone.an_update(model, {"labels": torch.arange(1.0, 161)}, ranks, micro)()
    return model.seen, mean


def test_ranks_share_an_update_s_samples_and_take_each_once():
    (first, one), (second, other) = (seen_by(rank, 2, 4) for rank in range(2))
    assert sorted(first + second) == list(range(1, 17)), "the same global batch as one process"
    assert (one + other) / 2 == seen_by(0, 1, 8)[1] == 8.5
    assert sorted(seen_by(0, 1, 2)[0]) == list(range(1, 17))


def both(**seconds):
    """Return the reports of two ranks, which are equal: {"turns": {name of a timed function: its times}}.

    `seconds`: {name of a timed function: (wall-clock, CPU seconds)}; a report lists it seven times.
    """
    return [{"turns": {name: [clocks] * 7 for name, clocks in seconds.items()}}] * 2


@pytest.mark.parametrize(("two", "expected"), [(0.55, HOLDS), (1.0, TOO_SMALL), (1.2, REFUTED)])
def test_two_processes_are_compared_by_the_wall_and_the_right_way_round(two, expected):
    ratio = lesson(both=both(alone=(1.0, 1.0), together=(two, two))).faster("together", "alone")
    assert verdict("many-cpus", ratio) is expected


@pytest.mark.parametrize(("spun", "expected"), [(1.9, HOLDS), (1.0, TOO_SMALL), (0.7, REFUTED)])
def test_threads_that_spin_show_in_the_cpu_seconds_of_both_ranks_and_not_by_the_wall(spun, expected):
    turns = lesson(both=both(crowded=(1.0, spun), shared=(1.0, 1.0)))
    assert turns.seconds("crowded", 1)[0] == 2 * spun, "both ranks"
    cpu, wall = (
        [a / b for a, b in zip(*map(turns.seconds, ("crowded", "shared"), (clock,) * 2), strict=True)]
        for clock in (1, 0)
    )
    assert verdict("oversubscription", Ratio.of_pairs(cpu, 1.05)) is expected
    assert verdict("oversubscription", Ratio.of_pairs(wall, 1.05)) is TOO_SMALL


@pytest.mark.parametrize(("fewer", "expected"), [(2.0, REFUTED), (0.9, HOLDS)])
def test_a_thread_that_is_missing_shows(fewer, expected):
    ratio = lesson(both=both(fewer=(fewer, 1.0), all=(1.0, 2.0))).faster("fewer", "all")
    assert verdict("threads-minus-one", ratio) is expected


@pytest.mark.parametrize(("threads", "expected"), [([1, 1], HOLDS), ([3, 3], REFUTED)])
def test_threads_that_the_environment_sets_are_not_torchruns(threads, expected):
    assert verdict("torchrun-threads", max(threads)) is expected
