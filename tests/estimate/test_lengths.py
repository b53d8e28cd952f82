"""The worst batch of a data set, compared with trainings on the whole data set; and messages about invalid lengths."""

import random

import pytest

from perf_helpers import Lab
from trainmem.core.task import Task
from trainmem.estimate import lengths as module
from trainmem.estimate.lengths import checked, read, worst_batch
from trainmem.estimate.memory_estimate import MemoryEstimate
from trainmem.records import Memory

SAMPLES = (*random.Random(2).choices(range(3, 61), k=22),)
BERT = Task("bert-tiny", config={"hidden_size": 32, "intermediate_size": 64, "vocab_size": 200})
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LLAMA = Task("llama-2-7b", config=SMALL | {"vocab_size": 500, "dtype": "float32"})


def measured(task, **arguments):
    run = Lab("cpu").train("all", task=task.replace(lengths=SAMPLES), measure=("memory",), **arguments)
    return run.memory.peak_bytes


@pytest.mark.daily(1)
@pytest.mark.parametrize("multiple, arguments", [(16, {"gradient_accumulation_steps": 2, "bf16": True}), (1, {})])
def test_the_worst_step_has_the_peak_of_the_epoch_to_the_byte(multiple, arguments):
    arguments |= {"per_device_train_batch_size": 4, "data_seed": 5}
    found = worst_batch(BERT, SAMPLES, pad_to_multiple_of=multiple, device="cpu", **arguments)
    assert found.estimate.peak_bytes == measured(BERT.replace(pad_to_multiple_of=multiple), **arguments)
    widest = max(length for step in found.shapes for _, length in step)
    assert (4, widest) in found.shapes[found.step] and widest == -(-max(SAMPLES) // multiple) * multiple
    assert found.padded_tokens == sum(rows * length for step in found.shapes for rows, length in step)
    assert sorted(found.order) == [*range(22)] and max(SAMPLES) in {SAMPLES[i] for i in found.order[:8]}
    assert found.packed is None, "BERT is no causal model"


@pytest.mark.nightly
@pytest.mark.parametrize("passes", [1, 2])
def test_packed_batches_too(passes):
    """For packed batches, too, the batch with the highest peak is found. With two micro-batches per step it need not be
    the batch with the most tokens, because gradients of the first micro-batch exist during the second.
    """
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": passes}
    found = worst_batch(LLAMA, SAMPLES, device="cpu", **arguments)
    assert found.packed.peak_bytes == measured(LLAMA.replace(packed=True), **arguments)
    assert found.packed.peak_bytes < found.estimate.peak_bytes
    assert f"{sum(SAMPLES):,} tokens" in repr(found)


def shapes_trained_on(task, **options):
    """Return the shapes of the token ids that a Trainer with a custom collator passes to the model in the first epoch.

    `options`: fields of `TrainingArguments`.
    """
    import tempfile

    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import Trainer, TrainingArguments

    seen = []

    def collate(rows):
        ids = [torch.zeros(length, dtype=torch.long) for length in (row["length"] for row in rows)]
        return {"input_ids": pad_sequence(ids, batch_first=True), "labels": torch.tensor([0] * len(rows))}

    class Watched(Trainer):
        def training_step(self, model, inputs, *rest, **more):
            seen.append(list(inputs["input_ids"].shape))
            return super().training_step(model, inputs, *rest, **more)

    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "num_train_epochs": 1, "seed": 0}
    quiet |= {"remove_unused_columns": False, "disable_tqdm": True}
    rows = [{"input_ids": [0] * length, "length": length} for length in SAMPLES]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, **quiet, **options)
        Watched(model=task.build_model(), args=args, train_dataset=rows, data_collator=collate).train()
    return seen


def straight(task, **options):
    """Stand in for `estimate`: return an estimate of 1 GB plus 1 MB per token of the largest batch, padding included.

    `options`: training arguments; only the micro-batch has an effect.
    """
    rows = options.get("per_device_train_batch_size", 8)
    size = 10**9 + 10**6 * max(rows * max(task.lengths[i : i + rows]) for i in range(0, len(task.lengths), rows))
    about = {"task": {}, "arguments": {}, "assumptions": (), "seconds": 0.0, "own_bytes": None}
    return MemoryEstimate("m", device="cuda", memory=Memory(size, "estimated"), compute_capability=(7, 5), **about)


