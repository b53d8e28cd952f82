"""The advisor finds the largest model of an architecture, and the longest sequence, that fit. Here a formula replaces
the estimate, and tests know the right answer because they calculate the formula for every size.

Also, the advisor offers adapters only to users who allow them.
"""

import contextlib
import dataclasses
from unittest.mock import Mock

import pytest

from trainmem.advise import advice, advise, search
from trainmem.core import hardware, optional_packages
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate, depth
from trainmem.records import Memory

GB = 10**9
LLAMAS = ["smollm2-135m", "smollm2-360m", "tinyllama-1.1b", "llama-3.2-1b", "deepseek-coder-1.3b", "smollm2-1.7b"]
LLAMAS += ["llama-3.2-3b", "yi-6b", "llama-2-7b", "codellama-7b", "deepseek-llm-7b", "llama-3-8b", "llama-3.1-8b"]
LLAMAS += ["llama-2-13b", "llama-3-70b", "llama-3.1-405b"]


def needed(task, layers=None, **arguments):
    """Return the bytes of a training by a formula: a part per layer, which depends on width and tokens, and a part that
    is independent of the number of layers.

    `layers`: number of layers; None: the task's. `arguments`: the training arguments.
    """
    config = task.build_config()
    layers, width = layers or config.num_hidden_layers, config.hidden_size
    a_weight = 0.6 if "quantization_config" in arguments else 2 if arguments.get("dtype") == "bfloat16" else 4
    learning = (
        0 if "peft" in arguments else 4 + {"adamw_torch_fused": 8, "adamw_bnb_8bit": 2}.get(arguments["optim"], 0)
    )
    kept = 4 if arguments.get("gradient_checkpointing") else 60
    return round((12 * width**2 * (a_weight + learning) + kept * width * task.length()) * layers + width * 10**6)


@dataclasses.dataclass
class Line:
    task: Task
    arguments: dict
    less: float  # part of the truth that shallow models tell

    def at(self, layers):
        estimated = round(self.less * needed(self.task, layers, **self.arguments))
        return estimated, estimated

    def states_at(self, layers):
        return 0


@pytest.fixture(params=[1.0, 0.93], ids=["exact", "too low"])
def precision(request):
    return request.param


