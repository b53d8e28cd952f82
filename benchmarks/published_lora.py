"""Predict the memory of LoRA trainings that others measured on a Tesla T4, by rehearsing them with a torch release.

python benchmarks/published_lora.py   run it with a Python that has the CUDA build of the release
python benchmarks/build.py            the table in results/README.md

It needs peft. published_lora.toml has the facts. Each prediction was committed before it was compared with
the measurement on the T4.
"""

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

from runner import RESULTS, Measurement, read_record
from tables import MIB, table, versions

from trainmem.rehearsal import CARDS
from trainmem.rehearsal.rehearsal_process import command

FACTS = Path(__file__).with_suffix(".toml")


def facts() -> dict:
    """Return the content of published_lora.toml, with reserved memory in bytes."""
    found = tomllib.loads(FACTS.read_text(encoding="utf-8"))
    for card in found["trainings"].values():
        card["reserved"] = card.pop("reserved_mib") * 2**20
    return found


def train(name: str) -> dict:
    """Run a training as its source describes it, on this process's GPU if there is one; return {name: bytes}.

    "loaded" is the memory before the first step, "allocated" and "reserved" are the peaks of the measured step,
    "forward", "backward" and "optimizer" are the peaks of these phases in the last step. The training has a warm-up
    step, a measured step, and a step whose peak is reset between its phases. The output of the model lives during
    backward, as in a loop that keeps it in a variable.

    `name`: name of the training in published_lora.toml.
    """
    import peft
    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.initialization import no_init_weights
    from transformers.integrations import sdpa_attention

    model_name, attention, sizes = name.split(", ")
    batch, length = map(int, sizes.split(" x "))
    has_gpu = torch.cuda.is_available()
    place, reset = ("cuda", torch.cuda.reset_peak_memory_stats) if has_gpu else ("cpu", lambda: None)
    config = transformers.AutoConfig.for_model(**facts()["models"][model_name], use_cache=False)
    with no_init_weights():  # their values are not used
        chosen = {"dtype": torch.float16, "attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    model.tie_weights()
    model.to(place)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, lora_dropout=0.0, target_modules=layers)
    model = peft.get_peft_model(model, adapters).train()
    found = {"loaded": torch.cuda.memory_allocated()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=place)

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
        reset()

    pinned = contextlib.nullcontext()
    if attention == "sdpa":
        sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False
        sdpa_attention.repeat_kv = lambda heads, times: heads.repeat_interleave(times, 1) if times > 1 else heads
        pinned = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    with pinned:
        step()
        reset()
        step()
        found["reserved"] = torch.cuda.max_memory_reserved()
        keep("allocated")
        step(keep)
    return found


def rehearsed(name: str) -> dict:
    """Run `train` in its own process on a rehearsed card, and return its result. Raises RuntimeError if it fails.

    `name`: name of the training in published_lora.toml.
    """
    with command(CARDS[facts()["card"]]) as (python, environment):
        done = subprocess.run([python, __file__, "--train", name], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def predictions() -> dict[str, dict]:
    """Return {torch version: record} of all torch releases that rehearsed the trainings; a record has the predicted
    bytes.
    """
    records = map(read_record, sorted(RESULTS.glob("lora_t4_predictions_*.json")))
    return {record["versions"]["torch"]: record for record in records}


def compared(record: dict) -> list[dict]:
    """Return, per training, the bytes that one torch release predicted minus the bytes measured on the card.

    Each row is {"name": ..., "allocated": bytes, "reserved": bytes}.

    `record`: the release's record, see `predictions`.
    """
    card = facts()["trainings"]
    return [
        {"name": row["name"]} | {what: row[what] - card[row["name"]][what] for what in ("allocated", "reserved")}
        for row in record["rows"]
    ]


def page() -> str:
    """Return, in Markdown, a table of the T4's measured figures and of the predictions by each torch release."""
    about, found = facts(), predictions()
    lines = [f"From {about['source']}. It says {about['said']}. {about['setup']}."]
    head, rows = ["training"], {name: [name] for name in about["trainings"]}
    for what, unit in (("allocated", 1), ("reserved", MIB)):
        head.append(f"{what} by the card, {'bytes' if unit == 1 else 'MiB'}")
        for name, card in about["trainings"].items():
            rows[name].append(f"{card[what] // unit:,}")
        for torch, record in found.items():
            head.append(f"torch {torch} less the card, MiB")
            off = {row["name"]: row[what] / MIB for row in compared(record)}
            for name, cells in rows.items():
                cells.append((f"{off[name]:+,.2f}" if off[name] else "equal") if name in off else "not rehearsed")
    for record in found.values():
        off, made = compared(record), versions(record, "torch", "transformers", "peft")
        allocated, reserved = (sum(not row[what] for row in off) for what in ("allocated", "reserved"))
        line = (
            f"- {made}, rehearsed {record['date'][:10]}: allocated **equal to the byte in {allocated} of {len(off)}**"
        )
        lines.append(f"{line}, reserved in {reserved}")
    return "\n\n".join([lines[0], "\n".join(lines[1:]), table(head, list(rows.values()))])


LORA = Measurement(
    __doc__,
    f"lora_t4_predictions_{importlib.metadata.version('torch').partition('+')[0]}.json",
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
        sys.exit(LORA.main())
