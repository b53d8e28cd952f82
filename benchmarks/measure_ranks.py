"""Compare one rank of several, on rehearsed GPUs: torch's own allocator, the estimate, and ZeRO's formulas.

    python benchmarks/measure_ranks.py

Each set-up is rehearsed with two and with four A100: one process per device, and collectives that return without
computing. The highest peak of allocated bytes over all ranks is compared with the estimate, which traces one rank. The
weights, gradients and optimizer states after backward, in bytes per parameter, are compared with the formula. A set-up
that fails to train is recorded with its error; a set-up that the estimate refuses, with the reason. For DeepSpeed,
first run make build/deepspeed VENV=.venv-cuda
"""

import sys

from runner import Measurement

from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.rehearsal import CARDS, rehearse

CARD, COUNTS = "a100", (2, 4)
GPT2 = Task("gpt2", seq_len=128)
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LLAMA = Task(
    "llama-3-8b", seq_len=256, config=LLAMA | {"num_key_value_heads": 4, "vocab_size": 32000, "dtype": "float32"}
)
# More than two flat copies of 250 MiB are broadcast, and with SGD no optimizer state hides where they were.
WIDE = {"num_hidden_layers": 6, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 1000}
WIDE = Task("gpt2", seq_len=128, config=WIDE | {"bos_token_id": 0, "eos_token_id": 0})
HALF = {"bf16": True, "gradient_checkpointing": True}


def zero(stage: int, **more) -> dict:
    """Return the training arguments of a ZeRO stage, with torch's optimizer and with small buckets: large buckets take
    so much memory that the effect of sharding would not be seen.

    `more`: further fields of DeepSpeed's "zero_optimization".
    """
    buckets = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    config = {"zero_optimization": {"stage": stage, **buckets, **more}, "gradient_accumulation_steps": "auto"}
    own = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}}
    return {"deepspeed": config | own | {"train_micro_batch_size_per_gpu": "auto"}}


SETUPS = [  # (name, task, training arguments)
    ("DDP", GPT2, {}),
    ("DDP, bf16, checkpointing", LLAMA, HALF),
    ("DDP, SGD, 1.2 GB of weights", WIDE, {"optim": "sgd"}),
    ("FSDP2", GPT2, {"fsdp": True}),
    ("FSDP2, bf16, checkpointing", LLAMA, HALF | {"fsdp": True}),
    ("FSDP2, accumulation of 4", GPT2, {"fsdp": True, "gradient_accumulation_steps": 4}),
    ("FSDP2, gathered until backward", GPT2, {"fsdp": "shard_grad_op"}),
    ("FSDP2, bert-tiny", Task("bert-tiny", seq_len=128), {"fsdp": True}),
    ("FSDP2, ViT", Task("vit-base", config={"num_hidden_layers": 2}), {"fsdp": True}),
    ("FSDP2, T5", Task("t5-small", seq_len=128), {"fsdp": True}),
    ("FSDP2, Adafactor", GPT2, {"fsdp": True, "optim": "adafactor"}),
    ("FSDP2, 8-bit Adam", GPT2, {"fsdp": True, "optim": "adamw_bnb_8bit"}),
    ("DeepSpeed, stage 0", GPT2, zero(0)),
    ("DeepSpeed, stage 1", GPT2, zero(1)),
    ("DeepSpeed, stage 2", GPT2, zero(2)),
    ("DeepSpeed, stage 3", GPT2, zero(3)),
    ("DeepSpeed, stage 2, accumulation of 4", GPT2, zero(2) | {"gradient_accumulation_steps": 4}),
    ("DeepSpeed, stage 3, accumulation of 4", GPT2, zero(3) | {"gradient_accumulation_steps": 4}),
    ("DeepSpeed, stage 2, bf16, checkpointing", LLAMA, HALF | zero(2)),
    ("DeepSpeed, stage 3, bf16, checkpointing", LLAMA, HALF | zero(3)),
    ("DeepSpeed, stage 2, a stream for messages", GPT2, zero(2, overlap_comm=True)),
    ("DeepSpeed, stage 2, states on the host", GPT2, zero(2, offload_optimizer={"device": "cpu"})),
]