def test_the_shapes_are_those_that_a_trainer_trains_on(monkeypatch):
    ways = {"data_seed": 3}, {"train_sampling_strategy": "group_by_length"}, {"dataloader_drop_last": True}
    ways = [way | {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3} for way in ways]
    run = Lab("cpu").run(lambda task: [shapes_trained_on(task, **way) for way in ways], task=BERT, measure=("none",))
    monkeypatch.setattr(module, "estimate", straight)
    for way, seen in zip(ways, run.value, strict=True):
        found = worst_batch(BERT, SAMPLES, **way)
        assert [[*shape] for step in found.shapes for shape in step] == seen
        assert len(found.shapes[0]) == 3 and len(seen) == 3 + ("dataloader_drop_last" not in way)


def test_the_largest_batch_and_length_that_fit_a_card(monkeypatch):
    monkeypatch.setattr(module, "estimate", straight)
    monkeypatch.setattr(module.processes, "call", lambda *_, **__: [[[0, 1]], [[2]]])
    found = worst_batch(BERT, [100, 50, 40], card="t4", per_device_train_batch_size=2)
    room = (found.fits.card.limit_bytes - found.fits.context_bytes - 10**9) // 10**6  # tokens of a batch
    assert found.fits.answer is True and (found.step, found.largest_batch[0]) == (0, room // 100)
    assert found.largest_length[0] == 512, "the positions of BERT"
    assert worst_batch(BERT, [100, 50, 40], card="t4", per_device_train_batch_size=100).largest_length[0] == 128
    none = worst_batch(BERT, [500] * 3, card="1650", per_device_train_batch_size=64)
    assert none.largest_batch[0] == 4 and none.largest_length[0] == 32 and none.fits.answer is False
    reported = none.to_dict()
    assert (
        reported["fits"] is False
        and reported["largest_batch"]["size"] == 4
        and "largest batch: 4; m: fits" in repr(none)
    )
    edge = worst_batch(BERT, [room // 100 + 1] * 3, card="t4", per_device_train_batch_size=100)
    assert edge.to_dict()["fits"] is None and "UNKNOWN" in repr(edge)


@pytest.mark.parametrize(
    "values, message",
    [
        ([], "give the number of tokens"),
        ([5, 0], "'0' .entry 2.*from 1 to 1,048,576"),
        ([-3], "'-3'"),
        ([float("nan")], "'nan'"),
        ([2.5], "'2.5'"),
        (["many"], "'many'"),
        ([True], "'True'"),
        ([10**30], "'10000000000000000000' .entry 1"),
        ([[], [7]], "'0' .entry 1"),
    ],
)
def test_what_is_no_length_is_named(values, message):
    with pytest.raises(ValueError, match=f"^lengths.*{message}"):
        worst_batch(BERT, values)


def test_lengths_come_from_files_columns_and_rows(tmp_path):
    import datasets
    import numpy as np

    file = tmp_path / "lengths.txt"
    file.write_text("[3, 4,\n5]\n6\t7\n")
    assert read(file) == (3, 4, 5, 6, 7)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [1]], "length": [3, 1]})
    assert checked(rows["input_ids"]) == checked(rows["length"]) == checked(np.array([3, 1])) == (3, 1)
    file.write_bytes(b"\xff\xfe\x00")
    for wrong, reason in ((file, "not text"), (tmp_path, "cannot be read"), (tmp_path / "none.txt", "cannot be read")):
        with pytest.raises(ValueError, match=reason):
            read(wrong)


def test_what_a_model_cannot_take_is_reported_before_anything_is_traced():
    with pytest.raises(ValueError, match=r"seq_len=576 .*\b512 tokens"):
        worst_batch(BERT, [513], pad_to_multiple_of=64)
    with pytest.raises(ValueError, match=r"pad_to_multiple_of=0: .*at least 1"):
        worst_batch(BERT, [5], pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="batch_rebalance"):
        worst_batch(BERT, [5], train_sampling_strategy="batch_rebalance")
