"""The decision tree over layouts: its arithmetic beside what is followed, and what speaks for which branch."""

import sys

import pytest

from perf_helpers import Task, optional_packages
from perf_helpers.advise import parallel_layouts, parallelism
from perf_helpers.advise.parallel_layouts import Model
from perf_helpers.cards import CONTEXT_BYTES
from perf_helpers.estimate import estimate

SMALL = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000}
TASK = Task(
    "llama-3-8b", seq_len=32, config=SMALL | {"num_attention_heads": 4, "num_key_value_heads": 4, "dtype": "float32"}
)
LARGE = Task("llama-3-8b", seq_len=512, config={"dtype": "float32"})
RECIPE = {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True}
NODE = {"cards": 8, "card": "h100"}


def by_name(answer):
    return {layout.name: layout for layout in answer.layouts}


@pytest.fixture(scope="module")
def small():
    return parallelism(TASK, cards=4, card_bytes="4GB", per_device_train_batch_size=4)


@pytest.fixture(scope="module")
def large():
    """The answers for a model of 8 billion parameters, by the question."""
    questions = {
        "roomy": {"cards": 8, "card_bytes": "192GB"},
        "one host": NODE,
        "slow link": NODE | {"link_gbits": 64},
        "hosts": {"cards": 32, "hosts": 4, "card": "a100-40", "link_gbits": 2},
        "layer": {"cards": 64, "hosts": 8, "card_bytes": "4GB"},
        "hopeless": {"cards": 2, "card": "a10g"},
        "one card": {"cards": 1, "card_bytes": "192GB"},
    }
    return {name: parallelism(LARGE, **question, **RECIPE) for name, question in questions.items()}


# ---- bytes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("DDP", {}),
        ("FSDP", {"fsdp": True}),
        ("FSDP, gathered once", {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}),
    ],
)
def test_where_nothing_is_cut_the_bytes_are_the_estimates(name, more):
    asked = {"per_device_train_batch_size": 4, "bf16": True}
    told = by_name(parallelism(TASK, cards=4, card="a100", **asked))[name]
    followed = estimate(TASK, processes=4, device="cuda", compute_capability=(8, 0), **asked, **more)
    assert (told.bytes_a_rank, told.source) == (followed.needed_bytes(CONTEXT_BYTES), "traced")


@pytest.mark.nightly
def test_more_ranks_than_are_followed_have_smaller_shards(monkeypatch):
    monkeypatch.setattr(parallel_layouts, "MOST_FOLLOWED", 4)
    told = by_name(parallelism(TASK, cards=16, card="h100", per_device_train_batch_size=1))["FSDP"].bytes_a_rank
    alone = estimate(TASK, device="cuda", processes=16, fsdp=True, per_device_train_batch_size=1)
    assert told == pytest.approx(alone.needed_bytes(CONTEXT_BYTES), rel=0.02)


def test_a_model_that_accelerate_cannot_shard_is_told_so():
    bert = Task("bert-tiny", seq_len=32)  # its embeddings lie in a block of their own: they would be sharded twice
    told = parallelism(bert, cards=2, card_bytes="4GB")
    assert told.choice == "DDP" and "FSDP" not in by_name(told)
    assert any(note.startswith("FSDP was left out: bert-tiny cannot be traced") for note in told.notes)


@pytest.mark.nightly
def test_what_cannot_fit_by_its_states_alone_is_not_followed(large):
    whole = [each for each in large["hopeless"].layouts if not each.is_cut]
    assert {each.source for each in whole} == {"states only"}
    assert by_name(large["hopeless"])["FSDP"].bytes_a_rank == pytest.approx(16 * LARGE.parameters() / 2, rel=0.001)


def test_a_rank_holds_its_part_of_the_matrices_its_stages_and_its_experts():
    model, built = Model.of(TASK), TASK.build_model(device="meta")
    layers = built.model.layers
    of_layers = sum(weight.numel() for weight in layers.parameters())
    matrices = sum(weight.numel() for weight in built.parameters() if weight.dim() > 1)
    assert (model.blocks, model.parameters) == (8, sum(weight.numel() for weight in built.parameters()))
    assert model.on_a_rank() == model.parameters
    assert model.on_a_rank(tensor=2) == pytest.approx(model.parameters - matrices / 2)
    head = 2000 * 256 + 256  # with the last norm
    assert model.on_a_rank(pipeline=4) == pytest.approx(of_layers / 4 + head)
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


@pytest.mark.nightly
def test_what_is_sent_is_what_rings_send(small):
    layouts, weights = by_name(small), 4 * TASK.parameters()
    assert layouts["DDP"].bytes_a_step == pytest.approx(2 * 3 / 4 * weights, rel=0.01)
    assert layouts["FSDP"].bytes_a_step == pytest.approx(3 * 3 / 4 * weights, rel=0.01)
    assert layouts["FSDP, gathered once"].bytes_a_step == pytest.approx(2 * 3 / 4 * weights, rel=0.01)
    passed = 4 * 32 * 256 * 4  # samples x tokens x width x bytes
    assert layouts["pipeline 4"].bytes_a_step == 4 * 2 * passed  # one data rank has the samples of four
    assert layouts["tensor 4"].bytes_a_step == 4 * 4 * 8 * passed * 2 * 3 / 4


