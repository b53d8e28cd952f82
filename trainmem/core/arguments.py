"""Training arguments: their names, taken from the installed `transformers.TrainingArguments`, and their checks.

Every name that a user types is checked in this module, before anything is built, and every name that changed between
library versions is mapped only in this module. The library's arguments are read from its source, because importing it
takes seconds; only the process that trains imports it.
"""

import ast
import builtins
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import runpy
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainmem.core.adapters import as_python, is_prepared, of_method, settings_of
from trainmem.texts import MOST, from_json, nearest_text, of_kind, reading, shown, whole_number

# Arguments of an experiment in addition to the fields of `TrainingArguments`: {name: (type, help)}.
# How the model is built: arguments of `from_config`.
MODEL_ARGUMENTS = {
    "attn_implementation": (str | None, "attention kernel: 'eager', 'sdpa', ..."),
    "dtype": (
        Literal["auto", "float32", "bfloat16", "float16"],
        "type of the weights (default: auto, the one that the model's config.json names, as from_pretrained does)",
    ),
}
# Which parts of the model are trained, and how the others are stored, see `adapters`.
ADAPTER_ARGUMENTS = {
    "peft": (dict | str | None, "adapters: a peft configuration as JSON or a JSON file, e.g. '{\"r\": 16}' for LoRA"),
    "quantization_config": (
        dict | str | None,
        "quantization of the base model by bitsandbytes, torchao or quanto: transformers' configuration as JSON or a "
        'JSON file, e.g. \'{"load_in_4bit": true}\' or \'{"quant_method": "quanto", "weights": "int8"}\'',
    ),
    "load_in_4bit": (bool, "4-bit base model; short for quantization_config='{\"load_in_4bit\": true}'"),
    "load_in_8bit": (bool, "8-bit base model; short for quantization_config='{\"load_in_8bit\": true}'"),
    "prepare_model_for_kbit_training": (
        bool,
        "peft's function of that name: casts parameters that are not quantized to fp32 (default: with peft)",
    ),
    "freeze": (
        str | None,
        "parameters to freeze: parts of their names, separated by commas, e.g. embeddings,layers.0.",
    ),
}
# Arguments of `generate`: with them inference generates tokens, with a cache of keys and values.
GENERATION_ARGUMENTS = {
    "max_new_tokens": (int, "tokens to generate per sample, e.g. 20; with --inference"),
    "num_beams": (int, "beams of beam search, e.g. 4; with max_new_tokens"),
    "cache_implementation": (Literal["dynamic", "static"], "key-value cache: dynamic or static; with max_new_tokens"),
}
OF_EXPERIMENTS = MODEL_ARGUMENTS | ADAPTER_ARGUMENTS | GENERATION_ARGUMENTS
_AS_JSON = ("peft", "quantization_config")
COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode")  # any of them switches the compiler on

# Pairs of names of one argument. The one that the installed library knows is used: the second appeared in transformers
# 5.18-5.23 and the first goes away in 6.
_SYNONYMS = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    ("evaluation_strategy", "eval_strategy"),
    ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    ("no_cuda", "use_cpu"),
)

# Removed arguments, and what to do instead.
_REMOVED = {
    "adafactor": "use optim='adafactor'",
    "group_by_length": "use train_sampling_strategy='group_by_length'",
    "warmup_ratio": "use warmup_steps (a number below 1 is a share of the training)",
    "fp16_backend": "leave it out, torch's own autocast is the only backend",
    "half_precision_backend": "leave it out, torch's own autocast is the only backend",
    "fp16_opt_level": "leave it out, apex is no longer used",
    "overwrite_output_dir": "leave it out, each experiment has a folder of its own",
    "logging_dir": "leave it out, an experiment writes no logs",
}

# Arguments of transformers' Seq2SeqTrainingArguments alone.
_OF_SEQ2SEQ = {"sortish_sampler", "predict_with_generate"}
_OF_SEQ2SEQ |= {"generation_max_length", "generation_num_beams", "generation_config"}

