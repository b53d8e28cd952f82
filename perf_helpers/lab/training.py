"""One experiment, and how it trains: transformers' Trainer with the task's model and data and the user's arguments.

The same code is measured (on real tensors) and estimated (on fake ones).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from perf_helpers.lab import arguments as training_arguments
from perf_helpers.lab.task import Task


@dataclass(frozen=True)
class Experiment:
    """One training (or any function) of a task under given arguments.

    `function` is a cloudpickled callable: it takes the task and returns something that JSON can hold. Without one, the
    Trainer runs. `optimizer` is a cloudpickled callable (model, training arguments) -> optimizer for the Trainer.
    """

    name: str
    task: Task
    arguments: dict[str, Any] = field(default_factory=dict)
    function: bytes | None = None
    optimizer: bytes | None = None
    training: bool = True  # False: forward passes without gradients
    processes: int = 1
    steps: int = 4
    warmup_steps: int = 1
    threads: int | None = None

    def replace(self, **changes) -> "Experiment":
        return dataclasses.replace(self, **changes)


class Invalid(ValueError):
    """What the user asked for cannot be built."""


def train(experiment: Experiment, folder: str, steps: int, keep_losses: bool = True) -> list[float]:
    """The Trainer, with the task's model and data and the experiment's arguments. Returns the loss of each step.

    `steps` optimizer steps, unless losses are kept and the arguments say `max_steps` or `num_train_epochs`.
    """
    import cloudpickle
    from transformers import PrinterCallback, Trainer

    training, model_arguments = training_arguments.split(experiment.arguments)
    if not keep_losses:  # the memory pass needs no more than its steps, whatever the arguments say
        training["max_steps"] = min(training.get("max_steps", steps), steps)
    elif not {"max_steps", "num_train_epochs"} & training.keys():
        training["max_steps"] = steps
    try:
        args = training_arguments.build(training, folder)
        if args.n_gpu > 1:
            args._n_gpu = 1  # a process has one GPU: with more the Trainer would use nn.DataParallel and a larger batch
        model = experiment.task.build_model(**model_arguments)
        dataset = experiment.task.dataset()
    except (ValueError, ImportError) as error:
        raise Invalid(str(error)) from error
    optimizer = cloudpickle.loads(experiment.optimizer)(model, args) if experiment.optimizer else None

    losses: list[list[Any]] = []

    class LossKeeper(Trainer):
        """Keeps each micro-batch's loss as it is, on the device: reading it out would wait for the device."""

        def training_step(self, *inputs, **options):
            loss = super().training_step(*inputs, **options)
            if len(losses) <= self.state.global_step:
                losses.append([])
            losses[-1].append(loss)
            return loss

    kind = LossKeeper if keep_losses else Trainer
    trainer = kind(model=model, args=args, train_dataset=dataset, optimizers=(optimizer, None))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [sum(loss.item() for loss in step) for step in losses]


def infer(experiment: Experiment, passes: int = 2) -> None:
    """Forward passes in eval mode without gradients, `per_device_eval_batch_size` samples each (the Trainer's 8)."""
    import torch

    settings, model_arguments = training_arguments.split(experiment.arguments)
    size = settings.get("per_device_eval_batch_size", 8)
    device = "cuda" if torch.cuda.is_available() and not settings.get("use_cpu") else "cpu"
    try:
        model = experiment.task.build_model(**model_arguments).to(device).eval()
        batch = experiment.task.batch(size, device)
    except (ValueError, ImportError) as error:
        raise Invalid(str(error)) from error
    labels = batch.pop("labels", None)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = labels
    half = torch.bfloat16 if settings.get("bf16") else torch.float16 if settings.get("fp16") else None
    with torch.no_grad(), torch.autocast(device, half, enabled=half is not None):
        for _ in range(passes):
            model(**batch)
