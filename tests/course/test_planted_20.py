"""Lesson 20's measurements with something wrong planted: the verdict must turn."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perf_helpers.course.ledger import Verdict, decide, load

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
    wanted = {"text", "cache_bytes", "write", "scale_bytes", "four_bit_bytes", "padded", "changed"}
    taken = [node for node in ast.parse(SOURCE.read_text("utf-8")).body if getattr(node, "name", None) in wanted]
    assert {node.name for node in taken} == wanted
    scope = {"torch": torch, "model": LlamaForCausalLM(CONFIG).eval()}
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    return SimpleNamespace(scope=scope, **{name: scope[name] for name in (*wanted, "model")})


def verdict(id, value):
    return decide(load()[id], value, True)


@pytest.mark.parametrize(("heads", "expected"), [(2, HOLDS), (8, REFUTED)])
def test_a_cache_that_kept_every_query_head_would_not_fit_the_formula(lesson, heads, expected):
    cache = lesson.write(lesson.model, lesson.text(1, 8, 0), new=5).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = (one.repeat_interleave(heads // 2, 1) for one in (layer.keys, layer.values))
    assert verdict("cache-bytes", lesson.cache_bytes(cache) / (2 * 2 * 2 * 16 * 4 * 12)) is expected


@pytest.mark.parametrize(("room", "expected"), [(0, REFUTED), (40, HOLDS)])
def test_a_static_cache_with_room_left_unused_is_larger(lesson, room, expected):
    prompt = lesson.text(1, 8, 0)
    small = lesson.write(lesson.model, prompt, new=5).past_key_values
    options = {"cache_implementation": "static"}
    large = lesson.write(lesson.model, prompt, new=5 + room, **options).past_key_values
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


@pytest.mark.parametrize(("forgets", "expected"), [(False, HOLDS), (True, REFUTED)])
def test_sides_that_are_one_and_the_same_say_nothing(lesson, forgets, expected):
    prompts = [lesson.text(1, 5 + number, number)[0] for number in range(6)]
    if forgets:
        padded = lesson.padded
        lesson.scope["padded"] = lambda prompts, side: padded(prompts, "left")
    apart = {side: lesson.changed(side, prompts) for side in ("left", "right")}
    assert verdict("padding-side", (apart["right"] - apart["left"]) / 6) is expected
