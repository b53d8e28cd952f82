"""Plant faults in lesson 25's measurements: the verdict must change."""

import copy

import pytest
import torch
from lesson_25 import functions
from planted import verdict

from perf_helpers.course.ledger import Verdict
from trainmem.records import CPU, Ratio

HOLDS, SMALLER, REFUTED, TOO_SMALL = Verdict.HOLDS, Verdict.SMALLER, Verdict.REFUTED, Verdict.TOO_SMALL
ROWS = torch.arange(1, 33).view(2, 16)


@pytest.fixture
def lesson():
    return functions()


@pytest.fixture
def adapting(lesson):
    if lesson.missing:
        pytest.skip(lesson.missing)
    return lesson


def unfrozen(adapt):
    """Return the function `adapt` with a fault: it adds adapters, but leaves the base trainable."""

    def planted(model, *arguments):
        adapt(model, *arguments)
        return model.requires_grad_(True)

    return planted


# ---- by hand


@pytest.mark.parametrize(("planted", "expected"), [(None, HOLDS), ("rank", REFUTED), ("base", REFUTED)])
def test_a_rank_that_is_ignored_or_a_base_that_learns_is_not_ten_thousand_times_fewer(lesson, planted, expected):
    rank = 4
    if planted == "rank":
        adapter = lesson.Adapter
        lesson.scope["Adapter"] = lambda layer, rank: adapter(layer, layer.in_features)
    if planted == "base":
        lesson.scope["adapt"] = unfrozen(lesson.adapt)
    assert verdict("lora-parameters", lesson.fewer(layers=96, rank=rank)) is expected


def test_adapters_begin_as_nothing_and_are_peft_s(adapting):
    plain = adapting.llama()
    assert adapting.apart(adapting.adapt(adapting.llama(), 4), plain, ROWS) == 0
    by_hand, by_peft = (adapting.filled(build(adapting.llama(), 4)) for build in (adapting.adapt, adapting.with_peft))
    assert adapting.apart(by_hand, by_peft, ROWS) < 1e-5 < adapting.apart(by_hand, plain, ROWS)
    numbers = [sum(one.numel() for one in adapting.learning(model)) for model in (by_hand, by_peft)]
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize(("forgotten", "expected"), [(False, HOLDS), (True, REFUTED)])
def test_adapters_that_are_dropped_are_not_merged(adapting, forgotten, expected):
    model = adapting.filled(adapting.with_peft(adapting.llama()))
    again = copy.deepcopy(model)
    merged = again.unload() if forgotten else again.merge_and_unload()
    assert verdict("merged-same", adapting.apart(model, merged, ROWS)) is expected


def test_blocks_and_quantiles_are_what_keeps_the_error_low(lesson):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 100  # an outlier ruins its own block alone
    assert lesson.error(weight, 64) < lesson.error(weight, weight.numel()) / 2
    plain = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert lesson.error(plain, 64) < lesson.error(plain, 64, torch.linspace(-1, 1, 16))
    library = lesson.scope["bnb"].functional.get_4bit_type("nf4", device="cpu")
    torch.testing.assert_close(lesson.code_book(), library, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("block", "double", "expected"),
    [(64, True, HOLDS), (64, False, REFUTED), (128, True, REFUTED)],
)
def test_scales_that_stay_whole_or_larger_blocks_save_other_bits(lesson, block, double, expected, monkeypatch):
    functional = lesson.scope["bnb"].functional
    quantize = functional.quantize_4bit
    monkeypatch.setattr(
        functional, "quantize_4bit", lambda *a, **options: quantize(*a, **options | {"blocksize": block})
    )
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    saved = lesson.scale_bits(weight, False) - (lesson.scale_bits(weight, True) if double else 0.5)
    if double and block == 64:
        saved += 8 * 1024 / weight.numel()  # the code book of 256 values, which a larger weight shares out
    assert verdict("double-quantization", saved) is expected


@pytest.mark.parametrize(
    ("way", "planted", "expected"),
    [
        ("reentrant, frozen inputs", False, HOLDS),
        ("reentrant", False, REFUTED),  # inputs that need a gradient
        ("not reentrant, frozen inputs", False, REFUTED),
        ("reentrant, frozen inputs", True, REFUTED),  # embeddings that learn
    ],
)
def test_adapters_learn_where_inputs_need_gradients(lesson, way, planted, expected):
    if planted:
        adapt = lesson.adapt

        def learning_embeddings(model, rank):
            adapt(model, rank).get_input_embeddings().weight.requires_grad_(True)
            return model

        lesson.scope["adapt"] = learning_embeddings
    share, _ = lesson.with_gradient(*lesson.ways[way])
    assert verdict("checkpointing-silent", 1 - share) is expected


@pytest.mark.parametrize(("ratios", "expected"), [([1.0, 0.99, 1.01, 1.0], HOLDS), ([0.5, 0.51, 0.5, 0.49], SMALLER)])
def test_half_of_the_gain_is_not_on_par(lesson, ratios, expected):
    assert verdict("lora-quality", lesson.interval(ratios)) is expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [((3.0, 2.0), HOLDS), ((3.0, 2.95), TOO_SMALL), ((2.0, 3.0), REFUTED)]
)
def test_an_adapter_that_costs_more_than_it_saves_is_not_faster(seconds, expected):
    whole, few = ([(each, each)] * 5 for each in seconds)
    assert verdict("lora-faster", Ratio.of_turns([[whole, few, whole]], CPU, 1.1)) is expected


def test_a_step_is_timed_in_three_parts_and_trains_the_adapters_alone(lesson):
    model, spent = lesson.adapt(lesson.llama(vocab_size=512), 2), []
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    lesson.stepping(model, spent, rows=1, tokens=4)()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert len(spent) == 1 and len(spent[0]) == 3 and min(spent[0]) >= 0
    assert changed and all(name.endswith(("up", "down")) for name in changed)
