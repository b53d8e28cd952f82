"""The guides' ten recipes with lesson 14's names, and the megabytes that the 2023 guide measured."""

from trainmem.core.task import Task

FOUR = {"per_device_train_batch_size": 4}
ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
SAVING = ONE | {"gradient_checkpointing": True}
HALF = {"fp16": True}
ADAFACTOR, ADAM_8BIT = {"optim": "adafactor"}, {"optim": "adamw_bnb_8bit"}


def loop(task: Task) -> None:
    """Train a task by the last recipe of the guide's table: a custom loop with Accelerate and all of the techniques.

    The loop makes two optimizer steps.
    """
    import bitsandbytes
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(mixed_precision="fp16")
    model = task.build_model()
    model.gradient_checkpointing_enable()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=5e-5)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):  # like the Trainer: embeddings have 32-bit states
            manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(task.dataset(), batch_size=1))
    model.train()
    for number, batch in zip(range(1, 9), batches, strict=False):
        accelerator.backward(model(**batch).loss / 4)
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


# Names are lesson 14's; MB as the 2023 guide prints them (NVML's bytes // 1024**2); the 2022 guide has no such table.
ROWS = {
    "vanilla": (FOUR, 14949),
    "accumulation": (ONE, 8681),
    "+ checkpointing": (SAVING, 6775),
    "half precision": (FOUR | HALF, 13939),
    "accumulation + checkpointing + half": (SAVING | HALF, 7275),
    "Adafactor": (FOUR | ADAFACTOR, 12295),
    "all + Adafactor": (SAVING | HALF | ADAFACTOR, 4847),
    "8-bit Adam": (FOUR | ADAM_8BIT, 13085),
    "all + 8-bit Adam": (SAVING | HALF | ADAM_8BIT, 5363),
    "Accelerate loop, all + 8-bit Adam": (loop, 5363),
}
GUIDE = {"source": "2023 guide", "hardware": "V100-SXM2 16 GB", "context_mb": 1343}
