"""The decision tree over layouts: the memory of each layout equals the estimate, its communicated bytes equal those of
ring algorithms, and each branch of the tree is taken.
"""

import sys

import pytest

from trainmem.advise import parallelism
from trainmem.cards import CONTEXT_BYTES
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate

SMALL = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000}
TASK = Task(
    "llama-3-8b", seq_len=32, config=SMALL | {"num_attention_heads": 4, "num_key_value_heads": 4, "dtype": "float32"}
)
LARGE = Task("llama-3-8b", seq_len=512, config={"num_hidden_layers": 4, "dtype": "float32"})  # 2 billion parameters
RECIPE = {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True}
EIGHT = {"cards": 8, "card_bytes": "24GB"}
NODE = {"cards": 8, "card": "h100"}


def by_name(answer):
    return {layout.name: layout for layout in answer.layouts}


@pytest.fixture(scope="module")
def small():
    return parallelism(TASK, cards=4, card_bytes="4GB", per_device_train_batch_size=4)


QUESTIONS = {
    "roomy": {"cards": 8, "card_bytes": "80GB"},
    "one host": EIGHT,
    "slow link": EIGHT | {"slow_link": True},
    "hosts": EIGHT | {"hosts": 2},
    "slow link between hosts": EIGHT | {"hosts": 2, "slow_link": True},
    "layer": {"cards": 8, "card_bytes": "3GB"},
    "hopeless": {"cards": 2, "card_bytes": "16GB"},
    "one card": {"cards": 1, "card_bytes": "80GB"},
}


class Answers(dict):
    """Hold {name in `QUESTIONS`: the answer of `parallelism`}; each question is asked when its name is first used.

    The model has 2 billion parameters; its weights, gradients and optimizer states take 31 GB.
    """

    def __missing__(self, name):
        return self.setdefault(name, parallelism(LARGE, **QUESTIONS[name], **RECIPE))


@pytest.fixture(scope="module")
def large():
    return Answers()


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
def test_bytes_are_the_estimates(name, more):
    arguments = {"per_device_train_batch_size": 4, "bf16": True}
    found = by_name(parallelism(TASK, cards=4, card="a100", **arguments))[name]
    traced = estimate(TASK, processes=4, device="cuda", compute_capability=(8, 0), **arguments, **more)
    assert found.bytes_a_rank == traced.needed_bytes(CONTEXT_BYTES)


@pytest.mark.nightly
def test_a_model_that_accelerate_cannot_shard_is_left_out_with_the_reason():
    bert = Task("bert-tiny", seq_len=32)  # its embeddings are a block of their own: they would be sharded twice
    answer = parallelism(bert, cards=2, card_bytes="4GB")
    assert answer.choice == "DDP" and "FSDP" not in by_name(answer)
    assert any(note.startswith("FSDP was left out: bert-tiny failed while it was traced") for note in answer.notes)


# ---- messages


@pytest.mark.nightly
def test_a_rank_sends_what_rings_send(small):
    layouts, weights = by_name(small), 4 * TASK.parameters()
    assert layouts["DDP"].bytes_a_step == pytest.approx(2 * 3 / 4 * weights, rel=0.01)
    assert layouts["FSDP"].bytes_a_step == pytest.approx(3 * 3 / 4 * weights, rel=0.01)
    assert layouts["FSDP, gathered once"].bytes_a_step == pytest.approx(2 * 3 / 4 * weights, rel=0.01)


def sent(**arguments):
    answer = parallelism(TASK, cards=4, card_bytes="4GB", per_device_train_batch_size=4, **arguments)
    return {name: layout.bytes_a_step for name, layout in by_name(answer).items()}


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
    if reason := optional_packages.offer("deepspeed"):
        pytest.skip(reason)
    stages, three = sent(sharding="deepspeed"), sent(sharding="deepspeed", gradient_accumulation_steps=3)
    weights = 3 / 4 * 4 * TASK.parameters()
    assert [stages[f"ZeRO {n}"] / weights for n in (1, 2, 3)] == pytest.approx([2, 2, 3], rel=0.01)
    assert [three[f"ZeRO {n}"] / weights for n in (1, 2, 3)] == pytest.approx([2, 4, 9], rel=0.01)


def test_deepspeed_that_is_not_here_is_required(monkeypatch):
    monkeypatch.setattr(optional_packages, "missing", lambda package: f"needs {package} (make build/{package})")
    with pytest.raises(ValueError, match=r"^sharding='deepspeed': needs deepspeed \(make build/deepspeed\)"):
        sent(sharding="deepspeed")


@pytest.mark.nightly
def test_one_host_sends_nothing_to_others(large):
    assert all(layout.bytes_between_hosts == 0 for layout in large["one host"].layouts)
    across = by_name(large["hosts"])
    assert across["DDP"].bytes_between_hosts == across["DDP"].bytes_a_step
    hybrid, shared = across["HSDP"], across["FSDP"]
    assert 0 < hybrid.bytes_between_hosts < shared.bytes_between_hosts / 4 < hybrid.bytes_a_step


