"""One experiment, and how it trains: transformers' Trainer with the task's model and data and the user's arguments.

The meter runs this code on real tensors, the estimate on fake ones.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainmem.core import adapters, evaluation, hardware, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.configurations import Weights
from trainmem.core.families import LISTED, OF_UNEQUAL_LENGTHS, positions
from trainmem.core.outcomes import Invalid
from trainmem.core.task import Task
from trainmem.texts import shown, whole_number

_OF_QUANTIZED = "a model in {bits} bits{by} can be trained with adapters only: add them, e.g. peft={{'r': 8}}"
_NO_STEP = (
    "no step can run: dataset_size={} is less than one batch (per_device_train_batch_size={}, processes={}), and "
    "dataloader_drop_last leaves out an incomplete batch: enlarge dataset_size, or leave out dataloader_drop_last"
)


@dataclass(frozen=True)
class Experiment:
    """Describe one training, inference or call of a user's function: task, arguments, processes, steps to measure."""

    name: str  # shown in tables and pictures
    task: Task
    arguments: Arguments = field(default_factory=Arguments)
    function: bytes | None = None  # a cloudpickled callable that takes the task; None: the Trainer trains
    optimizer: bytes | None = None  # a cloudpickled callable (model, training arguments) -> optimizer, for the Trainer
    training: bool = True  # False: forward passes without gradients
    processes: int = 1  # ranks
    steps: int = 4  # timed optimizer steps
    warmup_steps: int = 1  # steps before these
    threads: int | None = None  # threads to compute with; None: torch's default
    samples_of_function: int | None = None  # samples per step of a function, over all processes
    packages: tuple[str, ...] = ()  # packages to import before the job starts: `forkserver` looks for their names

    def __post_init__(self):
        whole_number("processes", self.processes)
        whole_number("steps", self.steps)
        whole_number("samples_per_step", 1 if self.samples_of_function is None else self.samples_of_function)
        if self.task.is_saved_quantized:
            object.__setattr__(self, "packages", ("bitsandbytes",))
        if self.training and self.arguments.generation:
            name = next(iter(self.arguments.generation))
            raise ValueError(
                f"{name} is for inference only: add --inference, or use Lab.infer or estimate(training=False)"
            )
        if self.training and self.arguments.quantization and not self.arguments.get("peft"):
            raise ValueError(_OF_QUANTIZED.format(bits="8 or 4", by=""))

    @property
    def weights(self) -> Weights | None:
        """The type in which the model's weights are loaded, and what decides it; None: the experiment runs a function.

        Raises:
            ValueError: the requested type or quantization is not supported, see `Task.weights`.
        """
        given = self.arguments
        return None if self.function else self.task.weights(given.get("dtype"), given.quantization)

    @property
    def kind(self) -> str:
        """The kind of the run: "training", "inference" or "function", as in `records.Run.kind`."""
        return "function" if self.function else "training" if self.training else "inference"

    @property
    def samples_per_step(self) -> int | None:
        """Samples per optimizer step, over all processes; None: a user's function runs, and the user gave no number."""
        if self.function:
            return self.samples_of_function
        if not self.training:
            return self.arguments.get("per_device_eval_batch_size") or 8
        return self.arguments.samples_per_step(self.processes)

    @property
    def metered_steps(self) -> int:
        """Number of optimizer steps, or of passes in inference, that the memory meter and the estimate cover.

        At least two, and enough for all samples of a training if the task gives their lengths (`Task.lengths`).
        """
        unequal = self.training and not self.function and self.task.lengths
        return max(2, -(-len(self.task.lengths) // self.samples_per_step)) if unequal else 2

    @property
    def steps_on_a_gpu(self) -> int:
        """Number of optimizer steps to run on a GPU.

        At most three for a training by the Trainer on examples of equal length; `metered_steps` for other experiments.
        """
        # Three suffice: the allocator's free blocks differ between the second and the third step, but not later.
        alike = self.training and not self.function and not self.task.lengths
        return min(self.arguments.get("max_steps", 3), 3) if alike else self.metered_steps

    @property
    def is_counted_by_tensors(self) -> bool:
        """Whether, on a CPU, memory is counted as the bytes of live tensors plus each operation's workspace.

        True with several ranks, DataLoader workers or DeepSpeed: with them the allocator's events are unreliable,
        because other threads or processes pass memory to this process at irregular times (see
        `memory_meter.MemoryMeter`). In all other experiments these events are counted.
        """
        # DeepSpeed communicates even with one rank.
        return self.processes > 1 or any(map(self.arguments.get, ("dataloader_num_workers", "deepspeed")))

    def replace(self, **changes) -> "Experiment":
        return dataclasses.replace(self, **changes)


def train(experiment: Experiment, folder: str, steps: int, keep_losses: bool = True) -> list[float]:
    """Train with the Trainer, the task's model and data and the experiment's arguments; return each step's loss.

    Args:
        folder: output folder of the Trainer.
        steps: number of optimizer steps. If `keep_losses` is True, `steps` has an effect only if the experiment's
            arguments set neither `max_steps` nor `num_train_epochs`. If `keep_losses` is False, the training runs
            `steps` steps, or `max_steps` if that is smaller.
        keep_losses: True: return the losses, and never evaluate. False: evaluate and save after the last step if the
            arguments request it, and return [].

    Raises:
        Invalid: the model or the Trainer cannot be built from the task and the arguments, or a package is missing.
    """
    import cloudpickle
    from transformers import PrinterCallback, Trainer, default_data_collator
    from transformers.utils.generic import find_labels

    arguments = experiment.arguments
    if not keep_losses:  # the memory pass runs no more than its steps, even if the arguments ask for more
        arguments = arguments.replace(max_steps=min(arguments.get("max_steps", steps), steps))
        arguments = evaluation.once(arguments, arguments.get("max_steps"))
    elif not {"max_steps", "num_train_epochs"} & arguments.training.keys():
        arguments = arguments.replace(max_steps=steps)
    if keep_losses:
        arguments = evaluation.never(arguments)
    if arguments.get("deepspeed"):  # without a launcher's environment variables DeepSpeed would use MPI
        if why := optional_packages.missing("deepspeed"):
            raise Invalid(why)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        # gloo sums. Otherwise each rank compiles an operator: for a minute, or for ever if a compilation was killed.
        importlib.import_module("deepspeed.ops").__compatible_ops__ = {}
    try:
        family = experiment.task.family()
        if family in LISTED and not importlib.util.find_spec("scipy"):
            raise Invalid(f"{family} needs scipy, which matches predictions with objects: pip install scipy")
        if not experiment.optimizer and (why := optional_packages.missing_of_optimizer(arguments.optimizer)):
            raise Invalid(why)
        args = arguments.build(folder)
        if args.n_gpu > 1:
            args._n_gpu = 1  # with more GPUs the Trainer would use nn.DataParallel and a larger batch
        model = _built(experiment, args.device, args)
        dataset = experiment.task.dataset()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        columns = getattr(dataset, "column_names", ())  # a user's task may have another kind of data set
        if args.label_names is None and "labels" in columns and not find_labels(type(base)):
            args.label_names = ["labels"]  # forward takes them as **kwargs, and the Trainer would drop them
    except (ValueError, ImportError) as error:
        raise Invalid(str(error)) from error
    optimizer = cloudpickle.loads(experiment.optimizer)(model, args) if experiment.optimizer else None

    losses: list[list[Any]] = []

    class NamingTrainer(Trainer):
        """A Trainer that raises `Invalid`, with the optimizer's name, if transformers cannot build the optimizer."""

        def create_optimizer(self, *inputs, **options):
            try:
                return super().create_optimizer(*inputs, **options)
            except (ValueError, ImportError, TypeError) as error:
                by = f"transformers {hardware.version_of('transformers')}"
                raise Invalid(f"{by} cannot build optim={arguments.optimizer!r}: {error}") from error

    class LossKeeper(NamingTrainer):
        """Keep each micro-batch's loss as a tensor, because reading its value would wait for the device."""

        def training_step(self, *inputs, **options):
            loss = super().training_step(*inputs, **options)
            if len(losses) <= self.state.global_step:
                losses.append([])
            losses[-1].append(loss)
            return loss

    kind = LossKeeper if keep_losses else NamingTrainer
    collator = experiment.task.collator()
    if args.label_smoothing_factor and hasattr(base, "prepare_decoder_input_ids_from_labels"):
        collator = functools.partial(_with_decoder_inputs, model=base, collator=collator or default_data_collator)
    options = {"data_collator": collator, "optimizers": (optimizer, None)}
    if evaluation.evaluates(arguments):
        options |= {"eval_dataset": dataset, "compute_metrics": evaluation.metrics(arguments)}
    with evaluation.unknown_values(on_cpu=False) if hardware.is_rehearsal() else contextlib.nullcontext():
        try:
            trainer = kind(model=model, args=args, train_dataset=dataset, **options)
        except (ValueError, ImportError) as error:  # e.g. a missing package
            raise Invalid(str(error)) from error
        trainer.remove_callback(PrinterCallback)
        if experiment.task.loss_objective:
            trainer.can_return_loss = True  # in evaluation, too: its data have no labels
        trainer.train()
    if not trainer.state.global_step and arguments.get("dataloader_drop_last"):
        raise Invalid(_NO_STEP.format(experiment.task.dataset_size, args.train_batch_size, experiment.processes))
    return [sum(loss.item() for loss in step) for step in losses]


def _with_decoder_inputs(examples: list[dict], model, collator: Callable) -> dict[str, Any]:
    """Return a batch with `decoder_input_ids`, as `DataCollatorForSeq2Seq(model=model)` does."""
    batch = collator(examples)
    # Otherwise the model makes them from the labels, which the Trainer removes first if it smooths labels.
    return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}


def _built(experiment: Experiment, device: Any, args: Any = None):
    """Return the experiment's model: quantized, frozen and with adapters, as the arguments request.

    Args:
        args: the Trainer's `TrainingArguments`; None: the model does not train.

    Raises:
        Invalid: a package is missing.
        ValueError: an argument does not fit the model, see `adapters`.
    """
    task, arguments, weights = experiment.task, experiment.arguments, experiment.weights
    wanted, quantization = arguments.adapters, weights.quantization
    if args and quantization and wanted.get("peft") is None:  # saved quantized: other cases were refused earlier
        raise ValueError(_OF_QUANTIZED.format(bits=weights.bits, by=f" ({weights.quantized_by})"))
    if wanted.get("peft") is not None and (why := optional_packages.missing("peft")):
        raise Invalid(why)
    half = args and ("bfloat16" if args.bf16 else "float16" if args.fp16 else None)
    if half and quantization and adapters.method_of(quantization) == "quanto" and weights.dtype != half:
        raise ValueError(f"quanto cannot multiply weights in {weights.dtype} under autocast: add dtype={half!r}")
    model = task.build_model(**arguments.model | {"dtype": weights.dtype})
    if quantization:
        model = adapters.quantized(model, quantization, device, trains=bool(args))
    if args and quantization and adapters.is_prepared(wanted, quantization):
        checkpointing = (args.gradient_checkpointing_kwargs or {}) if args.gradient_checkpointing else None
        model = adapters.prepared(model, checkpointing)
    adapters.freeze(model, wanted.get("freeze") or "")
    if wanted.get("peft") is not None:
        model = adapters.adapted(model, wanted["peft"], task.family(), generates=bool(arguments.generation))
    # A quantized model is on the device already; the Trainer moves any other model that it trains.
    return model if args or quantization else model.to(device)


def infer(experiment: Experiment, passes: int = 2, on_pass: Callable[[], None] = lambda: None) -> None:
    """Run forward passes in eval mode without gradients, on `per_device_eval_batch_size` samples (default: 8).

    With `max_new_tokens`, a pass is a `generate` call that writes exactly that many tokens per sample.

    Args:
        experiment: gives the task and the arguments.
        passes: number of passes.
        on_pass: called after each pass.

    Raises:
        Invalid: the model cannot be built from the task and the arguments, or cannot generate.
    """
    import torch

    settings, generation = experiment.arguments.training, experiment.arguments.generation
    size = settings.get("per_device_eval_batch_size", 8)
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.get("use_cpu") else "cpu")
    try:
        if generation:
            _check_room(experiment.task, generation["max_new_tokens"])
        model = _built(experiment, device).eval()
        batch = experiment.task.batch(size, device)
    except (ValueError, ImportError) as error:
        raise Invalid(str(error)) from error
    if experiment.task.family() in ("sequence to sequence", "speech") and not generation:
        batch["decoder_input_ids"] = batch["labels"]
    batch = {name: column for name, column in batch.items() if "label" not in name}
    half = torch.bfloat16 if settings.get("bf16") else torch.float16 if settings.get("fp16") else None
    with torch.no_grad(), torch.autocast(device.type, half, enabled=half is not None):
        for _ in range(passes):
            if generation:
                _write(model, batch["input_ids"], **generation)
            else:
                model(**batch)
            on_pass()


