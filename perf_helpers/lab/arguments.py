"""Training arguments: one vocabulary, the one of the `transformers.TrainingArguments` that is installed.

Every name that a user types is checked here, before anything is built, and every name that changed between library
versions is mapped here and nowhere else.
"""

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from perf_helpers.texts import nearest_text

# Arguments of `from_config` rather than of the Trainer: how the model is built.
MODEL_ARGUMENTS = {
    "attn_implementation": "attention kernel: 'eager', 'sdpa', ...",
    "dtype": "type of the weights: 'float32' (default), 'bfloat16', 'float16'",
}

# Two names of one argument. Whichever the installed library knows is used: the second appeared in transformers
# 5.18-5.23 and the first goes away in 6.
_SYNONYMS = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    ("evaluation_strategy", "eval_strategy"),
    ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    ("no_cuda", "use_cpu"),
)

# Gone for good: what to write instead.
_REMOVED = {
    "adafactor": "optim='adafactor'",
    "group_by_length": "train_sampling_strategy='group_by_length'",
    "warmup_ratio": "warmup_steps (a number below 1 is a share of the training)",
    "fp16_backend": "nothing: torch's own autocast is the only backend",
    "half_precision_backend": "nothing: torch's own autocast is the only backend",
    "fp16_opt_level": "nothing: apex is no longer used",
    "overwrite_output_dir": "nothing: each experiment has a folder of its own",
    "logging_dir": "nothing: an experiment writes no logs",
}

# What an experiment fixes unless told otherwise: nothing is written, printed, sent or evaluated.
QUIET = {
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "log_level": "error",
    "seed": 0,
}


@functools.cache
def known() -> frozenset[str]:
    """Names that an experiment takes: the fields of the installed `TrainingArguments` and `MODEL_ARGUMENTS`."""
    from transformers import TrainingArguments

    return frozenset(field.name for field in dataclasses.fields(TrainingArguments)) | MODEL_ARGUMENTS.keys()


def check(names: Iterable[str], *, also: Iterable[str] = ()) -> None:
    """Raise ValueError at the first name that is no training argument, naming the nearest one that is.

    `also` are further names that the caller takes: they are offered as corrections too.
    """
    valid = known() | {old for pair in _SYNONYMS for old in pair if set(pair) & known()} | set(also)
    for name in names:
        if name in valid:
            continue
        if name in _REMOVED:
            raise ValueError(f"{name!r} is no longer a training argument. Instead: {_REMOVED[name]}.")
        near = difflib.get_close_matches(name, sorted(valid), n=2, cutoff=0.6)
        meant = " or ".join(map(repr, near))
        hint = f" Did you mean {meant}?" if near else " The names are those of transformers.TrainingArguments."
        raise ValueError(f"unknown training argument {name!r}.{hint}")


