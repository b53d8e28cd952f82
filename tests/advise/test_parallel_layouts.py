"""The decision tree over layouts: its arithmetic beside what is followed, and what speaks for which branch."""

import pytest

from perf_helpers import Task
from perf_helpers.advise import parallelism
from perf_helpers.advise.parallel_layouts import Model
from perf_helpers.estimate import estimate

SMALL = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000}
TASK = Task("bert-tiny", seq_len=32, config=SMALL | {"num_attention_heads": 4})
LARGE = Task("llama-3-8b", seq_len=512)
RECIPE = {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True}
NODE = {"cards": 8, "card": "h100"}


def by_name(answer):
    return {layout.name: layout for layout in answer.layouts}


@pytest.fixture(scope="module")
def small():
    return parallelism(TASK, cards=4, card_bytes="1GB", device="cpu", per_device_train_batch_size=4)


@pytest.fixture(scope="module")
def large():
    """The answers for a model of 8 billion parameters, by the question."""
    questions = {
        "roomy": {"cards": 8, "card_bytes": "192GB"},
        "one host": NODE,
        "slow link": NODE | {"link_gbits": 64},
        "hosts": {"cards": 32, "hosts": 4, "card": "a100-40", "link_gbits": 2},
        "layer": {"cards": 64, "hosts": 8, "card_bytes": "9GB"},
        "hopeless": {"cards": 2, "card": "a10g"},
        "one card": {"cards": 1, "card_bytes": "192GB"},
    }
    return {name: parallelism(LARGE, **question, **RECIPE) for name, question in questions.items()}


# ---- bytes


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("DDP", {}),
        ("FSDP", {"fsdp": True}),
        ("FSDP, gathered once", {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}),
    ],
)
def test_where_nothing_is_cut_the_bytes_are_the_estimates(name, more):
    asked = {"device": "cuda", "compute_capability": (8, 0), "per_device_train_batch_size": 4, "bf16": True}
    told = by_name(parallelism(TASK, cards=4, card="a100", gradient_checkpointing=False, **asked))[name]
    followed = estimate(TASK, processes=4, **asked, **more)
    assert (told.bytes_a_rank, told.source) == (followed.needed_bytes(CONTEXT_BYTES), "followed")


def test_more_ranks_than_are_followed_have_smaller_shards(monkeypatch):
    asked = {"device": "cpu", "per_device_train_batch_size": 1}
    monkeypatch.setattr(parallel_layouts, "_MOST_FOLLOWED", 4)
    told = by_name(parallelism(TASK, cards=16, card_bytes="1GB", **asked))["FSDP"].bytes_a_rank
    assert told == pytest.approx(estimate(TASK, processes=16, fsdp=True, **asked).peak_bytes, rel=0.01)


def test_what_cannot_fit_by_its_states_alone_is_not_followed(large):
    whole = [each for each in large["hopeless"].layouts if not each.is_cut]
    assert {each.source for each in whole} == {"states alone"}
    assert by_name(large["hopeless"])["FSDP"].bytes_a_rank == pytest.approx(16 * LARGE.parameters() / 2, rel=0.001)


def test_a_rank_holds_its_part_of_the_matrices_its_stages_and_its_experts():
    model, built = Model.of(TASK), TASK.build_model(device="meta")
    layers = built.bert.encoder.layer
    of_layers = sum(weight.numel() for weight in layers.parameters())
    matrices = sum(weight.numel() for weight in built.parameters() if weight.dim() > 1)
    assert (model.blocks, model.parameters) == (8, sum(weight.numel() for weight in built.parameters()))
    assert model.on_a_rank() == model.parameters
    assert model.on_a_rank(tensor=2) == pytest.approx(model.parameters - matrices / 2)
    embeddings = sum(weight.numel() for weight in built.bert.embeddings.parameters())
    assert model.on_a_rank(pipeline=4) == pytest.approx(of_layers / 4 + embeddings)
    assert model.on_a_rank(2, 4) == pytest.approx(model.on_a_rank(1, 4) * model.on_a_rank(2) / model.parameters)
    mixture = Model.of(Task("mixtral"))
    experts = 32 * 8 * 3 * 4096 * 14336  # blocks, experts, matrices of each
    assert (mixture.experts, mixture.chosen, mixture.of_experts) == (8, 2, experts)
    assert mixture.on_a_rank(expert=4) == mixture.parameters - experts * 3 / 4
    assert mixture.active == mixture.parameters - experts * 3 / 4


def test_a_tied_head_is_on_the_first_and_on_the_last_stage():
    model = Model.of(Task("gpt2"))
    assert model.before >= 50257 * 768 <= model.after
    assert model.on_a_rank(1, 1) == model.parameters == 124_439_808


@pytest.mark.parametrize("name", ["t5-small", "mixtral", "vit-base", "gpt2"])
def test_other_families_can_be_cut(name):
    model = Model.of(Task(name, config={"num_local_experts": 2, "num_hidden_layers": 4} if name == "mixtral" else {}))
    assert model.blocks >= 4 and model.width > 0
    assert model.on_a_rank(1, 1) == model.parameters > model.on_a_rank(2, 1) > model.on_a_rank(2, 2)


# ---- messages


