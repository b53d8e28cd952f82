"""Lesson 20's findings in libraries: these tests fail as soon as a release fixes a finding or moves its code."""

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=8, vocab_size=64)


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def test_the_memory_footprint_leaves_the_scales_of_four_bit_weights_out(model, tmp_path):
    pytest.importorskip("bitsandbytes")
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    four = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    tensors = sum(tensor.nbytes for tensor in (*four.parameters(), *four.buffers()))
    scales = sum(part.weight.quant_state.absmax.nbytes for part in four.modules() if hasattr(part, "quant_state"))
    assert scales > 0
    assert four.get_memory_footprint() == tensors


def test_beam_search_refuses_the_option_that_saves_memory(model):
    with pytest.raises(ValueError, match="low_memory=True"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, num_beams=4, low_memory=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where it is compiled")
def test_a_static_cache_compiles_nothing_on_a_cpu_without_a_word(model, recwarn, caplog):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    prompt = torch.ones(1, 4, dtype=torch.long)
    model.generate(prompt, max_new_tokens=3, min_new_tokens=3, cache_implementation="static", do_sample=False)
    assert counters["stats"]["unique_graphs"] == 0
    reported = [*(str(each.message) for each in recwarn), *caplog.messages]
    assert not [text for text in reported if "compil" in text]
