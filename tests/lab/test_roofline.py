"""The matmul rate and the copy rate, calculated from simulated seconds; the gain that 16-bit matmuls promise; and a
model's FLOPs, compared with counts that share no code with `model_flops`.
"""

from dataclasses import replace

import pytest
from machines import RUN

from perf_helpers.lab import Lab, roofline
from trainmem.core.task import Task
from trainmem.measure import interleaving
from trainmem.records import Ratio
from trainmem.unknown import NeedsValues

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "dtype": "float32",
}
BERT = Task("bert-tiny", seq_len=24, config=SMALL | {"vocab_size": 500})
LLAMA = Task("llama-3-8b", seq_len=16, config=SMALL | {"vocab_size": 300, "num_key_value_heads": 2, "head_dim": 16})
GPT2 = Task("gpt2", seq_len=20, config={"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 400})
T5 = Task("t5-small", seq_len=12, config={"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16})


def real_count(task, samples, training=True):
    """Return the FLOPs that torch's counter finds in a real model of a task with plain attention.

    `samples`: the batch; `training`: with a backward pass.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = task.build_model(attn_implementation="eager"), task.batch(samples)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        loss = model(**batch).loss
        if training:
            loss.backward()
    return counter.get_total_flops()


def linear_weights(task):
    """Return {name: number of weights} of each linear layer of a task's model."""
    import torch

    layers = task.build_model(device="meta").named_modules()
    return {name: layer.weight.numel() for name, layer in layers if isinstance(layer, torch.nn.Linear)}


class TestModelFlops:
    @pytest.mark.daily(1)
    @pytest.mark.parametrize("task", [BERT, LLAMA, GPT2, T5], ids=lambda task: task.model)
    @pytest.mark.parametrize("training", [True, False])
    def test_it_is_what_a_real_model_computes(self, task, training):
        assert roofline.model_flops(task, 3, training=training) == real_count(task, 3, training) > 0

    def test_an_encoder_by_hand(self):
        weights, tokens = linear_weights(BERT), 3 * 24
        head = sum(size for name, size in weights.items() if "encoder" not in name)
        body = sum(weights.values()) - head
        assert body == 2 * (4 * 64 * 64 + 2 * 64 * 96)
        attention = 12 * 2 * 64 * 24 * tokens  # layers, width, length
        assert roofline.model_flops(BERT, 3) == 6 * body * tokens + 6 * head * 3 + attention

    def test_a_decoder_is_six_flops_a_weight_and_token_and_its_attention(self):
        weights, tokens = sum(linear_weights(LLAMA).values()), 2 * 16
        assert weights < LLAMA.parameters(), "embeddings do no products"
        assert roofline.model_flops(LLAMA, 2) == 6 * weights * tokens + 12 * 2 * 64 * 16 * tokens

    def test_the_rule_of_thumb_is_near_for_a_wide_model_with_short_sequences(self):
        wide = LLAMA.replace(seq_len=4, config={"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 64})
        assert roofline.model_flops(wide, 1) == pytest.approx(6 * wide.parameters() * 4, rel=0.02)
        assert roofline.model_flops(BERT, 1) != pytest.approx(6 * BERT.parameters() * 24, rel=0.2)

    def test_samples_count_alike_and_training_is_three_forwards(self):
        assert roofline.model_flops(BERT, 5) == 5 * roofline.model_flops(BERT)
        assert roofline.model_flops(BERT) == 3 * roofline.model_flops(BERT, training=False)

    @pytest.mark.nightly
    def test_nothing_is_computed(self):
        huge = Task("bert-large-uncased", seq_len=512)
        assert roofline.model_flops(huge, 512) > 1e14

    def test_experts_are_refused_for_they_would_not_be_counted(self):
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "vocab_size": 100}
        with pytest.raises(ValueError, match="experts"):
            roofline.model_flops(Task("mixtral-8x7b", seq_len=8, config=SMALL | experts))


class TestCeilings:
    def test_least_seconds_are_those_of_the_lower_ceiling(self):
        roof = roofline.Ceilings(100.0, 20.0, "float32", "cpu", 1)
        assert roof.ridge == 5
        assert roof.seconds(1000, 10) == 10, "by arithmetic"
        assert roof.seconds(10, 1000) == 50, "by bandwidth"
        assert roof.seconds(500, 100) == 5, "at the ridge both say the same"

    @pytest.mark.parametrize(("threads", "clock"), [(1, "cpu"), (2, "wall")])
    def test_they_are_work_by_the_fastest_try(self, monkeypatch, threads, clock):
        import torch

        walls = {"product": [4.0, 2.0, 8.0], "copy": [16.0, 32.0, 8.0]}
        planted = iter(walls.values())
        timed = []

        def in_turns(works, turns):
            timed.append(turns)
            (work,) = works
            work()
            return [[(wall, wall / 4) for wall in next(planted)]]

        monkeypatch.setattr(roofline, "in_turns", in_turns)
        monkeypatch.setattr(roofline, "SIDE", {"cpu": 8})
        monkeypatch.setattr(roofline, "_copied_bytes", lambda device: 4096)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        found, scale = roofline.ceilings("float32", "cpu"), 4 if clock == "cpu" else 1
        assert found.flops_per_second == scale * 2 * 8**3 / 2.0
        assert found.bytes_per_second == scale * 2 * 4096 / 8.0, "read and written"
        assert (found.dtype, found.device, found.threads) == ("float32", "cpu", threads)
        assert timed == [*roofline.TRIES.values()]

    def test_no_cache_holds_the_copy(self, monkeypatch, tmp_path):
        for index, size in enumerate(["48K", "2048K", "1048576K"]):
            (tmp_path / f"index{index}").mkdir()
            (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
        monkeypatch.setattr(roofline, "CACHES", tmp_path)
        memory = type("Memory", (), {"available": 2**36})
        monkeypatch.setattr(roofline.psutil, "virtual_memory", lambda: memory)
        assert roofline._copied_bytes("cpu") == 2**30
        memory.available = 2**32
        assert roofline._copied_bytes("cpu") == 2**29, "an eighth of what is free"
        memory.available = 2**20
        assert roofline._copied_bytes("cpu") == roofline.COPIED_BYTES["cpu"]

    def test_a_size_without_known_caches_is_assumed(self, monkeypatch, tmp_path):
        monkeypatch.setattr(roofline, "CACHES", tmp_path / "none")
        assert roofline._copied_bytes("cpu") == roofline.COPIED_BYTES["cpu"]

    def test_a_rehearsal_has_none(self, monkeypatch):
        monkeypatch.setattr(interleaving, "is_rehearsal", lambda: True)
        monkeypatch.setattr(roofline, "_copied_bytes", lambda device: 4096)
        with pytest.raises(NeedsValues):
            roofline.ceilings("float32", "cpu")


def of(ratio, least=0.6, most=0.75):
    return roofline.Products("bfloat16", Ratio(ratio, ratio / 1.05, ratio * 1.05), 1e11, (least, most))


class TestProducts:
    def test_a_step_gains_by_amdahls_law(self):
        low, high = of(4.0, 0.5, 0.65).step_speed
        assert low == pytest.approx(1 / (0.5 / (4 / 1.05) + 0.5 * 2))
        assert high == pytest.approx(1 / (0.65 / (4 * 1.05) + 0.35 / 2))

    @pytest.mark.parametrize("ratio", [0.01, 0.13, 0.39, 0.65, 0.95])
    def test_slow_products_do_not_let_a_step_of_products_gain(self, ratio):
        assert of(ratio, 0.95, 1.0).step_speed[1] < 1.05
        assert of(ratio).usable == (ratio > 0.2)

    def test_products_that_are_all_of_a_step_give_their_own_ratio(self):
        low, high = of(3.0, 1.0, 1.0).step_speed
        assert (low, high) == (pytest.approx(3 / 1.05), pytest.approx(3 * 1.05))
        assert of(3.0, 1.0, 1.0).half_speed == (1.0, 1.0), "what both multiply alike changes nothing"

    def test_half_precision_can_change_only_what_is_no_product(self):
        slow, quick = of(0.02).half_speed, of(8.0).half_speed
        assert 0.9 < slow[0] < 1 < slow[1] < 1.1 < quick[1] and quick[0] < slow[0]

    def test_what_was_not_measured_predicts_nothing(self):
        found = roofline.Products("bfloat16", Ratio.unknown("timed out"))
        assert found.usable and str(found) == "matmuls: not measured"
        assert [end.why for end in (*found.step_speed, *found.half_speed)] == ["timed out"] * 4

    @pytest.fixture
    def lab(self, tmp_path):
        return Lab("cpu", out=tmp_path)

    def test_rates_and_shares_come_from_the_turns(self, lab, monkeypatch):
        """The matmul rate, the ratio of bf16 to fp32 and the matmuls' share of a step must follow from the CPU seconds.

        A stub of `Lab.run` gives the seconds: 2 for the fp32 matmuls, 1 for the bf16 matmuls, 8 for a training step.
        """
        turns = [[(9.0, seconds)] * 4 for seconds in (2.0, 1.0, 2.0, 8.0)]
        monkeypatch.setattr(Lab, "run", lambda *_, **__: replace(RUN, value=turns))
        flops = 3 * 2 * (4 * 24) * 64 * (4 * 64)  # of a feed-forward layer: four samples of 24 tokens, 64 wide
        monkeypatch.setattr(roofline, "model_flops", lambda task, samples: 2 * flops)
        found = roofline.products(lab, "bfloat16", BERT, 4)
        assert found.ratio.value == 2.0 and found.flops_per_second == flops / 2
        assert found.shares == (4 / (8 + roofline.TRAINER_SECONDS), 4 / 8 * roofline.SMALL_PRODUCTS)

    def test_they_are_measured_here(self, lab):
        found = roofline.products(lab, "bfloat16", BERT, 2)
        assert found.ratio.known and found.flops_per_second > 1e8 and 0 < found.shares[0] < found.shares[1] <= 1
        assert len(lab.runs) == 3 and lab.runs[0].name == "products, bfloat16"

    def test_a_process_that_fails_and_a_rehearsal_leave_them_unknown(self, lab, monkeypatch):
        failed = roofline.products(lab, "no_such_dtype", BERT, 2)
        assert not failed.ratio.known and "no_such_dtype" in failed.ratio.low.why

        def rehearsed(*_, **__):
            raise NeedsValues("no time")

        monkeypatch.setattr(Lab, "run", rehearsed)
        assert roofline.products(lab, "bfloat16", BERT, 2).ratio.low.why == "no time"