def test_what_is_sent_is_what_rings_send(small):
    layouts, weights = by_name(small), 4 * TASK.parameters()
    assert layouts["DDP"].bytes_a_step == pytest.approx(2 * 3 / 4 * weights, rel=0.01)
    assert layouts["ZeRO 1"].bytes_a_step == layouts["ZeRO 2"].bytes_a_step == layouts["DDP"].bytes_a_step
    assert layouts["ZeRO 3"].bytes_a_step == pytest.approx(3 * 3 / 4 * weights, rel=0.01)
    passed = 4 * 32 * 256 * 4  # samples x tokens x width x bytes
    assert layouts["pipeline 4"].bytes_a_step == 2 * passed
    assert layouts["tensor 4"].bytes_a_step == 4 * 8 * passed * 2 * 3 / 4


def test_weights_are_gathered_for_every_pass_and_gradients_summed_once(small):
    passes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    told = by_name(parallelism(TASK, cards=4, card_bytes="1GB", device="cpu", **passes))
    weights = 4 * TASK.parameters()
    assert told["DDP"].bytes_a_step == by_name(small)["DDP"].bytes_a_step
    assert told["ZeRO 3"].bytes_a_step == pytest.approx((2 * 3 + 1) * 3 / 4 * weights, rel=0.01)


def test_tensor_parallelism_stays_in_a_host_and_divides_the_heads(large):
    for answer in large.values():
        for layout in answer.layouts:
            assert layout.tensor <= answer.cards // answer.hosts and 8 % layout.tensor == 0  # 8 heads of keys
            assert layout.data * layout.tensor * layout.pipeline == answer.cards


def test_one_host_sends_nothing_to_others(large):
    assert all(layout.bytes_between_hosts == 0 for layout in large["one host"].layouts)
    across = by_name(large["hosts"])
    assert across["DDP"].bytes_between_hosts == across["DDP"].bytes_a_step
    inside = across["tensor 8 x pipeline 4"]
    assert 0 < inside.bytes_between_hosts < 0.1 * inside.bytes_a_step


# ---- the tree


def test_what_fits_one_card_is_copied(large, small):
    assert small.choice == "DDP", "though stages of so small a model would send less"
    assert large["roomy"].branch == "the model fits one card" and large["roomy"].choice == "DDP"
    assert large["one card"].choice == "one card" and large["one card"].bytes_a_step == 0


def test_what_does_not_fit_is_shared_out_as_little_as_need_be(large):
    answer = large["one host"]
    assert answer.branch == "the model does not fit one card, its largest layer does"
    assert answer.choice.startswith("ZeRO") and answer.bytes_a_rank <= 80e9
    stages = [layout for name, layout in by_name(answer).items() if name.startswith("ZeRO") and layout.fits]
    assert answer.layouts[0].zero == min(layout.zero for layout in stages)
    assert "DDP is simpler and" in answer.why and "too large" in answer.why


def test_a_slow_link_makes_stages(large):
    answer = large["slow link"]
    assert "pipeline" in answer.choice and answer.bytes_a_step < large["one host"].bytes_a_step
    shared = by_name(answer)["ZeRO 2"]
    assert shared.fits and shared.seconds_a_sample > 1.5 * answer.layouts[0].seconds_a_sample


def test_many_hosts_have_stages_between_them(large):
    answer = large["hosts"]
    assert "pipeline" in answer.choice
    assert answer.layouts[0].bytes_between_hosts < 0.2 * by_name(answer)["DDP"].bytes_between_hosts


def test_where_the_largest_layer_is_too_large_layers_are_cut_through(large):
    answer = large["layer"]
    assert answer.branch == "not even the largest layer fits one card"
    assert "tensor" in answer.choice or answer.choice == "nothing fits"
    assert not by_name(answer)["ZeRO 3"].fits


def test_where_nothing_fits_the_smallest_is_told(large):
    answer = large["hopeless"]
    assert answer.choice == "nothing fits" and answer.bytes_a_rank == min(x.bytes_a_rank for x in answer.layouts)
    assert "too much" in answer.why


def test_the_fastest_that_fits_comes_first_and_equals_the_simplest(large):
    for answer in large.values():
        fitting = [layout for layout in answer.layouts if layout.fits]
        assert [*answer.layouts[: len(fitting)]] == fitting
        assert all(layout.bytes_a_rank <= answer.card_bytes for layout in fitting)
        whole = [layout for layout in fitting if layout.tensor * layout.pipeline == 1]
        for layout in whole if "the model fits" in answer.branch else fitting:
            assert layout.seconds_a_sample >= fitting[0].seconds_a_sample * 0.99


def test_it_shows_itself(small):
    assert "DDP" in repr(small) and "by the model" in repr(small)
    assert small._repr_html_().count("<tr>") == 1 + 6, "a header, and the first that fit"
    assert "not a measurement" in small.notes[1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cards": 0}, "cards=0"),
        ({"cards": 6, "hosts": 4}, "do not divide"),
        ({"link_gbits": 0}, "link_gbits=0"),
        ({"card_tflops": float("inf")}, "card_tflops"),
        ({"card_bytes": "80 apples"}, "card_bytes"),
        ({"fsdp": True}, "leave it out"),
        ({"per_device_batch": 4}, "per_device"),
    ],
)
def test_a_mistake_is_told(wrong, words):
    with pytest.raises(ValueError, match=words):
        parallelism(TASK, **{"cards": 4, "card_bytes": "1GB", "device": "cpu"} | wrong)