# ---- the tree


@pytest.mark.nightly
def test_what_fits_one_card_is_replicated(large, small):
    assert small.choice == "DDP", "though in bf16 shards would send less"
    assert large["roomy"].branch == "a replica fits each card" and large["roomy"].choice == "DDP"
    assert large["one card"].choice == "one card" and large["one card"].bytes_a_step == 0


@pytest.mark.nightly
def test_if_replicas_do_not_fit_the_model_is_sharded(large):
    assert large["one host"].choice == "FSDP"


@pytest.mark.nightly
def test_the_simplest_that_fits_comes_first_and_over_a_slow_link_what_sends_least(large):
    assert large["slow link"].choice == "FSDP, gathered once"
    assert large["hosts"].choice == "FSDP"
    assert large["slow link between hosts"].choice == "HSDP"
    for answer in large.values():
        fitting = [layout for layout in answer.layouts if layout.fits]
        assert [*answer.layouts[: len(fitting)]] == fitting
        assert all(layout.bytes_a_rank <= 0.95 * answer.card_bytes for layout in fitting), "a margin is kept"


@pytest.mark.nightly
def test_if_the_largest_layer_is_too_large_layers_are_to_be_split(large):
    answer = large["layer"]
    assert (answer.branch, answer.choice) == ("the largest layer and its activations do not fit a card", "nothing fits")
    assert all(words in answer.why for words in ("tensor parallelism", "embed_tokens"))
    smallest = answer.layouts[0]
    assert 0.95 * answer.card_bytes < smallest.undivided_bytes < smallest.estimate.peak_bytes


@pytest.mark.nightly
def test_if_nothing_fits_the_smallest_is_named_and_what_helps(large):
    answer = large["hopeless"]
    assert answer.choice == "nothing fits" and answer.bytes_a_rank == min(x.bytes_a_rank for x in answer.layouts)
    assert answer.branch == "shards on so many cards do not fit a card"
    assert all(words in answer.why for words in ("too much", "more cards", "offload"))


@pytest.mark.nightly
def test_more_cards_divide_all_but_what_is_listed(large):
    """With FSDP on 2 and on 8 cards, `undivided_bytes` is the same; only the rest of the peak depends on the number of
    cards.
    """
    few, many = (by_name(large[name])["FSDP"] for name in ("hopeless", "one host"))
    assert few.undivided_bytes == pytest.approx(many.undivided_bytes, rel=0.05)
    assert many.estimate.peak_bytes > many.undivided_bytes


@pytest.mark.nightly
def test_it_shows_itself(small):
    assert "DDP" in repr(small) and small._repr_html_().count("<tr>") == 1 + len(small.layouts)
    assert any("measure" in note for note in small.notes)


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
        # PyTorch's blog "Maximizing training throughput using PyTorch FSDP" trains 70B on 128 A100 by FSDP with
        # checkpointing; torchtitan on 256 H100, by FSDP too.
        (
            "70B on 64 x 80 GB",
            Task("llama-3-70b", seq_len=4096),
            {"cards": 64, "hosts": 8, "card": "h100"} | WHOLE,
            "FSDP, checkpointing",
        ),
    ],
)
def test_practitioners_would_do_the_same(name, task, question, choice):
    answer = parallelism(task, **question)
    assert answer.choice == choice, f"{name}: {answer!r}"


@pytest.mark.nightly
def test_stacked_experts_are_not_divided_by_more_ranks_than_there_are_experts():
    """FSDP2 shards the first dimension of a tensor. In stacked experts, the size of this dimension is the number of
    experts. If there are more ranks than experts, torchtitan uses expert parallelism.
    """
    experts = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2000}
    task = Task("mixtral", seq_len=32, config=experts | {"num_attention_heads": 8, "num_key_value_heads": 8})
    few, many = (parallelism(task, cards=cards, card="h100") for cards in (8, 32))
    assert not any("Expert parallelism" in note for note in few.notes)
    assert any("Expert parallelism" in note for note in many.notes)
    weights = [by_name(answer)["FSDP"].estimate.memory.breakdown["weights"] for answer in (few, many)]
    assert weights[1] > weights[0] / 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cards": 0}, "cards=0"),
        ({"cards": 6, "hosts": 4}, "cards=6 .*hosts=4: give"),
        ({"slow_link": 64}, "slow_link=64"),
        ({"card_bytes": "80 apples"}, "card_bytes"),
        ({"card_bytes": None}, "card_bytes=None"),
        ({"card": "h1000"}, "Did you mean 'h100'"),
        ({"sharding": "zero"}, "choose 'fsdp' or 'deepspeed'"),
        ({"fsdp": True}, "leave it out"),
        ({"per_device_batch": 4}, "per_device"),
    ],
)
def test_a_mistake_is_reported(wrong, words):
    with pytest.raises(ValueError, match=words):
        parallelism(TASK, **{"cards": 4, "card_bytes": "4GB"} | wrong)
