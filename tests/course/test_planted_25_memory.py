"""Plant faults in the libraries or in lesson 25's memory measurements: the verdict must change, or the lesson must
report that it measured something else.
"""

import functools
from types import SimpleNamespace

import pytest
from lesson_25 import MEASURES, SOURCE, measured
from planted import verdict

from perf_helpers.course.ledger import Verdict
from trainmem.core import optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.training import Experiment, pickled, train
from trainmem.measure import processes

HOLDS, SMALLER, REFUTED = Verdict.HOLDS, Verdict.SMALLER, Verdict.REFUTED
FULL, TABLE, WORDS, CHECKPOINTED = MEASURES
RANKS = (FULL, TABLE)
FOUR_BITS = ("load_in_4bit", "quantization_config", "prepare_model_for_kbit_training")
SMALL = {  # by cell: the same shares of a smaller whole
    FULL: (("num_hidden_layers=4", "num_hidden_layers=2"), ("vocab_size=2000", "vocab_size=512")),
    WORDS: (("vocab_size=8000", "vocab_size=4000, num_hidden_layers=2"),),
}


# ---- faults, each planted in the clean process in which a training runs


def base_that_learns():
    import peft

    adapt = peft.get_peft_model
    peft.get_peft_model = lambda *given, **options: adapt(*given, **options).requires_grad_(True)


def base_frozen_after_a_step():
    """Freeze the base after the first step, which is too late: the optimizer has its states by then."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    base_that_learns()

    def freeze(optimizer, *_):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.requires_grad_(4 in weight.shape)

    register_optimizer_step_post_hook(freeze)


def rank_that_is_ignored():
    import peft

    class Deaf(peft.LoraConfig):
        def __post_init__(self):
            self.r = 4
            super().__post_init__()

    peft.PEFT_TYPE_TO_CONFIG_MAPPING["LORA"] = Deaf


def gradients_that_are_zeroed_and_kept():
    import torch

    base_that_learns()
    forget = torch.nn.Module.zero_grad
    torch.nn.Module.zero_grad = lambda model, set_to_none=True: forget(model, set_to_none=False)


def preparing_that_does_nothing():
    import peft

    peft.prepare_model_for_kbit_training = lambda model, *_: model


def without(*names):
    """Return a function that removes the arguments `names` from training arguments, as if a library ignored them."""

    def planted(arguments):
        return {name: value for name, value in arguments.items() if name not in names}

    return planted


def whole_states(model, args):
    """Return an AdamW that keeps its states in fp32, whatever the type of the weights, as some libraries do.

    `model`, `args`: as the Trainer passes them; `args` is not used.
    """
    import torch

    class Whole(torch.optim.AdamW):
        def _init_group(self, group, *lists):
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state |= {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}

        def step(self, closure=None):
            for group in self.param_groups:
                self._init_group(group)

    return Whole(model.parameters(), lr=1e-4)


# ---- a lab and what it measures


class Planted:
    """A lab that trains as the lesson's lab does, with a fault in some of its trainings.

    Args:
        fault: called in the fresh subprocess, before it trains.
        change: function of the training arguments that returns them as a faulty library would use them.
        optimizer: function (model, training arguments) that returns an optimizer; None: the Trainer's.
        names: names of the trainings with the fault; (): all.
    """

    def __init__(self, fault=None, change=None, optimizer=None, names=()):
        self.fault, self.change, self.optimizer, self.names = fault, change, optimizer, names

    def train(self, name, *, task, measure, **arguments):
        is_planted = not self.names or name in self.names
        effective = self.change(arguments) if self.change and is_planted else arguments
        optimizer = pickled(self.optimizer) if self.optimizer and is_planted else None
        experiment = Experiment(name, task=task, arguments=Arguments.of(effective), optimizer=optimizer)
        fault = self.fault if is_planted else None
        return trained(repr((experiment.task, effective)), fault, self.optimizer, Wrapped(experiment))


class Wrapped:
    """Wrap a value so that it does not affect a cache key: all wrapped values are equal."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


