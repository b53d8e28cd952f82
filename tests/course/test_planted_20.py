"""Plant faults in lesson 20's measurements: the verdict must change."""

import ast
import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted import verdict
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from perf_helpers.course.ledger import Verdict
from trainmem.records import Ratio

HOLDS, REFUTED = Verdict.HOLDS, Verdict.REFUTED
SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "20_inference.py"
HEADS = dict(num_attention_heads=8, num_key_value_heads=2)
CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=512, pad_token_id=0, **HEADS
)
CONFIG.eos_token_id = None


@pytest.fixture
def lesson():
    torch.manual_seed(0)
    wanted = {
        "text",
        "cache_of",
        "cache_bytes",
        "write",
        "scale_bytes",
        "four_bit_bytes",
        "padded",
        "changed",
        "graphs",
        "two_bits",
    }
    wanted |= {"sentence_losses", "lost", "faster", "predicted_ratio"}
    taken = [node for node in ast.parse(SOURCE.read_text("utf-8")).body if getattr(node, "name", None) in wanted]
    assert {node.name for node in taken} == wanted
    scope = {"torch": torch, "model": LlamaForCausalLM(CONFIG).eval(), "copy": copy, "math": math, "counters": counters}
    scope |= {"Ratio": Ratio, "CPU": 1, "FLOOR": 1.1}
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    return SimpleNamespace(scope=scope, **{name: scope[name] for name in (*wanted, "model")})


@pytest.mark.parametrize(("heads", "expected"), [(2, HOLDS), (8, REFUTED)])
def test_a_cache_that_kept_every_query_head_would_not_fit_the_formula(lesson, heads, expected):
    cache = lesson.cache_of(lesson.write(lesson.model, lesson.text(1, 8, 0), new=5))
    for layer in cache.layers:
        layer.keys, layer.values = (one.repeat_interleave(heads // 2, 1) for one in (layer.keys, layer.values))
    assert verdict("cache-bytes", lesson.cache_bytes(cache) / (2 * 2 * 2 * 16 * 4 * 12)) is expected


@pytest.mark.parametrize(("room", "expected"), [(0, REFUTED), (40, HOLDS)])
def test_a_static_cache_with_room_left_unused_is_larger(lesson, room, expected):
    prompt = lesson.text(1, 8, 0)
    small = lesson.cache_of(lesson.write(lesson.model, prompt, new=5))
    options = {"cache_implementation": "static"}
    large = lesson.cache_of(lesson.write(lesson.model, prompt, new=5 + room, **options))
    assert verdict("static-cache-high", lesson.cache_bytes(large) / lesson.cache_bytes(small)) is expected


@pytest.mark.parametrize(("scale", "expected"), [(torch.float32, REFUTED), (None, HOLDS)])
def test_scales_that_are_not_counted_would_make_it_four_bits(lesson, scale, expected):
    absmax = torch.zeros(64 if scale else 0)
    state = SimpleNamespace(absmax=absmax, nested=False, shape=torch.Size([64, 64]))
    weight = SimpleNamespace(nbytes=2048, quant_state=state)
    linear = type("Linear4bit", (), {"weight": weight})()
    packed, scales, count = lesson.four_bit_bytes(SimpleNamespace(modules=lambda: [linear]))
    assert verdict("nf4-bits", (packed + scales) / (2 * count)) is expected
    assert verdict("footprint-tells", packed / (packed + scales)) is expected


@pytest.mark.nightly
@pytest.mark.parametrize(("forgets", "expected"), [(False, HOLDS), (True, REFUTED)])
def test_sides_that_are_one_and_the_same_say_nothing(lesson, forgets, expected):
    prompts = [lesson.text(1, 5 + number, number)[0] for number in range(6)]
    if forgets:
        padded = lesson.padded
        lesson.scope["padded"] = lambda prompts, side: padded(prompts, "left")
    apart = {side: lesson.changed(side, prompts) for side in ("left", "right")}
    assert verdict("padding-side", (apart["right"] - apart["left"]) / 6) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where it is compiled")
@pytest.mark.parametrize(("allowed", "expected"), [(False, REFUTED), (True, HOLDS)])
def test_a_device_that_is_allowed_compiles(lesson, allowed, expected):
    lesson.scope["prompt"] = lesson.text(1, 8, 0)
    everywhere = CompileConfig(backend="eager")
    everywhere._compile_all_devices = True
    options = {"compile_config": everywhere} if allowed else {}
    assert verdict("static-cache-compiles", lesson.graphs(cache_implementation="static", **options)) is expected


@pytest.fixture
def learnt(lesson):
    """Train the model of lesson 20 for 60 steps, and return the fixture `lesson` (the lesson's functions)."""
    optimizer = torch.optim.AdamW(lesson.model.parameters(), lr=4e-3)
    for seed in range(60):
        batch = lesson.text(16, 32, seed)
        lesson.model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lesson


@pytest.mark.nightly
@pytest.mark.parametrize("id", ["quantized-error", "nf4-error"])
def test_two_bits_are_seen_to_harm_and_a_copy_is_not(learnt, id):
    rows = learnt.text(64, 32, 10**6)
    whole = learnt.sentence_losses(learnt.model, rows)
    same, coarse = (
        learnt.sentence_losses(one, rows) for one in (copy.deepcopy(learnt.model), learnt.two_bits(learnt.model))
    )
    assert verdict(id, learnt.lost(whole, same)) is HOLDS
    assert verdict(id, learnt.lost(whole, coarse)) is REFUTED


def turns(**seconds):
    return {name.replace("_", ", "): [(each, each)] * 6 for name, each in seconds.items()}


@pytest.mark.parametrize(("share", "expected"), [(16, REFUTED), (1, HOLDS)])
def test_answers_that_are_not_counted_make_a_batch_look_slow(lesson, share, expected):
    lesson.scope["taken"] = turns(one=1.0, sixteen=2.3, again=1.0)
    assert verdict("batching-throughput", lesson.faster("one", "sixteen", "again", share)) is expected


@pytest.mark.parametrize("id", ["quantized-faster", "int8-faster"])
def test_an_inverted_ratio_turns_the_verdict_and_leaves_the_predicted_range(lesson, id):
    lesson.scope["taken"] = turns(half=1.0, quick=0.5, again=1.0, quick_again=0.5)
    lesson.scope |= {"step": {"bf16, 1": 10.0}, "rest": 2.0, "matrix": {"quick": 3.0}}
    right, wrong = lesson.faster("half", "quick", "again"), lesson.faster("quick", "half", "quick, again")
    assert verdict(id, right) is HOLDS and verdict(id, wrong) is REFUTED
    low, high = lesson.predicted_ratio("quick")
    assert low < right.value < high and not low < wrong.value < high