def sent(**arguments):
    told = parallelism(TASK, cards=4, card_bytes="4GB", per_device_train_batch_size=4, **arguments)
    return {name: layout.bytes_a_step for name, layout in by_name(told).items()}


@pytest.mark.nightly
def test_weights_are_gathered_for_every_pass_and_gradients_summed_once(small):
    weights, three = 4 * TASK.parameters(), sent(gradient_accumulation_steps=3)
    assert three["DDP"] == by_name(small)["DDP"].bytes_a_step
    assert three["FSDP"] == pytest.approx((2 * 3 + 1) * 3 / 4 * weights, rel=0.01)


@pytest.mark.nightly
def test_what_fsdp_sends_is_half_as_wide_in_bf16_and_what_ddp_sends_is_not():
    plain, half = sent(), sent(bf16=True)
    assert half["FSDP"] == pytest.approx(plain["FSDP"] / 2, rel=0.01) and half["DDP"] == plain["DDP"]


@pytest.mark.nightly
def test_deepspeed_sums_in_its_second_stage_after_each_pass(monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])  # an offered DeepSpeed would be imported in every training after this
    if why := optional_packages.offer("deepspeed"):
        pytest.skip(why)
    stages, three = sent(sharding="deepspeed"), sent(sharding="deepspeed", gradient_accumulation_steps=3)
    weights = 3 / 4 * 4 * TASK.parameters()
    assert [stages[f"ZeRO {n}"] / weights for n in (1, 2, 3)] == pytest.approx([2, 2, 3], rel=0.01)
    assert [three[f"ZeRO {n}"] / weights for n in (1, 2, 3)] == pytest.approx([2, 4, 9], rel=0.01)


def test_deepspeed_that_is_not_here_is_asked_for(monkeypatch):
    monkeypatch.setattr(optional_packages, "missing", lambda package: f"needs {package} (make build/{package})")
    with pytest.raises(ValueError, match=r"^sharding='deepspeed': needs deepspeed \(make build/deepspeed\)"):
        sent(sharding="deepspeed")


@pytest.mark.nightly
def test_checkpointing_sums_a_fifth_time_in_each_block():
    assert sent(gradient_checkpointing=True)["tensor 4"] == 5 / 4 * sent()["tensor 4"]


@pytest.mark.nightly
def test_tensor_parallelism_stays_in_a_host_and_divides_the_heads(large):
    for answer in large.values():
        for layout in answer.layouts:
            assert layout.tensor <= answer.cards // answer.hosts and 8 % layout.tensor == 0  # 8 heads of keys
            assert layout.data * layout.tensor * layout.pipeline == answer.cards


@pytest.mark.nightly
def test_one_host_sends_nothing_to_others(large):
    assert all(layout.bytes_between_hosts == 0 for layout in large["one host"].layouts)
    across = by_name(large["hosts"])
    assert across["DDP"].bytes_between_hosts == across["DDP"].bytes_a_step
    inside, shared = across["tensor 8 x pipeline 4"], across["FSDP"]
    assert 0 < inside.bytes_between_hosts < 0.1 * inside.bytes_a_step
    assert 0 < across["HSDP"].bytes_between_hosts < shared.bytes_between_hosts / 4 < across["HSDP"].bytes_a_step


# ---- the tree


@pytest.mark.nightly
def test_what_fits_one_card_is_copied(large, small):
    assert small.choice == "DDP", "though stages of so small a model would send less"
    assert large["roomy"].branch == "the model fits one card" and large["roomy"].choice == "DDP"
    assert large["one card"].choice == "one card" and large["one card"].bytes_a_step == 0


@pytest.mark.nightly
def test_a_slow_link_makes_stages(large):
    answer = large["slow link"]
    assert "pipeline" in answer.choice and answer.bytes_a_step < large["one host"].bytes_a_step
    shared = by_name(answer)["FSDP"]
    assert shared.fits and shared.seconds_a_sample > 1.2 * answer.layouts[0].seconds_a_sample


@pytest.mark.nightly
def test_many_hosts_have_stages_between_them_where_the_link_is_slow(large):
    answer = large["hosts"]
    assert "pipeline" in answer.choice
    assert answer.layouts[0].bytes_between_hosts < 0.2 * by_name(answer)["FSDP"].bytes_between_hosts


@pytest.mark.nightly
def test_where_the_largest_layer_is_too_large_layers_are_cut_through(large):
    answer = large["layer"]
    assert answer.branch == "not even the largest layer fits one card"
    assert "tensor" in answer.choice or answer.choice == "nothing fits"
    assert not by_name(answer)["FSDP"].fits


@pytest.mark.nightly
def test_where_nothing_fits_the_smallest_is_told(large):
    answer = large["hopeless"]
    assert answer.choice == "nothing fits" and answer.bytes_a_rank == min(x.bytes_a_rank for x in answer.layouts)
    assert "too much" in answer.why


