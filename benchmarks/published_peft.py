"""Compare the estimate with peft's own comparison of adapters, which was measured on an L40S.

python benchmarks/published_peft.py   needs: pip install peft==0.19.1

published_peft.toml has the facts. Release 0.19.1 is the one nearest to the peft that was measured. Other releases give
other figures for AdaLoRA, BOFT and OSF, whose code has changed.
"""

import functools
import sys
import tomllib
from pathlib import Path

import torch
from runner import Measurement
from tables import MIB

from trainmem.core.task import Task
from trainmem.estimate import estimate

FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

LLAMA = {  # config.json of meta-llama/Llama-3.2-3B
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def metamath(_: Task, length: int, adapter: dict | None = None, cast: bool = True) -> None:
    """Train Llama 3.2 3B in bf16 for three steps with AdamW on four samples of `length` tokens.

    The base is on the GPU before peft adds the adapters. Each step's output is kept until the next step's output
    exists. One sample is padded, so that attention gets a mask.

    Args:
        adapter: fields of a peft configuration; None: all weights are trained.
        cast: peft's autocast_adapter_dtype.
    """
    import transformers
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
    from transformers.initialization import no_init_weights

    place = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.AutoConfig.for_model("llama", **LLAMA)
    with no_init_weights(), torch.device("cpu"):  # their values are not used
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    model.to(place)
    if adapter:
        given = dict(adapter)
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[given.pop("peft_type")]
        with torch.device("cpu"):  # peft makes adapters on the host, and sends them to their layers
            model = get_peft_model(model, kind(**given), autocast_adapter_dtype=cast)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    ids, mask = torch.tensor([[[5] * length] * 4, [[1] * length] * 3 + [[1] * (length - 1) + [0]]], device="cpu")
    for _ in range(3):
        batch = {"input_ids": ids, "attention_mask": mask}
        batch = {name: column.to(place) for name, column in batch.items()}
        batch["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        output = model(**batch, num_items_in_batch=4 * length)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def measure(cases, options):
    """Yield (name, row) for each row of published_peft.toml: the estimated MiB, and the error.

    "reserved" and "allocated" are the estimated MiB; "error" is reserved / published - 1.

    `cases`: {name: row of the file}; `options`: the script's command-line options, not used.
    """
    kept = {key: FACTS[key] for key in ("capability", "torch")}
    device = {"device": "cuda", "compute_capability": tuple(kept["capability"]), "torch_version": kept["torch"]}
    for name, row in cases.items():
        given = {key: row[key] for key in ("adapter", "cast") if key in row}
        loop = functools.partial(metamath, length=FACTS["length"], **given)
        memory = estimate(Task("bert-tiny", seq_len=32), function=loop, timeout=900, **device).memory
        found = {"reserved": memory.reserved_bytes / MIB, "allocated": memory.peak_bytes / MIB}
        error = found["reserved"] / row["published"] - 1
        yield name, {"name": name, "published": row["published"]} | found | {"error": error}


PEFT = Measurement(
    __doc__,
    "published_peft.json",
    lambda options: {row["row"]: row for row in FACTS["rows"]},
    measure,
    lambda rows, options: {"what": "peft's comparison on an L40S and the estimate of its loop: MiB, reserved"},
    name_of=lambda number, row: row["name"],
    line=lambda row: f"{row['published']:,.0f} MiB, estimated {row['error']:+.2%}",
    packages=("peft",),
)

if __name__ == "__main__":
    sys.exit(PEFT.main())
