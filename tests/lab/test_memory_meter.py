"""The memory that the meter counts equals an independent count: the sum of torch.profiler's events of a bare Trainer,
in a fresh subprocess.
"""

import contextlib

import pytest

from perf_helpers.lab import Lab
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment, pickled
from trainmem.measure import processes
from trainmem.records import CATEGORIES

TINY = Task("bert-tiny", seq_len=48, dataset_size=64)


def momentum(model, _):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def independent_peak(architecture, config, arguments, model_arguments, optimizer=None, length=48):
    """Return a function that trains on a CPU and counts the peak from the allocator's events, in the order of their
    times.

    It uses none of this project's code.

    Args:
        architecture: class of transformers.
        config: fields of its configuration.
        arguments: arguments of the Trainer.
        model_arguments: arguments for building the model, e.g. its attention kernel.
        optimizer: function (model, training arguments) -> optimizer; None: the Trainer's.
        length: tokens per sample.
    """

    def count(_):
        import tempfile

        import numpy as np
        import torch
        import transformers
        from datasets import Dataset
        from torch.profiler import ProfilerActivity, profile

        config_class = getattr(transformers, architecture).config_class
        ids = np.random.default_rng(1).integers(100, 1900, (64, length))
        labels = ids if "LM" in architecture or "Generation" in architecture else np.zeros(64, dtype=int)
        data = Dataset.from_dict({"input_ids": ids, "labels": labels}).with_format("torch")
        with (
            tempfile.TemporaryDirectory() as folder,
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            model = getattr(transformers, architecture)._from_config(
                config_class(**config), **({"dtype": torch.float32} | model_arguments)
            )
            trainer = transformers.Trainer(
                model,
                transformers.TrainingArguments(
                    folder,
                    max_steps=2,
                    use_cpu=True,
                    report_to="none",
                    disable_tqdm=True,
                    save_strategy="no",
                    logging_strategy="no",
                    **arguments,
                ),
                train_dataset=data,
                optimizers=(optimizer(model, None) if optimizer else None, None),
            )
            trainer.train()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    return count


BERT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 2000,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 2000}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
RECIPES = {
    "vanilla": {"per_device_train_batch_size": 8},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "checkpointing": {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
    "bf16 autocast": {"per_device_train_batch_size": 2, "bf16": True},
    "8-bit Adam": {"per_device_train_batch_size": 8, "optim": "adamw_bnb_8bit"},
    "reentrant checkpointing": {
        "per_device_train_batch_size": 8,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "fp16 autocast": {"per_device_train_batch_size": 2, "fp16": True},
    "bf16 weights": {"per_device_train_batch_size": 2, "dtype": "bfloat16"},
    "adafactor": {"per_device_train_batch_size": 8, "optim": "adafactor"},
    "for-loop AdamW": {"per_device_train_batch_size": 8, "optim": "adamw_torch"},
    "SGD with momentum": {"per_device_train_batch_size": 8},
    "eager attention": {"per_device_train_batch_size": 8, "attn_implementation": "eager"},
}


@pytest.mark.daily(2)
@pytest.mark.filterwarnings("ignore:on a CPU the Trainer ignores fp16")
@pytest.mark.parametrize("name", RECIPES)
def test_counted_peak_is_the_allocators_to_the_byte(lab, name):
    arguments = RECIPES[name]
    optimizer = momentum if "momentum" in name else None
    length = 12 if "16" in name else 48  # half precision is slow on most CPUs
    task = TINY.replace(seq_len=length)
    run = lab.train(name, task=task, optimizer=optimizer, measure=("memory",), **arguments)
    again = lab.train(name, task=task, optimizer=optimizer, measure=("memory",), **arguments)
    assert run.ok, run.message
    training = {k: v for k, v in arguments.items() if k not in ("dtype", "attn_implementation")}
    model = {k: v for k, v in arguments.items() if k in ("dtype", "attn_implementation")}
    function = independent_peak("BertForSequenceClassification", BERT, training, model, optimizer, length)
    expected = lab.run(function, "independent", measure=("none",))
    assert expected.ok, expected.message
    assert run.peak_bytes == again.peak_bytes == expected.value
    assert run.memory.breakdown == again.memory.breakdown
    assert sum(run.memory.breakdown.values()) == run.peak_bytes
    assert run.memory.breakdown["inside_operations"] >= 0


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("model", "architecture", "config"),
    [("gpt2", "GPT2LMHeadModel", GPT2), ("t5-small", "T5ForConditionalGeneration", T5)],
)
def test_other_architectures_are_counted_to_the_byte_too(lab, model, architecture, config):
    task = Task(model, seq_len=32, dataset_size=64, config=config)
    run = lab.train(model, task=task, measure=("memory",), per_device_train_batch_size=4)
    count = independent_peak(architecture, config, {"per_device_train_batch_size": 4}, {}, length=32)
    expected = lab.run(count, "independent", measure=("none",))
    assert (run.status, expected.status) == ("ok", "ok"), (run.message, expected.message)
    assert run.peak_bytes == expected.value


def own_loop(task):
    import torch

    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        model(**task.batch(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_function_of_the_users_is_counted_to_the_byte(lab):
    def count(task):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            own_loop(task)
        live = peak = 0
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    run = lab.run(own_loop, task=TINY, measure=("memory",))
    assert sum(run.memory.breakdown.values()) == run.peak_bytes
    assert run.peak_bytes == lab.run(count, task=TINY, measure=("none",)).value


def test_memory_that_no_operation_made_is_counted_inside_operations(lab):
    """Memory that the loop allocates without a torch operation must be in the peak, as part of "inside_operations".

    That category is the peak minus all that the tracker saw. The peak comes from a pass without the tracker, because
    autograd computes fewer results in place, and needs more memory, while a tracker is active.
    """

    def train(held):
        def loop(task):
            import torch

            kept = torch.UntypedStorage(held)
            weight = torch.nn.Parameter(torch.ones(64, 256))
            optimizer = torch.optim.SGD([weight])
            for _ in range(2):
                torch.nn.Identity()(weight).prod(1).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return len(kept)

        return lab.run(loop, f"holds {held}", measure=("memory",)).memory

    nothing, much = train(0), train(1_000_000)
    assert much.peak_bytes - nothing.peak_bytes == 1_000_000
    assert much.breakdown["inside_operations"] - nothing.breakdown["inside_operations"] == 1_000_000


@pytest.mark.daily(1)
@pytest.mark.parametrize("workers", [0, 1])  # with one it is counted by tensors
def test_an_operation_that_fails_on_the_way_disturbs_no_count(lab, workers):
    def train(fails):
        def loop(task):
            import torch

            model = task.build_model()
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(2):
                loss = model(**task.batch(2)).loss
                with contextlib.suppress(RuntimeError):
                    torch.dot(torch.ones(3), torch.ones(2 if fails else 3))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        experiment = Experiment("loop", TINY, Arguments.of({"dataloader_num_workers": workers}), pickled(loop))
        return processes.account(experiment).memory

    plain, failing = train(False), train(True)
    assert (failing.peak_bytes, failing.breakdown) == (plain.peak_bytes, plain.breakdown)
    assert (failing.phases, failing.peak_operation) == (plain.phases, plain.peak_operation)
    assert len(failing.timeline["phase"]) == len(plain.timeline["phase"])


def test_categories_are_what_arithmetic_says(lab):
    run = lab.train("vanilla", task=TINY, measure=("memory",), per_device_train_batch_size=2)
    parameters = TINY.parameters()
    tensors = sum(1 for _ in TINY.build_model(device="meta").parameters())
    after_backward, after_step = (run.memory.phase_breakdowns[phase] for phase in ("backward", "step"))
    buffers = sum(b.numel() * b.element_size() for b in TINY.build_model().buffers())
    assert run.memory.parameters == parameters
    assert after_step["weights"] == 4 * parameters + buffers
    assert after_backward["gradients"] == after_step["gradients"] == 4 * parameters
    assert after_step["optimizer_states"] == 8 * parameters + 4 * tensors  # two moments, and a step counter each
    assert after_backward["activations"] < 1000
    assert run.memory.phases["step"] == sum(after_step.values())


def test_autocast_holds_copies_of_the_weights_that_it_casts(lab):
    run = lab.train(
        "bf16", task=TINY.replace(seq_len=12), measure=("memory",), per_device_train_batch_size=2, bf16=True
    )
    linear = sum(
        p.numel() for n, p in TINY.build_model(device="meta").named_parameters() if p.ndim == 2 and "embedding" not in n
    )
    forward = run.memory.phase_breakdowns["forward"]
    assert forward["weight_copies"] >= 2 * linear
    assert run.memory.phase_breakdowns["step"]["weight_copies"] == 0


def test_the_timeline_has_the_peak_and_the_phases_in_order(lab):
    run = lab.train("vanilla", task=TINY, measure=("memory",), per_device_train_batch_size=8)
    series = run.memory.timeline
    totals = [sum(series[category][i] for category in CATEGORIES) for i in range(len(series["phase"]))]
    # The second pass, which follows every tensor, itself takes some bytes for the time of an operation.
    assert run.peak_bytes <= max(totals) < run.peak_bytes + 100
    order = [phase for i, phase in enumerate(series["phase"]) if i == 0 or series["phase"][i - 1] != phase]
    assert order == ["forward", "backward", "step"]


@pytest.mark.nightly
def test_checkpointing_moves_the_peak_of_the_activations(lab):
    plain = lab.train("plain", measure=("memory",), per_device_train_batch_size=4)
    checkpointed = lab.train("ckpt", measure=("memory",), per_device_train_batch_size=4, gradient_checkpointing=True)
    assert checkpointed.memory.breakdown["activations"] < 0.5 * plain.memory.breakdown["activations"]


def test_memory_takes_two_steps_however_long_the_training_is(lab):
    short = lab.train("short", task=TINY, measure=("memory",), per_device_train_batch_size=8)
    long = lab.train("long", task=TINY, measure=("memory",), per_device_train_batch_size=8, num_train_epochs=100)
    assert short.peak_bytes == long.peak_bytes


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_an_operation_is_reported_with_its_module(lab, reentrant):
    """An operation in backward is reported with the module whose forward pass made its autograd node; while a
    checkpoint repeats a forward pass, an operation is reported with the repeated module.
    """

    def train(_):
        import torch
        from torch.utils.checkpoint import checkpoint

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(64, 256)
                self.second = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 8))

            def forward(self, x):
                x = self.first(x)
                return self.second(x) if reentrant is None else checkpoint(self.second, x, use_reentrant=reentrant)

        model = Model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    series = lab.run(train, measure="memory").memory.timeline
    reported = {name: set() for name in ("forward", "backward")}
    for phase, operation, module in zip(series["phase"], series["operation"], series["module"], strict=True):
        if phase in reported and operation in ("aten.addmm.default", "aten.mm.default"):
            reported[phase].add((operation.split(".")[1], module))
    layers = "first", "second.0", "second.1"
    assert reported["forward"] == {("addmm", layer) for layer in layers}
    again = {None: (), False: layers[1:2], True: layers[1:]}[reentrant]  # the newer way stops where it has all it needs
    assert reported["backward"] == {("mm", layer) for layer in layers} | {("addmm", layer) for layer in again}


@pytest.mark.nightly
@pytest.mark.parametrize(("compiling_steps", "is_whole"), [(3, True), (None, False)])
def test_only_a_meter_that_knows_of_compiled_code_leaves_a_model_whole(lab, compiling_steps, is_whole):
    def graphs(task):
        import torch

        from trainmem.measure import memory_meter

        captured = []

        def backend(graph, inputs):
            captured.append(graph)
            return graph.forward

        model, batch = task.build_model(), task.batch(2)
        compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.01)
        with memory_meter.MemoryMeter(compiling_steps=compiling_steps) as watching:
            for _ in range(4):
                compiled(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [len(captured), watching.result().peak_bytes]

    count, peak = lab.run(graphs, task=TINY, measure=("none",)).value
    assert (count <= 2) == is_whole, "one graph, and one more once the model has completed its configuration"
    assert count and peak > 0


@pytest.mark.nightly
def test_a_compiled_training_is_measured_compiled_and_without_a_breakdown(lab):
    plain = lab.train("plain", task=TINY, measure="memory", per_device_train_batch_size=4)
    noted = lab.train(
        "noted", task=TINY, measure="memory", per_device_train_batch_size=4, torch_compile_backend="eager"
    )
    assert noted.ok, noted.message  # this backend notes the graph and runs it as it was: nothing is saved
    assert noted.memory.breakdown is None and noted.memory.kind == "counted"
    assert noted.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.002)
    assert noted.memory.parameters == plain.memory.parameters


@pytest.mark.nightly
def test_batches_that_workers_have_ready_are_not_counted_so_that_each_run_counts_the_same():
    given = {"task": TINY, "per_device_train_batch_size": 4, "measure": ("memory",)}
    plain = Lab("cpu").train("plain", **given).memory
    fed = [Lab("cpu").train("fed", dataloader_num_workers=2, **given).memory for _ in range(3)]
    assert len({memory.peak_bytes for memory in fed}) == 1
    batch = plain.breakdown["inputs"] - fed[0].breakdown["inputs"]
    assert batch > 0 and fed[0].peak_bytes == plain.peak_bytes - batch
    assert {**fed[0].breakdown, "inputs": 0} == {**plain.breakdown, "inputs": 0}