# Values that an experiment sets unless the user does: nothing is written, printed, sent or evaluated.
QUIET = {
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "log_level": "error",
    "seed": 0,
}


@dataclass(frozen=True)
class Arguments:
    """Hold the arguments of one training; properties select those of the Trainer, of the model and of the adapters.

    `Arguments.of` checks names and values, and returns them as an `Arguments` object, which cannot be changed.

    Attributes:
        given: {name as the user typed it: value}. The names are fields of `TrainingArguments`, or this engine's own
            arguments (`OF_EXPERIMENTS`), e.g. "attn_implementation" or "peft".
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], also: Iterable[str] = ()) -> "Arguments":
        """Check the names and values in `given`, {name: value}, and return them as `Arguments`.

        `also`: further names that the caller accepts, see `check_names`.

        Raises:
            ValueError: an unknown name (the message suggests a known one); a value out of range; one argument under two
                names; arguments that conflict.
        """
        check_names(given, also=also)
        read = {name: settings_of(name, given[name]) for name in _AS_JSON if given.get(name) is not None}
        of_method(read.get("quantization_config", {}), "quantization_config")
        made = cls({**given, **read})
        _check_values(made.given)
        made._check_together()
        return made

    def _check_together(self) -> None:
        """Raise ValueError for arguments that conflict, and for an unknown attention kernel."""
        if self.get("load_in_4bit") and self.get("load_in_8bit"):
            raise ValueError("load_in_8bit and load_in_4bit are both given: keep one of the two")
        if self.generation and "max_new_tokens" not in self.generation:
            raise ValueError(f"{next(iter(self.generation))} needs max_new_tokens: add it, e.g. max_new_tokens=20")
        engine = self.get("deepspeed")
        if isinstance(engine, str) and engine.endswith(".json") and not Path(engine).is_file():
            raise ValueError(f"deepspeed={shown(engine)}: there is no such file. Give the path of one, or a dictionary")
        kernel = self.get("attn_implementation") or "eager"
        if not {"/", "|"} & set(kernel) and kernel not in _kernels():  # "/": a kernel on the Hub; "|": a variant
            raise ValueError(
                f"attn_implementation={shown(kernel)} is not a valid value. {nearest_text(kernel, _kernels())}"
            )

    @functools.cached_property
    def current(self) -> dict[str, Any]:
        """{name: value} of all arguments, by the names that the installed library knows.

        Raises ValueError if two given names mean the same argument.
        """
        names = _current_names()
        renamed = {names.get(name, name): value for name, value in self.given.items()}
        if len(renamed) != len(self.given):
            twice = [name for name in self.given if names.get(name, name) != name]
            raise ValueError(f"{', '.join(twice)} is given under its old and its new name: keep one of the two")
        return renamed

    @functools.cached_property
    def training(self) -> dict[str, Any]:
        """{name: value} of the Trainer's arguments, by the names that the installed library knows."""
        return {name: value for name, value in self.current.items() if name not in OF_EXPERIMENTS}

    @functools.cached_property
    def model(self) -> dict[str, Any]:
        """{name: value} of the given arguments in `MODEL_ARGUMENTS`, for building the model."""
        return {name: value for name, value in self.current.items() if name in MODEL_ARGUMENTS}

    @functools.cached_property
    def generation(self) -> dict[str, Any]:
        """{name: value} of the given arguments in `GENERATION_ARGUMENTS`, for `generate`."""
        return {name: value for name, value in self.current.items() if name in GENERATION_ARGUMENTS}

    @functools.cached_property
    def adapters(self) -> dict[str, Any]:
        """{name: value} of the given arguments in `ADAPTER_ARGUMENTS`: adapters, quantization and frozen parameters."""
        return {name: value for name, value in self.current.items() if name in ADAPTER_ARGUMENTS}

    @functools.cached_property
    def quantization(self) -> dict[str, Any] | None:
        """{name: value} of the fields of a quantization_config; None if the model is not quantized."""
        short = {name: True for name in ("load_in_4bit", "load_in_8bit") if self.adapters.get(name)}
        return ((self.adapters.get("quantization_config") or {}) | short) or None

    @property
    def optimizer(self) -> str:
        """The name of the Trainer's optimizer; empty: the library's default."""
        given = self.training.get("optim") or ""
        return str(getattr(given, "value", given))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the argument `name`, by its old or its new name; `default` if it was not given."""
        return self.current.get(_current_names().get(name, name), default)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is on.

        As in transformers, `torch_compile_mode` or `torch_compile_backend` alone switches torch.compile on, too.
        """
        return any(map(self.training.get, COMPILING))

    @property
    def passed_over_on_a_cpu(self) -> list[str]:
        """One sentence for each given argument that the libraries silently ignore on a CPU."""
        ignored = {
            "fp16": "on a CPU the Trainer ignores fp16=True and trains in the weights' type: use bf16=True instead",
            "fsdp": "on a CPU accelerate ignores fsdp, and each rank keeps the whole model: use a GPU to shard it",
        }
        return [text for name, text in ignored.items() if self.training.get(name)]

    def samples_per_step(self, processes: int = 1) -> int:
        """Return the effective batch in samples: micro-batch x accumulation steps x processes."""
        micro_batch = self.training.get("per_device_train_batch_size", 8)
        return micro_batch * self.training.get("gradient_accumulation_steps", 1) * processes

    def replace(self, **changes: Any) -> "Arguments":
        """Return a copy with the values in `changes`, {name: value}, changed or added; they are not checked again."""
        kept = self.without(*(changes.keys() - self.given.keys()))  # drops those that are given by another name
        return Arguments({**kept.given, **changes})

    def without(self, *names: str) -> "Arguments":
        """Return a copy without the arguments in `names`, each by its old or its new name (see `_current_names`)."""
        now = _current_names()
        dropped = {now.get(name, name) for name in names}
        return Arguments({name: value for name, value in self.given.items() if now.get(name, name) not in dropped})

    def build(self, output_dir: str):
        """Build the library's own `TrainingArguments`, without this engine's own arguments (`OF_EXPERIMENTS`).

        `output_dir`: the folder to which the Trainer writes.

        Raises:
            ValueError: an unknown name, or a value that the library rejects.
        """
        import torch
        from transformers import TrainingArguments

        check_names(self.given)
        # Without a GPU the library rejects bf16 unless use_cpu is set.
        defaults = QUIET | ({} if torch.cuda.is_available() else {"use_cpu": True})
        return TrainingArguments(output_dir=output_dir, **(defaults | self.training))

    def to_python(self) -> str:
        """Return the arguments as Python code to paste."""
        lines = [f"    {name}={value!r}," for name, value in self.training.items()]
        text = "\n".join(["TrainingArguments(", *lines, ")"])
        given = [f"{name}={value!r}" for name, value in self.model.items()]
        given += [f"quantization_config={as_python(self.quantization)}"] if self.quantization else []
        if given:
            text += f"\n# and where the model is loaded: from_pretrained(..., {', '.join(given)})"
        peft = self.adapters.get("peft")
        if self.quantization and is_prepared(self.adapters, self.quantization):
            text += "\n# then prepare_model_for_kbit_training(model)"
        return text if peft is None else f"{text}\n# then get_peft_model(model, ...) with peft's {peft!r}"


