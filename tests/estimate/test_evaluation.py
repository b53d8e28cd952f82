"""Evaluation, saving and loading are phases with peaks of their own: the estimate equals the count to the byte."""

import sys

import cloudpickle
import pytest

from perf_helpers import Lab
from trainmem.core import evaluation, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import estimate

cloudpickle.register_pickle_by_value(sys.modules[__name__])
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
_SMALL |= {"num_key_value_heads": 2, "vocab_size": 3000, "dtype": "float32"}
BERT = Task("bert-tiny", seq_len=24, dataset_size=22, config={"hidden_size": 64, "vocab_size": 300})
LLAMA = Task("llama-2-7b", seq_len=32, dataset_size=22, config=_SMALL)
T5 = {"d_model": 64, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 96, "vocab_size": 1000}
T5 = Task("t5-small", seq_len=24, dataset_size=10, config=T5)  # its predictions are nested
MIXTURE = Task("mixtral-8x7b", seq_len=16, dataset_size=8, config=_SMALL | {"num_local_experts": 4, "vocab_size": 300})
UNEQUAL = Task("llama-2-7b", lengths=(17, 3, 9, 12, 25, 4, 8, 26, 7, 30, 31), config=_SMALL)
EVALUATED = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "eval_strategy": "steps"}
METRICS = {"prediction_loss_only": False}
SAVED = {"save_strategy": "steps"}
BEST = SAVED | {"load_best_model_at_end": True}
CASES = {
    "loss": (BERT, {}),
    "metrics": (LLAMA, METRICS),
    "accumulation": (LLAMA, METRICS | {"eval_accumulation_steps": 2}),
    "the best is loaded": (LLAMA, BEST | {"metric_for_best_model": "accuracy", "optim": "sgd"}),
    "batches": (BERT, {"batch_eval_metrics": True}),
    "lists": (LLAMA, METRICS | {"eval_do_concat_batches": False, "include_for_metrics": ["inputs"]}),
    "bf16": (LLAMA, METRICS | {"bf16": True, "eval_strategy": "epoch", "eval_delay": 9}),
    "16-bit predictions": (LLAMA.replace(config={"dtype": "bfloat16"}), METRICS | {"eval_accumulation_steps": 3}),
    "at the start": (LLAMA, {"eval_strategy": "no", "eval_on_start": True}),
    "smoothing": (LLAMA, {"label_smoothing_factor": 0.1}),
    "nested": (T5, METRICS),
    "lengths": (UNEQUAL, METRICS | {"gradient_accumulation_steps": 2}),
    "saved": (MIXTURE, SAVED | {"eval_strategy": "no"}),
    "saved and loaded": (MIXTURE, BEST),
}


def compared(task, recipe, **options):
    """Train a task, and return the counted memory, after checking that the estimate equals it.

    `recipe`: training arguments; `options`: arguments that `Lab.train` and `estimate` share, e.g. `processes`.
    """
    run = Lab().train("evaluated", task=task, measure=("memory",), **options, **recipe)
    assert run.ok, run.message
    estimated = estimate(task, device="cpu", **options, **recipe).memory
    names = ("peak_bytes", "peak_phase", "peak_operation", "peak_module", "breakdown", "phases", "phase_breakdowns")
    assert {name: getattr(estimated, name) for name in names} == {name: getattr(run.memory, name) for name in names}
    return run.memory


@pytest.mark.daily(2)
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_the_count(case):
    task, recipe = CASES[case]
    memory = compared(task, EVALUATED | recipe)
    assert ("evaluation" in memory.phases) == (case != "saved")
    assert ("saving" in memory.phases) == ("save_strategy" in recipe)
    assert ("loading" in memory.phases) == ("load_best_model_at_end" in recipe)
    for phase, size in memory.phases.items():
        assert sum(memory.phase_breakdowns[phase].values()) == size <= memory.peak_bytes