@pytest.mark.nightly
def test_the_fastest_that_fits_comes_first_and_equals_the_simplest(large):
    for answer in large.values():
        fitting = [layout for layout in answer.layouts if layout.fits]
        assert [*answer.layouts[: len(fitting)]] == fitting
        assert all(layout.bytes_a_rank <= 0.95 * answer.card_bytes for layout in fitting), "a margin is kept"
        whole = [layout for layout in fitting if not layout.is_cut]
        best = min((layout.seconds_a_sample for layout in fitting), default=0)
        for layout in whole[:1]:
            assert fitting[0].is_cut is (1.2 * best <= layout.seconds_a_sample and "does not" in answer.branch)


def test_it_shows_itself(small):
    assert "DDP" in repr(small) and "modelled" in repr(small)
    assert small._repr_html_().count("<tr>") == 1 + 6, "a header, and the first that fit"
    assert any("not a measurement" in note for note in small.notes)


# ---- what practitioners do

WHOLE = {"bf16": True, "per_device_train_batch_size": 1, "dtype": "float32"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "task", "question", "choice"),
    [
        # 16 bytes a parameter over 8 cards leave most of each free. PyTorch's FSDP tutorials and torchtitan
        # (arXiv:2410.06511, table 2: Llama 3.1 8B on 8 H100 by FSDP2 alone) take no tensor parallelism here.
        ("8B on 8 x 80 GB", Task("llama-3-8b", seq_len=4096), NODE | WHOLE, "FSDP"),
        # The states leave 8 GB a card: torchtune's full fine-tuning of 8B on cards of 24 GB checkpoints, and shards.
        (
            "8B on 8 x 24 GB",
            Task("llama-3-8b", seq_len=2048),
            {"cards": 8, "card": "4090"} | WHOLE,
            "FSDP, checkpointing",
        ),
        # 47 billion parameters are 747 GB of states: 93 GB on each of 8 cards. Full fine-tuning of Mixtral by FSDP or
        # ZeRO 3 starts at two nodes; on one, people train adapters.
        ("8 x 7B on 8 x 80 GB", Task("mixtral", seq_len=2048), NODE | WHOLE, "nothing fits"),
        # FSDP2 cuts a weight along its first dimension, and that of stacked experts has 8: rank 0 of 32 holds an eighth
        # of them, 127 GB with their states. So experts are cut, as torchtitan does with its mixtures.
        (
            "8 x 7B on 32 x 80 GB",
            Task("mixtral", seq_len=2048),
            {"cards": 32, "hosts": 4, "card": "h100", "link_gbits": 400} | WHOLE,
            "expert 4 x FSDP 32",
        ),
        # PyTorch's blog "Maximizing training throughput using PyTorch FSDP" trains 70B on 128 A100 by FSDP with
        # checkpointing; torchtitan on 256 H100, by FSDP too.
        pytest.param(
            "70B on 64 x 80 GB",
            Task("llama-3-70b", seq_len=4096),
            {"cards": 64, "hosts": 8, "card": "h100", "link_gbits": 400} | WHOLE,
            "FSDP, checkpointing",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_practitioners_would_do_the_same(name, task, question, choice):
    answer = parallelism(task, **question)
    assert answer.choice == choice, f"{name}: {answer!r}"


@pytest.mark.nightly
def test_405_billion_are_shared_out_over_fast_links_and_cut_over_slow_ones():
    """Llama 3 (arXiv:2407.21783, table 4) and torchtitan have tensor parallelism inside a host, FSDP or stages between
    hosts; the guides' tree takes stages where links are slow. An update has 512 samples, 2 million tokens: so not
    every card can have samples of its own."""
    task, recipe = Task("405b", seq_len=4096), WHOLE | {"gradient_checkpointing": True}
    asked = {"cards": 1024, "hosts": 128, "card": "h100", "card_tflops": 400, "effective_batch": 512} | recipe
    fast, slow = (parallelism(task, link_gbits=link, **asked).layouts[0] for link in (400, 25))
    assert fast.fits and fast.tensor > 1 and fast.pipeline == 1 and fast.sharing == "FSDP"
    assert slow.fits and slow.tensor == 8 and slow.pipeline > 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cards": 0}, "cards=0"),
        ({"cards": 6, "hosts": 4}, "cards=6 .*hosts=4: give"),
        ({"link_gbits": 0}, "link_gbits=0"),
        ({"card_tflops": float("inf")}, "card_tflops"),
        ({"card_bytes": "80 apples"}, "card_bytes"),
        ({"card_bytes": None}, "card_bytes=None"),
        ({"card": "h1000"}, "Did you mean 'h100'"),
        ({"sharding": "zero"}, "choose 'fsdp' or 'deepspeed'"),
        ({"effective_batch": 0}, "effective_batch=0"),
        ({"effective_batch": 3}, "effective_batch=3, .*4 cards"),
        ({"fsdp": True}, "leave it out"),
        ({"per_device_batch": 4}, "per_device"),
    ],
)
def test_a_mistake_is_told(wrong, words):
    with pytest.raises(ValueError, match=words):
        parallelism(TASK, **{"cards": 4, "card_bytes": "4GB"} | wrong)