@functools.cache
def _declared() -> type:
    """Return a dataclass with the fields of the installed `TrainingArguments`, or that class itself."""
    try:
        return _read()
    except Exception:  # a release whose source is written in another way: import it
        from transformers import TrainingArguments

        return TrainingArguments


def _read() -> type:
    """Return a dataclass with the fields of `TrainingArguments`, made from the source code of that class."""
    sources = [_source(name).body for name in ("debug_utils", "trainer_utils", "training_args")]
    classes = {node.name: node for source in sources for node in source if isinstance(node, ast.ClassDef)}
    names, fields = _Names(), []
    for name, node in classes.items():
        if any(ast.unparse(base) in ("Enum", "ExplicitEnum") for base in node.bases):
            members = {each.targets[0].id: _literal(each.value) for each in node.body if isinstance(each, ast.Assign)}
            names[name] = enum.Enum(name, members)
    # transformers' `HfArgumentParser` uses the name, type, default and metadata of each field.
    for node in classes["TrainingArguments"].body:
        if isinstance(node, ast.AnnAssign):
            options = {option.arg: option.value for option in node.value.keywords}
            written = options.get("metadata", ast.Dict([], []))
            metadata = {key.value: _literal(value) for key, value in zip(written.keys, written.values, strict=True)}
            metadata = {name: value for name, value in metadata.items() if value is not None}
            kind = eval(ast.unparse(node.annotation), {}, names)
            fields.append((node.target.id, kind, field(default=_literal(options.get("default")), metadata=metadata)))
    return dataclasses.make_dataclass("TrainingArguments", fields)


