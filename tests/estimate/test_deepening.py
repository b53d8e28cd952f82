"""The log of a deep training from those of shallow ones: by hand, and of models that are followed both ways."""

import json
from types import SimpleNamespace

import pytest

from perf_helpers.estimate import deepening
from perf_helpers.estimate.deepening import Label, Log, deepened, shallow
from perf_helpers.lab import processes
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task
from perf_helpers.lab.tracker import Block
from perf_helpers.lab.training import Experiment


class Script:
    """A log that is written by hand."""

    def __init__(self):
        self.log = Log([], [], [])

    def born(self, operation, size=8):
        self.log.events.append(len(self.log.blocks))
        self.log.blocks.append((size, Label(operation, "", "", "")))
        return len(self.log.blocks) - 1

    def died(self, *blocks):
        self.log.events.extend(~block for block in sorted(blocks))

    def mark(self, label):
        self.log.marks.append((label, len(self.log.events)))


def in_order(log):
    """The log with deaths between which nothing is born in the order of their births."""
    events, dead, marks = [], [], {position for _, position in log.marks}
    for position, event in enumerate([*log.events, 0]):
        if event >= 0 or position in marks:
            events += sorted(dead, reverse=True)
            dead = []
        (dead if event < 0 else events).append(event)
    return Log(log.blocks, events[:-1], log.marks)


def training(
    layers,
    others=0,
    size_of=lambda layer: 64,
    scratch_of=lambda layer: 8,
    stack_of=lambda layers: 4 * layers,
    who_dies=lambda living: len(living) - 1,
):
    """One step that holds every relation of births to deaths: layers of one or two sorts, and a list of all."""
    script = Script()
    weights = [script.born("weight", 100) for _ in range(layers)] + [script.born("other") for _ in range(others)]
    script.mark("start")
    before, kept, of_middle, shown = script.born("embed"), [], [], []
    for layer in range(layers):
        kept.append(script.born("attend", size_of(layer)))
        script.died(script.born("scratch", scratch_of(layer)))
        if 0 < layer < layers - 1:
            of_middle.append(script.born("middle"))
        shown.append(script.born("shown"))
        after = script.born("project")
        script.died(before)  # the previous layer's result
        before = after
    more = [script.born("cross", 48) for _ in range(others)]
    script.died(*shown[:-1])
    script.mark("forward")
    gradients = []
    for block in [script.born("temporary") for _ in range(2)]:
        script.died(block)
    while more:
        gradients.append(script.born("gradient of other"))
        script.died(more.pop())
    while kept:
        gradients.append(script.born("gradient", 100))
        script.died(kept.pop(who_dies(kept)))
    script.mark("backward")
    states = [script.born("state", 100) for _ in weights]
    norms = [script.born("norm", 4) for _ in weights]
    script.died(script.born("stack", stack_of(layers)), *norms)
    for state in states:  # each is replaced by a new one
        script.born("new state", 100)
        script.died(state)
    script.died(*gradients, *of_middle)
    script.mark("step")
    return script.log


@pytest.mark.parametrize("depth", [{"layers": 9}, {"layers": 2}, {"layers": 3}, {"layers": 6, "others": 5}])
def test_a_deep_log_is_the_one_that_following_every_layer_gives(depth):
    logs = [training(*few.values()) for few in shallow(depth)]
    full = deepened(logs, depth)
    assert full == in_order(training(*depth.values()))
    assert next(iter(full)) == (0, 100, 1)