def _check_room(task: Task, new: int) -> None:
    """Raise ValueError if a task's model cannot generate, or has too few positions for the prompt and `new` tokens."""
    config = task.build_config()
    kind, length, room = task.model_class(config), task.length(config), positions(config)
    if (family := task.family()) not in OF_UNEQUAL_LENGTHS:
        raise ValueError(f"max_new_tokens: only text models can generate here, not {family}: leave it out")
    if not kind.can_generate():
        raise ValueError(
            f"max_new_tokens: {kind.__name__} cannot generate text. Name a class that can, "
            "e.g. --architecture LlamaForCausalLM"
        )
    if room and not config.is_encoder_decoder and length + new > room:
        raise ValueError(
            f"max_new_tokens={new} is too large: {task.model} has {room} positions, and the prompt takes {length}. "
            f"Give {room - length} or less, or a smaller seq_len"
        )


def _write(model, prompts, *, max_new_tokens: int, **options) -> None:
    """Call `generate` with greedy or beam search for exactly `max_new_tokens` tokens.

    Args:
        model: a model that can generate; its settings for generation are changed.
        prompts: token ids, (samples, length).
        options: further arguments of `generate`.
    """
    writer = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's models delegate generate
    tokens, ask_beams = iter(range(max_new_tokens)), type(writer)._beam_search_has_unfinished_sequences
    # Neither search ends early, whatever the model computes: both can be traced on fake tensors.
    writer._has_unfinished_sequences = lambda *_, **__: next(tokens, None) is not None
    writer._beam_search_has_unfinished_sequences = lambda *args, **rest: ask_beams(*args, **rest) is not None
    model.generation_config.eos_token_id = None
    if not model.config.is_encoder_decoder:
        model.config.pad_token_id = None  # there is no padding, and GPT-2 would search for it
    mask = prompts.new_ones(prompts.shape)
    options = {"do_sample": False, "disable_compile": True, "max_new_tokens": max_new_tokens} | options
    model.generate(input_ids=prompts, attention_mask=mask, **options)


def pickled(function: Callable) -> bytes:
    """Return a function as bytes, by cloudpickle, to send it to a fresh subprocess.

    Raises:
        ValueError: it is not callable, or cannot be pickled.
    """
    if not callable(function):
        raise ValueError(f"{shown(function)} is not a function: give one that takes the task")
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        name = getattr(function, "__name__", "the function")
        raise ValueError(
            f"{name} cannot be sent to a subprocess ({error}): import or create what it needs inside the function"
        ) from error
