"""A lesson that simulates a nightly run of the course: a few tiny runs and claims in which a regression must show."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from toys import write_lesson

from perf_helpers.compare.compare import run_nightly
from perf_helpers.course import course

NAME = "05_night"
RUNS = """
from perf_helpers import Claims, Lab
from trainmem.core.task import Task

lab = Lab(profile, strict=strict, out=out, lesson="05_night")
claims = Claims(lab)
shape = {"vocab_size": 200, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
task = Task("bert-tiny", seq_len=128, dataset_size=512, config=shape)
small, whole = {"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 4}
vanilla = lab.train("vanilla", task=task, measure="memory", **whole)
accumulated = lab.train("accumulation", task=task, measure="memory", gradient_accumulation_steps=4, **small)
forgotten = lab.train("checkpointing", task=task, measure="memory", gradient_checkpointing=True, **whole)
factored = lab.train("Adafactor", task=task, measure="memory", optim="adafactor", **whole)
plain = lab.train("plain attention", task=task, measure="memory", attn_implementation="eager", **whole)
in_8_bits = lab.train("8-bit Adam", task=task, measure="memory", optim="adamw_bnb_8bit", **whole)
"""
GRADIENT = """
def lengths(task):
    import tempfile

    import torch
    from transformers import Trainer, TrainingArguments

    found = []
    for size, count in ((4, 1), (1, 4)):
        torch.manual_seed(0)
        model = task.build_model().eval()
        with tempfile.TemporaryDirectory() as folder:
            options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0, "seed": 0}
            options |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": count, "max_steps": 1}
            arguments = TrainingArguments(folder, optim="sgd", learning_rate=1.0, save_strategy="no", **options)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            Trainer(model, arguments, train_dataset=task.dataset()).train()
            moved = [(a - b).flatten() for a, b in zip(before, model.parameters())]
        found.append(torch.cat(moved).norm().item())
    return found


shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 64}
shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
decoder = Task("gpt2", seq_len=32, dataset_size=4, config=shape)
whole_length, summed_length = lab.run(lengths, task=decoder, measure="none").value
"""
CLAIMS = """
claims.check("accumulation-memory", accumulated.peak_bytes / vanilla.peak_bytes)
claims.check("accumulation-same-gradient", summed_length / whole_length)
claims.check("checkpointing-memory", forgotten.peak_bytes / vanilla.peak_bytes)
saved = [vanilla.peak_bytes - run.peak_bytes for run in (in_8_bits, factored)]
claims.check("adam8bit-memory", saved[0] / saved[1])
claims.check("sdpa-memory", vanilla.peak_bytes / plain.peak_bytes)
claims.finish()
"""


def night(folder: Path, sabotage: str = "", speeds: bool = False) -> dict:
    """Run the nightly course run on the simulated lesson and return its results, as in results.json.

    Args:
        folder: an empty folder, for the lesson and its results.
        sabotage: a fault of the libraries, see tests/sabotage; "": none.
        speeds: whether to time steps of a few recipes as well.
    """
    write_lesson(folder / "lessons", NAME, RUNS, GRADIENT, CLAIMS)
    with sabotaged(sabotage), pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "LESSONS", folder / "lessons")
        return run_nightly(folder / "out", speeds=speeds, profile="cpu", timeout_per_lesson=300)[0]


@contextlib.contextmanager
def sabotaged(way: str, slower: float = 0.0) -> Iterator[None]:
    """Plant a fault in every Python that is started inside this context.

    `way`: the fault, see tests/sabotage; `slower`: share of a training step by which "slow_step" and "sleeping_step"
    lengthen each step.
    """
    here = Path(__file__).parents[1] / "sabotage"
    changes = {"PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])}
    changes |= {"SABOTAGE": way, "SLOWER": str(slower)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setenv(name, value)
        yield