@functools.cache
def trained(key, fault, optimizer, wrapped):
    """Return the name and the measured memory (bytes) of a training with a planted fault.

    The results are cached, with all four arguments as the key; all instances of `Wrapped` are equal, so that `wrapped`
    does not count.

    Args:
        key: the task and the training arguments as text.
        fault: function that plants the fault in the fresh subprocess before it trains; None: no fault.
        optimizer: the experiment's own optimizer; None: the Trainer's.
        wrapped: a `Wrapped` around the experiment to train.
    """
    experiment = wrapped.value

    def work(_):
        import tempfile

        if fault:
            fault()
        with tempfile.TemporaryDirectory() as folder:
            train(experiment, folder, steps=2, keep_losses=False)

    planted = Experiment(experiment.name, task=experiment.task, function=pickled(work))
    outcome = processes.execute(planted.replace(arguments=Arguments.of({"use_cpu": True})), "categories")
    assert outcome.ok, outcome.message
    return SimpleNamespace(name=experiment.name, ok=True, peak_bytes=outcome.memory.peak_bytes, memory=outcome.memory)


# ---- what turns


@pytest.fixture(autouse=True)
def adapting():
    if missing := optional_packages.offer("peft"):
        pytest.skip(missing)


def found(lab, cells, replaced=()):
    return measured(lab, cells, [*replaced, *(pair for cell in cells for pair in SMALL.get(cell, ()))])


@pytest.mark.nightly
def test_without_a_fault_the_verdicts_are_the_expected_ones():
    right = found(Planted(), MEASURES)
    assert {id: verdict(id, value) for id, value in right.items()} == {
        "lora-states": HOLDS,
        "lora-memory": SMALLER,
        "lora-activations": REFUTED,
        "lora-rank": HOLDS,
        "full-16-bits": REFUTED,
        "qlora-less": REFUTED,
        "checkpointing-keeps": REFUTED,
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("id", "lab", "cells", "expected"),
    [
        ("lora-states", Planted(base_frozen_after_a_step, names=("rank 4",)), RANKS, REFUTED),
        ("lora-memory", Planted(base_that_learns, names=("rank 4", "rank 32")), RANKS, REFUTED),
        ("lora-activations", Planted(base_that_learns, names=("rank 4", "rank 32")), RANKS, HOLDS),
        ("full-16-bits", Planted(optimizer=whole_states, names=("all weights, bf16",)), (WORDS,), HOLDS),
        ("qlora-less", Planted(preparing_that_does_nothing, names=("4 bits, prepared",)), (WORDS,), HOLDS),
        ("qlora-less", Planted(change=without("dtype"), names=("bf16",)), (WORDS,), HOLDS),
        (
            "checkpointing-keeps",
            Planted(gradients_that_are_zeroed_and_kept, names=("checkpointing",)),
            (FULL, CHECKPOINTED),
            HOLDS,
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_a_library_with_a_fault_turns_the_verdict(id, lab, cells, expected):
    assert verdict(id, found(lab, cells)[id]) is expected


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("id", "call", "planted", "expected"),
    [
        ("lora-memory", '"rank 4", 4)', '"rank 4", 4, per_device_train_batch_size=2)', HOLDS),
        ("lora-rank", '"rank 32", 32)', '"rank 32", 32, peft=dict(r=32, target_modules="all-linear"))', REFUTED),
    ],
)
def test_a_comparison_of_two_things_at_once_turns_the_verdict(id, call, planted, expected):
    assert verdict(id, found(Planted(), RANKS, ((call, planted),))[id]) is expected


@pytest.mark.parametrize(
    ("lab", "cells", "line"),
    [
        (Planted(rank_that_is_ignored, names=("rank 32",)), RANKS, "the rank was ignored"),
        (Planted(change=without(*FOUR_BITS), names=("4 bits, prepared",)), (WORDS,), "a base that stayed whole"),
        (Planted(change=without("gradient_checkpointing")), (FULL, CHECKPOINTED), "nothing was checkpointed"),
    ],
)
@pytest.mark.nightly
def test_what_a_library_ignores_would_give_the_expected_verdict_and_the_lesson_stops(lab, cells, line):
    with pytest.raises(AssertionError) as stopped:
        found(lab, cells)
    last = stopped.traceback[-1]
    assert last.path == SOURCE and line in SOURCE.read_text("utf-8").splitlines()[last.lineno]