@pytest.fixture
def ask(monkeypatch, precision):
    """Return `advise`; the formula `needed` replaces both the estimate and its extrapolation to more layers."""

    def estimate(task, *, device="cuda", device_memory=None, processes=1, compute_capability=None, **arguments):
        peak = needed(task, **arguments)
        parts = {"weights": peak // 2, "gradients": 0, "optimizer_states": 0, "activations": peak - peak // 2}
        memory = Memory(peak, "estimated", breakdown=parts, phase_breakdowns={"step": parts})
        return MemoryEstimate("", {}, {}, device, memory, (), 0.0, None)

    def line(task, *, device, compute_capability, processes, **arguments):
        return Line(task, arguments, precision)

    monkeypatch.setattr("trainmem.advise.advice.estimate", estimate)
    monkeypatch.setattr(depth, "line", line)
    monkeypatch.setattr(optional_packages, "offer", lambda package: None)
    machine = hardware.Machine("a CPU", "cpu", cpu_cores=2, cpu_features=("avx2",))
    default = {"effective_batch": 1, "device": "cuda", "runs": [], "machine": machine, "margin": 0, "context_memory": 0}
    return lambda task, **options: advise(task, **default | options)


QLORA = {"bf16": False, "dtype": "bfloat16", "gradient_checkpointing": True, "optim": "adamw_torch_fused"}
QLORA |= search.known.QLORA.arguments


@pytest.mark.nightly
@pytest.mark.parametrize("memory", [12, 24, 48, 80, 2000])
def test_the_largest_model_is_the_last_that_fits(ask, memory):
    advice = ask(Task("llama-3-8b", seq_len=2048), memory=memory * GB, may=["QLoRA"], largest="model")
    fitting = [name for name in LLAMAS if needed(Task(name, seq_len=2048), **QLORA) <= memory * GB]
    assert [recipe.arguments["quantization_config"] for recipe in advice.recipes] == [QLORA["quantization_config"]]
    assert advice.task.model == fitting[-1] and "needs least" in advice.recipes[0].why_not_next
    assert advice.recipes[0].needed_bytes == needed(advice.task, **advice.recipes[0].arguments) <= memory * GB
    following = LLAMAS[len(fitting) : len(fitting) + 1]
    assert all(f"{name} needs about" in "".join(advice.notes) for name in following)


@pytest.mark.nightly
def test_the_answer_of_shallow_models_is_shown_before_all_layers_are_traced(ask, precision, monkeypatch):
    seen, estimate = [], advice.estimate
    monkeypatch.setattr(
        advice, "estimate", lambda *task, **options: seen.append("estimate") or estimate(*task, **options)
    )
    bar = Mock(set_postfix_str=seen.append)
    monkeypatch.setattr(advice.progress, "bar", lambda *_, **__: contextlib.nullcontext(bar))
    found = ask(Task("llama-3-8b", seq_len=2048), memory=24 * GB, may=["QLoRA"], largest="model").task.model
    likely = seen[0].removeprefix("so far ").removesuffix(" with 2,048 tokens")
    beyond = LLAMAS.index(likely) - LLAMAS.index(
        found
    )  # a larger one may seem to fit where shallow ones tell too little
    assert beyond == 0 if precision == 1 else beyond >= 0
    assert "estimate" in seen[1:]


@pytest.mark.parametrize("memory", [16, 24, 31, 80])
def test_the_longest_sequence_is_the_last_that_fits(ask, memory):
    advice = ask(Task("llama-3-8b", seq_len=512), memory=memory * GB, may=["qlora"], largest="sequence")
    lengths = range(64, 8193, 64)
    fitting = [n for n in lengths if needed(Task("llama-3-8b", seq_len=n), **QLORA) <= memory * GB]
    assert advice.task.seq_len == fitting[-1]
    assert ("no more positions" in "".join(advice.notes)) == (fitting[-1] == 8192)


@pytest.mark.nightly
def test_where_not_even_the_smallest_fits_it_says_by_how_much(ask):
    advice = ask(Task("llama-3-8b", seq_len=2048), memory=0.2 * GB, largest="model")
    assert advice.status == "nothing fits" and advice.task.model == LLAMAS[0]
    assert advice.smallest.needed_bytes > 0.2 * GB and "over" in repr(advice)


def test_adapters_are_offered_to_who_allows_them_and_their_costs_are_reported(ask):
    plain = ask(Task("llama-3-8b", seq_len=512), memory=400 * GB, most=99)
    assert plain.recipes and not any("peft" in recipe.arguments for recipe in plain.recipes)
    both = ask(Task("llama-3-8b", seq_len=512), memory=30 * GB, may=["lora", "QLoRA"], most=99)
    assert both.recipes and all("peft" in recipe.arguments for recipe in both.recipes)
    assert all(any("capacity" in cost for cost in recipe.costs) for recipe in both.recipes)
    assert not any("lose updates" in cost for recipe in both.recipes for cost in recipe.costs)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"may": ["LoRRA"]}, "may='LoRRA'.*Did you mean 'LoRA'"),
        ({"may": "lora"}, "may='lora': give a list"),
        ({"largest": "modell"}, "largest='modell': choose one of 'model', 'sequence'"),
    ],
)
def test_a_mistake_is_named(ask, options, hint):
    with pytest.raises(ValueError, match=hint):
        ask(Task("llama-3-8b", seq_len=512), memory=24 * GB, **options)


def test_without_peft_there_is_no_lora(ask, monkeypatch):
    monkeypatch.setattr(optional_packages, "offer", lambda package: f"needs {package} (make build/{package})")
    with pytest.raises(ValueError, match=r"may=.*needs peft"):
        ask(Task("llama-3-8b", seq_len=512), memory=24 * GB, may=["lora"])