class _Names(dict):
    """Map each name in the annotations of `TrainingArguments` to a type, for `eval`; `_read` stores only the enums."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, getattr(typing, name, Any))


def _literal(node: ast.expr | None) -> Any:
    """Return the value of a literal; None for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _source(name: str) -> ast.Module:
    return ast.parse(_file(name).read_text(encoding="utf-8"))


def _file(name: str) -> Path:
    """Return the file of a module of the installed transformers, e.g. "hf_argparser"."""
    return Path(importlib.util.find_spec("transformers").origin).with_name(f"{name}.py")


@functools.cache
def known() -> frozenset[str]:
    """Return the argument names of an experiment.

    These are the fields of the installed `TrainingArguments`, and this engine's own arguments (`OF_EXPERIMENTS`).
    """
    return frozenset(field.name for field in dataclasses.fields(_declared())) | OF_EXPERIMENTS.keys()


@functools.cache
def _kernels() -> list[str]:
    """Return the names of the attention kernels that are part of the installed transformers, e.g. "sdpa"."""
    names = []
    if "transformers.modeling_utils" not in sys.modules:  # its import takes seconds, its source a quarter of one
        with contextlib.suppress(Exception):  # a release whose source is written in another way
            assigned = (node for node in ast.walk(_source("modeling_utils")) if isinstance(node, ast.Assign))
            (table,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "_global_mapping")
            names = [key.value for key in table.keys]
    if not names:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        names = [*ALL_ATTENTION_FUNCTIONS]
    return ["eager", *(name for name in names if "|" not in name)]


@functools.cache
def _current_names() -> dict[str, str]:
    """Return {old name: new name} of each pair in `_SYNONYMS`, or {new: old} if transformers lacks the new name."""
    return dict((old, new) if new in known() else (new, old) for old, new in _SYNONYMS)


def check_names(names: Iterable[str], *, also: Iterable[str] = ()) -> None:
    """Raise ValueError for the first name that is not a training argument; the message suggests the most similar one.

    `also`: further names that the caller accepts; the message may suggest these, too.
    """
    valid = known() | {old for pair in _SYNONYMS for old in pair if set(pair) & known()} | set(also)
    for name in names:
        if name == "output_dir":
            raise ValueError("output_dir cannot be set: leave it out, each experiment has a folder of its own")
        if name in valid:
            continue
        if name in _REMOVED:
            raise ValueError(f"{name!r} is no longer a training argument: {_REMOVED[name]}")
        if name in _OF_SEQ2SEQ:
            how = "leave it out. For the memory of generation, estimate inference with max_new_tokens"
            raise ValueError(f"{name!r} is an argument of Seq2SeqTrainer, and Trainer is what trains here: {how}")
        hint = nearest_text(name, valid) or "Use a name of transformers.TrainingArguments."
        raise ValueError(f"unknown training argument {shown(name)}. {hint}")