def formula(arguments: dict, ranks: int) -> list[float]:
    """Return [bytes per parameter of the weights, of the gradients, of the optimizer states] on a rank after backward.

    All are in fp32. DDP's buckets are a second set of gradients. The states are AdamW's, as in ZeRO's formula, even
    with another optimizer; only DDP with SGD has none.

    `arguments`: the training arguments.
    """
    if "deepspeed" in arguments:
        stage = arguments["deepspeed"]["zero_optimization"]["stage"]
        return [size / (ranks if stage >= first else 1) for size, first in ((4.0, 3), (4.0, 2), (8.0, 1))]
    if arguments.get("fsdp"):
        return [4 / ranks, 4 / ranks, 8 / ranks]
    return [4.0, 8.0, 0.0 if arguments.get("optim") == "sgd" else 8.0]


def row(name: str, task: Task, arguments: dict, ranks: int) -> dict:
    """Rehearse and estimate a training on several GPUs, and return its row for the table.

    Args:
        name: the name of this set-up in the table.
        task, arguments: the task and the training arguments.
        ranks: number of GPUs.

    Returns:
        "setup", "model", "ranks" and "arguments" describe the training. "rehearsed" and "estimated" are {"allocated":
            bytes, "reserved": bytes} at the peak. "kept" and "formula" are [bytes per parameter of the weights, of the
            gradients, of the optimizer states], as rehearsed and by ZeRO's formula. If the rehearsal fails, "error" has
            its message instead; if the estimate refuses the training, "estimate_error" has the reason.
    """
    given = {"per_device_train_batch_size": 4, "processes": ranks, **arguments}
    model = task.model + ", small" * bool(task.config)
    entry = {"setup": name, "model": model, "ranks": ranks, "arguments": arguments}
    run = rehearse(task, on=CARD, **given)
    try:
        predicted, refused = estimate(task, device="cuda", compute_capability=CARDS[CARD].capability, **given), None
    except ValueError as error:
        predicted, refused = None, str(error)
    if not run.ok:
        return entry | {"error": run.message.strip().splitlines()[-1], "estimate_error": refused}
    parts = run.memory.phase_breakdowns["backward"]
    entry["rehearsed"] = {"allocated": run.peak_bytes, "reserved": run.memory.reserved_bytes}
    entry["kept"] = [parts[name] / task.parameters() for name in ("weights", "gradients", "optimizer_states")]
    entry["formula"] = formula(arguments, ranks)
    if predicted is None:
        return entry | {"estimate_error": refused}
    return entry | {"estimated": {"allocated": predicted.peak_bytes, "reserved": predicted.memory.reserved_bytes}}


def measure(cases, options):
    if reason := optional_packages.offer("deepspeed"):
        raise SystemExit(reason)
    for name, setup in cases.items():
        yield name, row(*setup)


def conclude(rows: list[dict], options) -> dict:
    trained = [each for each in rows if "rehearsed" in each]
    return {
        "what": "one rank of several: torch's own allocator in a rehearsal, the estimate, and the formulas",
        "card": CARD,
        "trained": len(trained),
        "followed": sum("estimated" in each for each in trained),
        "equal": sum(each.get("estimated") == each["rehearsed"] for each in trained),
    }


RANKS = Measurement(
    __doc__,
    "ranks.json",
    lambda options: {f"{setup[0]}, {ranks}": (*setup, ranks) for setup in SETUPS for ranks in COUNTS},
    measure,
    conclude,
    packages=("deepspeed",),
    name_of=lambda number, row: f"{row['setup']}, {row['ranks']}",
)

if __name__ == "__main__":
    sys.exit(RANKS.main())
