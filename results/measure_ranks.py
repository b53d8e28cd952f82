"""One rank of several on GPUs that are not here: torch's own allocator, the estimate, and the formulas of ZeRO.

    python results/measure_ranks.py [--out results/ranks.json]

Each set-up is rehearsed with two and with four A100, a process for each device, collectives answered and not computed.
Beside what the fullest rank allocated at most stands the estimate, which follows one rank; beside its weights,
gradients and optimizer states after backward, in bytes a parameter, the formula. What does not train is recorded with
its error.
"""

from datetime import UTC, datetime

import measuring

from perf_helpers import Task
from perf_helpers.estimate import estimate
from perf_helpers.lab import hardware
from perf_helpers.lab.runs import Run
from perf_helpers.rehearsal import CARDS, rehearse

CARD, RANKS = "a100", (2, 4)
GPT2 = Task("gpt2", seq_len=128)
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LLAMA = Task("llama-3-8b", seq_len=256, config=LLAMA | {"num_key_value_heads": 4, "vocab_size": 32000})
HALF = {"bf16": True, "gradient_checkpointing": True}
SETUPS = [  # (name, task, training arguments)
    ("DDP", GPT2, {}),
    ("DDP, bf16, checkpointing", LLAMA, HALF),
    ("FSDP2", GPT2, {"fsdp": True}),
    ("FSDP2, bf16, checkpointing", LLAMA, HALF | {"fsdp": True}),
    ("FSDP2, accumulation of 4", GPT2, {"fsdp": True, "gradient_accumulation_steps": 4}),
    ("FSDP2, gathered until backward", GPT2, {"fsdp": "shard_grad_op"}),
    ("FSDP2, bert-tiny", Task("bert-tiny", seq_len=128), {"fsdp": True}),
    ("FSDP2, ViT", Task("vit-base", config={"num_hidden_layers": 2}), {"fsdp": True}),
    ("FSDP2, T5", Task("t5-small", seq_len=128), {"fsdp": True}),
    ("FSDP2, Adafactor", GPT2, {"fsdp": True, "optim": "adafactor"}),
    ("FSDP2, 8-bit Adam", GPT2, {"fsdp": True, "optim": "adamw_bnb_8bit"}),
]
KEPT = ("weights", "gradients", "optimizer_states")


def formula(arguments: dict, ranks: int) -> list[float]:
    """Bytes a parameter of weights, gradients and AdamW's states on a rank after backward; DDP's buckets are a second
    set of gradients."""
    return [4 / ranks, 4 / ranks, 8 / ranks] if arguments.get("fsdp") else [4.0, 8.0, 8.0]


def kept(run: Run, parameters: int) -> list[float]:
    """The same, as the rehearsed allocator counted it."""
    parts = run.memory.phase_breakdowns["backward"]
    return [parts[name] / parameters for name in KEPT]


def row(name: str, task: Task, arguments: dict, ranks: int) -> dict:
    """A set-up: {"rehearsed", "estimated": bytes, "kept", "formula": bytes a parameter, or "error" of both}."""
    given = {"per_device_train_batch_size": 4, "processes": ranks, **arguments}
    model = task.model + ", small" * bool(task.config)
    told = {"setup": name, "model": model, "ranks": ranks, "arguments": arguments}
    run = rehearse(task, on=CARD, **given)
    try:
        said, refused = estimate(task, device="cuda", compute_capability=CARDS[CARD].capability, **given), None
    except ValueError as error:
        said, refused = None, str(error)
    if not (run.ok and said):
        return told | {"error": run.message.strip().splitlines()[-1] if not run.ok else None, "estimate_error": refused}
    sizes = {"allocated": run.peak_bytes, "reserved": run.memory.reserved_bytes}
    return told | {
        "rehearsed": sizes,
        "estimated": {"allocated": said.peak_bytes, "reserved": said.memory.reserved_bytes},
        "kept": kept(run, task.parameters()),
        "formula": formula(arguments, ranks),
        "traced": said.traced,
    }


def main() -> None:
    options, rows = measuring.options(__doc__), []
    for name, task, arguments in SETUPS:
        for ranks in RANKS:
            rows.append(row(name, task, arguments, ranks))
            print(rows[-1], flush=True)
    kept_rows = [each for each in rows if "rehearsed" in each]
    report = {
        "what": "one rank of several: torch's own allocator in a rehearsal, the estimate, and the formulas",
        "card": CARD,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": hardware.versions(),
        "trained": len(kept_rows),
        "equal": sum(each["estimated"] == each["rehearsed"] for each in kept_rows),
        "rows": rows,
    }
    measuring.keep(report, options.out, leave_out=("rows",))


if __name__ == "__main__":
    main()