def current(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments under the names that the installed library knows (see `_SYNONYMS`)."""
    names = {}
    for old, new in _SYNONYMS:
        names |= {old: new} if new in known() else {new: old}
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    if len(renamed) != len(arguments):
        twice = [name for name in arguments if names.get(name, name) != name]
        raise ValueError(f"{', '.join(twice)}: given under its old and its new name. Keep one.")
    return renamed


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(training arguments, model arguments) under current names."""
    arguments = current(arguments)
    model = {name: arguments.pop(name) for name in MODEL_ARGUMENTS if name in arguments}
    return arguments, model


def to_python(arguments: Mapping[str, Any]) -> str:
    """The arguments as Python, to paste."""
    training, model = split(arguments)
    text = "\n".join(["TrainingArguments(", *(f"    {name}={value!r}," for name, value in training.items()), ")"])
    given = ", ".join(f"{name}={value!r}" for name, value in model.items())
    return f"{text}\n# and where the model is loaded: from_pretrained(..., {given})" if given else text


def build(arguments: Mapping[str, Any], output_dir: str):
    """The `TrainingArguments` of an experiment; model arguments are left out.

    Raises:
        ValueError: an unknown name, or a value that the library refuses.
    """
    import torch
    from transformers import TrainingArguments

    check(arguments)
    training, _ = split(arguments)
    # Without a GPU the library refuses bf16 unless it is told that the CPU is meant.
    defaults = QUIET | ({} if torch.cuda.is_available() else {"use_cpu": True})
    return TrainingArguments(output_dir=output_dir, **(defaults | training))


def samples_per_step(arguments: Mapping[str, Any], processes: int = 1) -> int:
    """The effective batch: micro-batch x accumulation x processes."""
    training, _ = split(arguments)
    micro_batch = training.get("per_device_train_batch_size", 8)
    return micro_batch * training.get("gradient_accumulation_steps", 1) * processes


def parse(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Training arguments from command-line words, as transformers' own parser reads them (`--bf16`, `--bf16 True`).

    Returns the arguments that were given (only those) and the words that were not understood.

    Raises:
        ValueError: a value that the argument does not take.
    """
    import argparse

    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments, allow_abbrev=False, exit_on_error=False)
    for name, text in MODEL_ARGUMENTS.items():
        parser.add_argument(f"--{name}", help=text)
    for action in parser._actions:  # so that only what was typed comes back
        action.default = argparse.SUPPRESS
    try:
        given, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(_refused(parser, words, error)) from None
    for name, value in vars(given).items():
        if isinstance(value, str) and value.startswith("{"):  # the Trainer would say what is wrong, but not where
            try:
                json.loads(value)
            except ValueError as error:
                raise ValueError(f"{name}={value!r}: give a JSON object ({error})") from None
    return vars(given), rest


_KINDS = {int: "a whole number, in digits", float: "a number"}


def _refused(parser, words: list[str], error) -> str:
    """What argparse refused, in one line: the argument, its value, and what it takes."""
    options = (error.argument_name or "").split("/")
    action = next((action for action in parser._actions if set(options) & set(action.option_strings)), None)
    name = action.dest if action else error.argument_name
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] in options), len(words))
    value = "".join(words[place : place + 1]).partition("=")[2] or "".join(words[place + 1 : place + 2])
    if error.message.startswith("expected"):
        return f"{name}: it takes a value, as in --{name} VALUE"
    if action is not None and action.choices:
        return f"{name}={value!r} is none of its values. {nearest_text(value, map(str, action.choices))}"
    kind = _KINDS.get(getattr(action, "type", None)) or ("True or False" if "ruthy" in error.message else "")
    return f"{name}={value!r}: give {kind}" if kind else f"{name}={value!r}: {error.message}"


# Smallest value that makes sense, where the library itself would find out late or not at all.
_AT_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "dataloader_num_workers": 0,
}


def check_values(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError at a value out of range, naming the argument and what it takes."""
    training, model = split(arguments)
    for name, least in _AT_LEAST.items():
        value = training.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")
    for name in ("bf16", "fp16", "tf32", "gradient_checkpointing", "activation_checkpointing"):
        if not isinstance(training.get(name), bool | None):
            raise ValueError(f"{name}={training[name]!r}: give True or False")
    for name in ("num_train_epochs", "learning_rate", "max_grad_norm", "weight_decay"):
        value = training.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"{name}={value!r}: give a number that is not negative")
    if "optim" in training:
        from transformers.training_args import OptimizerNames

        names = [optimizer.value for optimizer in OptimizerNames]
        name = getattr(training["optim"], "value", training["optim"])
        if name not in names:
            raise ValueError(f"optim={name!r} is no optimizer of the Trainer. {nearest_text(str(name), names)}")
    attention = model.get("attn_implementation")
    if isinstance(attention, str) and not {"/", "|"} & set(attention):  # those are kernels of a Hub, and variants
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        kernels = ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS if "|" not in name)]
        if attention not in kernels:
            raise ValueError(f"attn_implementation={attention!r} is not known. {nearest_text(attention, kernels)}")
    dtypes = ("float32", "bfloat16", "float16")
    if str(model.get("dtype", "float32")).removeprefix("torch.") not in dtypes:
        raise ValueError(f"dtype={model['dtype']!r}: choose from {', '.join(dtypes)}")