@pytest.mark.nightly
def test_adapters_are_saved_and_loaded():
    if reason := optional_packages.offer("peft"):
        pytest.skip(reason)
    memory = compared(LLAMA, EVALUATED | BEST | {"peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]}})
    assert "loading" in memory.phases


@pytest.mark.nightly
def test_metrics_keep_the_predictions_of_all_samples_and_accumulation_of_a_few():
    found = {}
    for name, more in {"loss": {}, "metrics": METRICS, "few": METRICS | {"eval_accumulation_steps": 2}}.items():
        memory = estimate(LLAMA, device="cpu", **EVALUATED, **more).memory
        found[name] = memory.phase_breakdowns["evaluation"]["predictions"]
        assert (memory.peak_phase, memory.phases["evaluation"]) == ("evaluation", memory.peak_bytes)
        assert memory.phase_breakdowns["evaluation"]["optimizer_states"] > 2 * memory.parameters * 4
    batch = 4 * 32 * 3000 * 4  # bytes: samples, tokens, vocabulary
    assert found["loss"] < 1000 and 2 * batch <= found["few"] < found["metrics"]
    assert found["metrics"] > 2 * 4 * batch  # where two tensors are joined, both and the whole are there


def test_a_step_is_what_it_is_without_an_evaluation():
    plain = estimate(LLAMA, device="cpu", per_device_train_batch_size=2).memory
    evaluated = estimate(LLAMA, device="cpu", **EVALUATED).memory
    assert {phase: evaluated.phases[phase] for phase in plain.phases} == plain.phases
    assert evaluated.peak_bytes == max(plain.peak_bytes, evaluated.phases["evaluation"])


def test_all_evaluations_and_checkpoints_of_a_training_become_one_after_the_last_step():
    given = Arguments.of(EVALUATED | BEST | {"eval_steps": 500, "eval_delay": 7, "save_steps": 1000})
    once = evaluation.once(given, 3)
    assert (once.get("eval_steps"), once.get("save_steps"), once.get("eval_delay")) == (3, 3, None)
    assert evaluation.evaluates(once) and not evaluation.evaluates(evaluation.never(once))
    plain = Arguments.of({"optim": "sgd"})
    assert evaluation.once(plain, 3) is plain and evaluation.never(plain) is plain


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, False),
        ({"prediction_loss_only": False}, True),
        ({"prediction_loss_only": True, "batch_eval_metrics": True}, False),
        ({"batch_eval_metrics": True}, True),
        ({"metric_for_best_model": "eval_loss"}, False),
        ({"metric_for_best_model": "eval_f1"}, True),
    ],
)
def test_metrics_are_computed_if_an_argument_says_so(given, kept):
    compute = evaluation.metrics(Arguments.of(given))
    assert (compute is not None) == kept
    if "metric_for_best_model" in given and kept:
        assert compute(None, compute_result=True) == {"f1": 0.0}


@pytest.mark.nightly
def test_ranks_gather_predictions():
    run = Lab().train("ranks", task=LLAMA, processes=2, measure=("memory",), **EVALUATED, **METRICS)
    assert run.ok, run.message
    estimated = estimate(LLAMA, device="cpu", processes=2, **EVALUATED, **METRICS).memory
    assert estimated.phases["evaluation"] == pytest.approx(run.memory.phases["evaluation"], rel=1e-3)


def trained(task):
    """Train a task with arguments that request an evaluation; return the number of losses. A stub makes any evaluation
    fail, so the training must skip it.
    """
    import tempfile
    from unittest.mock import patch

    from transformers import Trainer

    from trainmem.core.training import Experiment, train

    arguments = Arguments.of(EVALUATED | {"eval_strategy": "epoch"})
    with tempfile.TemporaryDirectory() as folder, patch.object(Trainer, "evaluate", side_effect=AssertionError):
        return len(train(Experiment("timed", task, arguments), folder, 2))


@pytest.mark.nightly
def test_a_timed_training_does_not_evaluate():
    assert Lab().run(trained, task=BERT, measure="none").value == 2