@pytest.mark.parametrize(
    "differently",
    [
        {"size_of": lambda layer: 8 * (layer + 1)},
        {"scratch_of": lambda layer: 8 * (layer + 1)},
        {"size_of": lambda layer: 8 * (layer == 3)},
        {"stack_of": lambda layers: 3 + layers // 4},
        {"who_dies": lambda living: len(living) // 2},
    ],
    ids=[
        "every layer has its size",
        "every layer needs its scratch",
        "a layer is another one",
        "no line",
        "the middle dies first",
    ],
)
def test_what_layers_do_not_repeat_has_no_deep_log(differently):
    depth = {"layers": 9}
    logs = [training(*few.values(), **differently) for few in shallow(depth)]
    assert deepened(logs, depth) is None


def test_trainings_with_other_phases_and_models_with_fewer_layers_have_no_deep_log():
    two, four = training(2), training(4)
    assert deepened([two, four], {"layers": 1}) is None
    four.marks.pop()
    assert deepened([two, four], {"layers": 9}) is None


def test_layers_of_two_sorts_in_turns_have_no_deep_log():
    """Which sort comes first, behind the last pair, the shallow trainings do not show."""

    def in_turns(layers, others):
        script = Script()
        for number in range(max(layers, others)):
            for operation, count in (("one", layers), ("other", others)):
                if number < count:
                    script.born(operation)
        return script.log

    depth = {"layers": 5, "others": 6}
    assert deepened([in_turns(*few.values()) for few in shallow(depth)], depth) is None


def test_a_death_that_can_be_told_in_two_ways_is_not_guessed():
    both = deepening._choices([7], {7})
    assert deepening._chosen(both, 1) == [0]
    with pytest.raises(deepening._UnclearError):
        deepening._chosen(both, 2)


def test_a_tracker_is_recorded_until_its_last_birth_or_mark():
    one, other = (Block(size, "weights", "aten.empty") for size in (3, 5))
    log = deepening.recorded(
        SimpleNamespace(
            log=[(one, 1), (other, 1), (one, -1), (other, -1)],
            operations=[(1, "setup", "", ""), (3, "forward", "", "layers.1.mlp")],
            marks=[("start", 1, 1), ("forward", 3, 2)],
            emptied=[1],
        )
    )
    assert [*log] == [(0, 3, 1), (1, 5, 1), (0, 3, -1)]
    assert [label.phase + label.module for _, label in log.blocks] == ["setup", "forwardlayers.*.mlp"]
    assert log.marks == [("start", 1), ("forward", 3)] and log.emptied == (1,)


# ---- models that are followed both ways

_WORDS = {"vocab_size": 300}
_TEXT = _WORDS | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_STACKS = _WORDS | {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
_ONE = {"num_hidden_layers": 7}
_AS_GIVEN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CHECKPOINTED = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "bf16": True}

# (model type of transformers, its fields, its depth, the recipe)
TRAININGS = {
    "foreach": ("bert", _TEXT, _ONE, {"optim": "adamw_torch"}),
    "fused": ("qwen2", _TEXT | {"num_key_value_heads": 1}, _ONE, {"optim": "adamw_torch_fused"}),
    "checkpointed": ("llama", _TEXT | {"num_key_value_heads": 1}, _ONE, _CHECKPOINTED),
    "scaled": ("gpt2", _WORDS | {"n_embd": 32, "n_head": 2}, {"n_layer": 6}, {"fp16": True, "optim": "sgd"}),
    "shared weights": ("albert", _TEXT | {"embedding_size": 16}, _ONE, {"bf16": True}),
    "half weights": ("vit", _TEXT | {"image_size": 32, "patch_size": 8}, _ONE, {"dtype": "bfloat16"}),
    "two sorts": (
        "t5",
        _WORDS | {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2},
        {"num_layers": 4, "num_decoder_layers": 5},
        {"optim": "adafactor"},
    ),
    "two sorts, fused": ("bart", _STACKS | _HEADS, {"encoder_layers": 5, "decoder_layers": 3}, {"bf16": True}),
}


def both_ways(path, depth, few, recipe, tell):
    """The deep log of a training from the shallow ones, and from following every layer."""
    from perf_helpers.estimate import cuda, prediction, trace
    from perf_helpers.estimate.device import DeviceTracker

    logs = []
    for layers in [*shallow(depth, few), depth]:
        task = Task(path, seq_len=16, config=layers)
        experiment = prediction._plain(Experiment("both", task, Arguments.of(recipe)), prediction.Device("cuda"))
        tracker = DeviceTracker((8, 0), tuple(cuda.PARTS))
        with cuda.emulated(compute_capability=(8, 0)), tracker.emulated():
            trace.follow(experiment, tracker)
        logs.append(deepening.recorded(tracker))
    return deepened(logs[:-1], depth, few), logs[-1]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_deep_log_is_that_of_every_layer_followed(name, tmp_path):
    kind, fields, depth, recipe = TRAININGS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind} | _AS_GIVEN | fields))
    few = 3 if name == "shared weights" else 2
    recipe = recipe | {"per_device_train_batch_size": 2}
    found, every = processes.call(both_ways, str(path), depth, few, recipe, timeout=300)
    assert found is not None and len(every.events) > 500
    assert found == in_order(every)