def parse(words: list[str], also: Iterable[str] = ()) -> Arguments:
    """Parse command-line words into `Arguments` as transformers' own parser does, e.g. `--bf16` or `--bf16 True`.

    `also`: further names that the error message may suggest in place of an unknown name, e.g. the command's options.

    Raises:
        ValueError: a word that is not a training argument, or a value that an argument does not accept.
    """
    import argparse

    library = runpy.run_path(str(_file("hf_argparser")))  # it imports nothing of its package
    own = [(name, kind, field(default=None, metadata={"help": text})) for name, (kind, text) in OF_EXPERIMENTS.items()]
    both = [_declared(), dataclasses.make_dataclass("OfExperiments", own)]
    parser = library["HfArgumentParser"](both, allow_abbrev=False, exit_on_error=False)
    for action in parser._actions:  # return typed arguments only, no defaults
        action.default = argparse.SUPPRESS
    try:
        given, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(_refused(parser, words, error)) from None
    check_names([*vars(given), *(word.lstrip("-").split("=")[0] for word in rest if word.startswith("--"))], also=also)
    if rest:
        raise ValueError(f"unexpected words: {' '.join(rest)}. Start each argument with --, e.g. --bf16 True")
    return Arguments.of(vars(given))


_KINDS = {int: "a whole number, in digits", float: "a number"}


def _refused(parser, words: list[str], error) -> str:
    """Return argparse's error as one line: the argument, its value, and the accepted values."""
    action = next(each for each in parser._actions if "/".join(each.option_strings) == error.argument_name)
    name = action.dest
    place = next(i for i, word in enumerate(words) if word.partition("=")[0] in action.option_strings)
    value = words[place].partition("=")[2] or "".join(words[place + 1 : place + 2])
    if error.message.startswith("expected"):
        return f"{name} needs a value: write --{name} VALUE"
    if action.choices:
        return f"{name}={shown(value)} is not a valid value. {nearest_text(value, map(str, action.choices))}"
    kind = _KINDS.get(action.type) or ("True or False" if "ruthy" in error.message else "")
    return f"{name}={shown(value)}: give {kind}" if kind else f"{name}={shown(value)}: {error.message}"


_AT_MOST_1 = ("adam_beta1", "adam_beta2", "label_smoothing_factor")
# Smallest values that make sense, for arguments that the library itself checks late or not at all.
_AT_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "per_device_eval_batch_size": 1,
    "dataloader_num_workers": 0,
    "seed": 0,
    "max_new_tokens": 1,
    "num_beams": 1,
}


def _check_values(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a value in `given`, {name: value}, of a wrong type, outside the choices or out of range."""
    declared = typing.get_type_hints(_declared()) | {name: kind for name, (kind, _) in OF_EXPERIMENTS.items()}
    declared["fsdp"] |= bool  # the library also accepts a bool
    for name, value in given.items():
        now = _current_names().get(name, name)
        if now in _AT_LEAST:
            whole_number(name, value, _AT_LEAST[now])
            continue
        kind, parts = declared[now], typing.get_args(declared[now])
        choices = [each.value for part in parts if isinstance(part, enum.EnumType) for each in part]
        choices = parts if typing.get_origin(kind) is Literal else choices
        chosen = getattr(value, "value", value)
        of_torch = shown(chosen).removeprefix("torch.")  # the name of a dtype
        if choices and chosen not in choices and of_torch not in choices:
            near = nearest_text(shown(chosen)[1:-1], choices)
            raise ValueError(f"{name}={shown(chosen)} is not a valid value. {near}")
        if value is not None or not (choices or kind is bool):
            of_kind(name, value, kind)
        most = 1 if name in _AT_MOST_1 else MOST
        if isinstance(value, float | int) and not 0 <= value <= most and name != "local_rank":
            raise ValueError(f"{name}={shown(value)}: give a number from 0 to {most:,}")
        if isinstance(value, str) and value.startswith("{"):  # the Trainer's error would not name the argument
            with reading(f"{name}={shown(value)}", "JSON", "a JSON object"):
                from_json(value)
