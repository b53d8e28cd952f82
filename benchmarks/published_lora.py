"""Predicts what LoRA trainings took that others measured on a Tesla T4, by rehearsing them under a release of torch.

python benchmarks/published_lora.py --out results/lora_t4/2.11.0.json   by a Python that has torch 2.11.0 for CUDA
python benchmarks/build.py                                              the table in results/README.md

It needs peft. published_lora.toml has the facts. A prediction is committed before the card's figures are put beside it.
"""

import contextlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

FACTS = Path(__file__).with_suffix(".toml")
SAID = "2.14.0"  # the torch that the source names of its first rows


def facts() -> dict:
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def train(name: str) -> dict:
    """Perform a training on this process's GPU as its source describes it; peaks and what is reserved, in bytes.

    One step to warm up, one measured, and one with the peak reset between its phases. The output of the model lives on
    in the backward, as in a loop that keeps it in a variable.
    """
    import peft
    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.initialization import no_init_weights
    from transformers.integrations import sdpa_attention

    model_name, attention, sizes = name.split(", ")
    batch, length = map(int, sizes.split(" x "))
    config = transformers.AutoConfig.for_model(**facts()["models"][model_name], use_cache=False)
    with no_init_weights():  # nobody reads them
        chosen = {"dtype": torch.float16, "attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    model.tie_weights()
    model.to("cuda")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, lora_dropout=0.0, target_modules=layers)
    model = peft.get_peft_model(model, adapters).train()
    found = {"loaded": torch.cuda.memory_allocated()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (batch, length), device="cuda")

    def step(mark=lambda phase: None) -> None:
        optimizer.zero_grad(set_to_none=True)
        output = model(input_ids=ids, labels=ids)
        mark("forward")
        output.loss.backward()
        mark("backward")
        optimizer.step()
        mark("optimizer")

    def keep(phase: str) -> None:
        found[phase] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    pinned = contextlib.nullcontext()
    if attention == "sdpa":
        sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False
        sdpa_attention.repeat_kv = lambda heads, times: heads.repeat_interleave(times, 1) if times > 1 else heads
        pinned = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    with pinned:
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["reserved"] = torch.cuda.max_memory_reserved()
        keep("allocated")
        step(keep)
    return found


def rehearsed(name: str) -> dict:
    """`train` in a process of its own on a rehearsed card; RuntimeError if it did not end well."""
    from perf_helpers import rehearsal
    from perf_helpers.rehearsal.rehearsal_process import command

    with command(rehearsal.CARDS[facts()["card"]]) as (python, environment):
        done = subprocess.run([python, __file__, "--train", name], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measurement():
    from runner import Measurement

    return Measurement(
        __doc__,
        "lora_t4/2.11.0.json",
        lambda options: facts()["trainings"],
        lambda cases, options: ((name, {"name": name} | rehearsed(name)) for name in cases),
        lambda rows, options: {"what": "LoRA trainings rehearsed on a T4, in bytes; nothing was computed"},
        name_of=lambda number, row: row["name"],
        packages=("peft",),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        print(json.dumps(train(sys.argv[2])))
    else:
        sys.exit(measurement().main())
