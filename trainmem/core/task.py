"""Define tasks (a model, its data and sizes) and profiles (defaults per kind of machine). Presets need no network."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmem.core import adapters, configurations, families, hardware
from trainmem.core.configurations import Weights
from trainmem.core.families import positions
from trainmem.records import Record
from trainmem.texts import arguments_of_kind, nearest_text, shown, whole_number

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
_ALIASES = {short: name for name, preset in PRESETS.items() for short in preset.get("also", ())}

_OF_LENGTHS = ("lengths", "pad_to_multiple_of", "packed")
_NO_DATA = "cannot generate data for {name}: name a class with architecture=, for one of {families}"
_OPTIONAL = ("image_size", "audio_seconds", "objective")  # not in older records


@dataclass(frozen=True)
class Task(Record):
    """Describe a model and its training data; build the model, its configuration and random examples of the data.

    Args:
        model: a preset (`PRESETS`), a config.json or a model folder, or the name of a model on the Hub.
        seq_len: tokens per sequence, including the tokens of an image; ignored by models that take only images. None:
            512, or the model's limit if that is less.
        dataset_size: sequences in the generated data set.
        architecture: name of the model's class in transformers, e.g. to train the model with another head. None: the
            class that the configuration names; if it names none, the usual class of the model type.
        config: fields of the configuration to replace, e.g. {"num_hidden_layers": 2}.
        data: "random": random tokens. "learnable": tokens with a rule that a small model learns in about a hundred
            steps (classification: does a marker token occur; language models: the second half repeats the first).
        seed: seed of the random weights and of the generated data.
        lengths: tokens of each sequence, in place of `seq_len` and `dataset_size`. A batch is padded to its longest
            sequence, or to the next multiple of `pad_to_multiple_of`; if `packed`, its sequences are joined into one
            row without padding, as by `DataCollatorWithFlattening`. If `lengths` are given, the memory of a
            training is measured or estimated over all batches of the data, and not only over two or three steps.
        image_size: height and width of images in pixels, after the processor has resized them. None: the size in the
            configuration, or a common size; 0: no images, for an image-text model that is trained on text only.
        audio_seconds: seconds of speech per sample; None: 10. Whisper always takes 30.
        objective: "contrastive" (embeddings of pairs of texts) or "preference" (a reward model, on pairs of answers);
            empty: the preset's, or the loss of the model's own class.
    """

    model: str = "bert-small"
    seq_len: int | None = None
    dataset_size: int = 512
    architecture: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    data: str = "random"
    seed: int = 0
    lengths: tuple[int, ...] = ()
    pad_to_multiple_of: int = 1
    packed: bool = False
    image_size: int | None = None
    audio_seconds: float | None = None
    objective: str = ""

    def __post_init__(self):
        arguments_of_kind(type(self), vars(self))
        if self.lengths:
            [whole_number("lengths", length) for length in self.lengths]
            for name, value in (("seq_len", max(self.lengths)), ("dataset_size", len(self.lengths))):
                object.__setattr__(self, name, value)
        whole_number("seed", self.seed, 0)
        if self.data not in ("random", "learnable"):
            raise ValueError(f"data={shown(self.data)}: choose 'random' or 'learnable'")
        for name in ("seq_len", "dataset_size", "pad_to_multiple_of"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if self.image_size is not None:
            whole_number("image_size", self.image_size, 0, 10_000)
        if self.audio_seconds is not None and not 0.1 <= self.audio_seconds <= 3600:
            raise ValueError(f"audio_seconds={shown(self.audio_seconds)}: give seconds from 0.1 to 3600")
        if self.objective not in ("", *families.OBJECTIVES):
            raise ValueError(f"objective={shown(self.objective)}: choose one of {', '.join(families.OBJECTIVES)}")

    def replace(self, **changes) -> "Task":
        """Return a copy of the task with the fields in `changes` changed; `config` is merged with the task's.

        Raises:
            ValueError: an unknown field.
        """
        names = [item.name for item in dataclasses.fields(self)]
        if unknown := changes.keys() - {*names}:
            raise ValueError(f"a task has no {', '.join(sorted(unknown))}. Choose from {', '.join(names)}.")
        if "config" in changes:
            changes["config"] = configurations.merged(self.config, changes["config"])
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value} in JSON types, to store with the results of a run.

        Fields that older stored tasks lack, e.g. `image_size` and `lengths`, are left out unless this task sets them.
        """
        content = super().to_dict()
        left_out = {name for name in _OPTIONAL if not content[name] and content[name] != 0}
        left_out |= set() if self.lengths else {*_OF_LENGTHS}
        return {name: content[name] for name in content if name not in left_out}

    def identity(self) -> str:
        """Return a text that is equal for equal tasks, and differs after a change of the model's local files.

        The text includes the configuration file's content and the times at which the weights' files were changed.
        """
        if (file := self._file()) is None:
            return repr(self)
        # The files of the weights may decide the type.
        saved = [(str(each), each.stat().st_mtime_ns) for each in configurations.weights_files(file.parent)]
        return repr((self, configurations.read_config(file), saved))

    @property
    def is_saved_quantized(self) -> bool:
        """Whether the configuration file (of a Hub model: the cached one) says that weights were saved quantized."""
        file = self._file() or self._cached_file()
        with contextlib.suppress(ValueError):  # `build_config` reports what is wrong with it
            return bool(file and configurations.read_config(file).get("quantization_config"))
        return False

    def _cached_file(self) -> Path | None:
        """Return the cached configuration file of a model on the Hub; None for other models, or if it is not cached."""
        if self._preset:
            return None
        from transformers.utils.hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # not a valid name on the Hub
            cached = try_to_load_from_cache(self.model, "config.json")
            return Path(cached) if isinstance(cached, str) else None
        return None

    def is_described_here(self) -> bool:
        """Return whether the configuration is a preset or a local file, not a name on the Hub."""
        return bool(self._file() or self._preset)

    @property
    def _preset(self) -> dict[str, Any] | None:
        """The entry in `PRESETS` that `model` names; None: `model` is a file, a folder or a name on the Hub."""
        return PRESETS.get(_ALIASES.get(self.model, self.model))

    def _file(self) -> Path | None:
        """Return the configuration file that `model` names, existing or not; None for a preset or a name on the Hub."""
        path = Path(self.model)
        if self._preset:
            return None
        is_file = path.suffix == ".json" or os.path.isfile(path)
        return path / "config.json" if os.path.isdir(path) else path if is_file else None

    def build_config(self):
        """Build the `PretrainedConfig`. Code of a model's repository is never run.

        Raises:
            ValueError: there is no such model, or its configuration is invalid.
        """
        if known := self._preset:
            fields = known.get("config", {}) | dict.fromkeys(known.get("nulls", ())) | {"dtype": known.get("dtype")}
            fields = configurations.merged(fields, self._own_fields())
            config = configurations.made("config", known["model_type"], fields)
            config.architectures = [known["architecture"]]
        elif file := self._file():
            fields = configurations.merged(configurations.read_config(file), self._own_fields())
            config = configurations.made(str(file), fields.pop("model_type"), fields)
        else:
            config = self._config_of_hub()
        for part in (config, families.text_of(config)):
            if getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0  # classification heads of decoders refuse batches without one
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # configurations on the Hub name it, plain ones do not
        return config

    @property
    def loss_objective(self) -> str:
        """The objective to train with, e.g. "contrastive"; "" means the loss of the model's own class.

        This is the task's `objective` or, if `objective` is empty and no `architecture` is given, the preset's.
        """
        of_preset = (self._preset or {}).get("objective", "") if not self.architecture else ""
        return self.objective or of_preset

    def _own_fields(self) -> dict[str, Any]:
        """Return `config` with `torch_dtype` renamed to `dtype`, and `num_labels` 1 for the objective "preference"."""
        own = dict(self.config)
        if self.loss_objective == "preference":
            own.setdefault("num_labels", 1)
        # `torch_dtype`, the older name, would not replace the `dtype` of a configuration file.
        return own | {"dtype": own.pop("torch_dtype")} if own.get("torch_dtype") and not own.get("dtype") else own

    def _config_of_hub(self):
        """Return the configuration of a name on the Hub; if the Hub does not answer quickly, the cached one."""
        from transformers import AutoConfig

        name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", self.model, re.ASCII)  # otherwise it is a path, or mistyped
        known = bool(name) and configurations.hub_answers()
        try:
            options = {"local_files_only": not known, "trust_remote_code": False}  # by default it would ask the user
            return AutoConfig.from_pretrained(self.model, **options, **self._own_fields())
        except (OSError, ValueError):
            where = "not on the Hub" if known or not name else "cannot be downloaded (the Hub does not answer)"
            where += f". {nearest_text(self.model.rpartition('/')[2].lower(), PRESETS)} Or give its config.json."
            raise ValueError(f"{shown(self.model)} is not a preset, a file or a folder, and {where}") from None

    def model_class(self, config=None) -> type:
        """Return the class of transformers to train.

        The first of these that exists is taken: the task's `architecture`; the class that the configuration names;
        the usual class for the configuration's model type. `config`: the task's configuration; None: build it.

        Raises:
            ValueError: there is no such class, or no data can be generated for the class that the configuration names.
        """
        import transformers

        name, known = self._class_name(config or self.build_config()), families.of_classes()
        found = getattr(transformers, name, None)
        if found is None:
            raise ValueError(
                f"transformers has no class {shown(name)}: name another with architecture=. {nearest_text(name, known)}"
            )
        if not self.architecture and not self.loss_objective and name not in known:
            raise ValueError(_NO_DATA.format(name=name, families=", ".join(families.FAMILIES)))
        return found

    def _class_name(self, config) -> str:
        """Return the name of the class that `model_class` returns, without importing the model's code."""
        name, known = self.architecture or next(iter(config.architectures or []), None), families.of_classes()
        # `usual_class` raises ValueError if no class of this model type computes such a loss.
        if not self.architecture and (objective := self.loss_objective):
            if name is None or known.get(name) != "sequence classification" or objective != "preference":
                name = families.usual_class(config, objective)
        elif not self.architecture and (name is None or families.is_bare(name)) and name not in known:
            name = families.usual_class(config)
        return name

    def family(self) -> str:
        """Return which data the model takes, e.g. "causal": one of `families.FAMILIES` or `families.OBJECTIVES`.

        Raises:
            ValueError: no data can be generated for the model's class.
        """
        if self.loss_objective:
            return self.loss_objective
        family = families.of_classes().get(name := self._class_name(self.build_config()))
        if family is None and self.model_class():  # which raises the error if there is no such class
            raise ValueError(_NO_DATA.format(name=name, families=", ".join(families.FAMILIES)))
        return "causal" if family == "image-text" and self.image_size == 0 else family

    @property
    def has_tokens(self) -> bool:
        """Whether examples are sequences, so that `seq_len` matters."""
        return self.family() not in families.WITHOUT_TOKENS

    def weights(self, dtype: Any = None, quantization: Mapping[str, Any] | None = None) -> Weights:
        """Return the type in which `from_pretrained` loads this model, and what decides it.

        As in transformers 5, the first of these that is given decides: `dtype`; the configuration's `dtype` (or the
        older `torch_dtype`); the type of the first weight in the folder's files; float32. If the model's class takes
        only a part of the configuration, e.g. `text_config`, that part's `dtype` counts. A model that was saved
        quantized stays quantized, whatever is requested.

        Args:
            dtype: the requested type, a torch.dtype or its name; None or "auto": no type is requested.
            quantization: the requested quantization, fields of a `BitsAndBytesConfig`; None: none is requested.

        Raises:
            ValueError: a saved quantization by another method than bitsandbytes, or a `dtype` that weights cannot have.
        """
        return self._weights(self._config_of_class(), dtype, quantization)

    def _weights(self, config, dtype: Any, quantization: Mapping[str, Any] | None) -> Weights:
        file = self._file()
        where = "preset" if self._preset else file.name if file else "config.json"
        chosen, source = self._dtype(config, dtype, where)
        saved = getattr(config, "quantization_config", None)
        if saved:
            saved = adapters.saved_quantization(saved if isinstance(saved, dict) else saved.to_dict(), self.model)
        by = where if saved else "quantization_config" if quantization else ""
        name = str(configurations.torch_dtype(chosen, source)).removeprefix("torch.")
        return Weights(name, source, saved or (dict(quantization or {}) or None), by)

    def _dtype(self, config, requested: Any, where: str) -> tuple[Any, str]:
        """Return (weights' dtype or its name, what decided it), see `weights`; `where`: "preset" or config file."""
        if requested not in (None, "auto"):
            return requested, "requested"
        if (named := config.dtype) is not None:
            by = "requested" if self._own_fields().get("dtype") else where
            return named.get("", "float32") if isinstance(named, dict) else named, by
        if (saved := self._dtype_of_weights()) is not None:
            return saved, f"the type of the saved weights, {where} names none"
        return "float32", where if self._preset else f"{where} names none"  # a preset was published in float32

    def _dtype_of_weights(self):
        """Return the torch.dtype of the first saved weight; None if this machine has no saved weights."""
        if file := self._file():
            return configurations.dtype_of_files(file.parent) if os.path.isdir(self.model) else None
        return configurations.dtype_of_files(cached.parent) if (cached := self._cached_file()) else None

    def _config_of_class(self):
        """Return the configuration that the class to train takes: the whole one or a part, e.g. the text model's."""
        config = self.build_config()
        if not config.sub_configs:  # asking for the class would import the model's code, and torch's compiler
            return config
        wanted = self.model_class(config).config_class
        parts = (getattr(config, name, None) for name in config.sub_configs)
        part = None if isinstance(config, wanted) else next((each for each in parts if isinstance(each, wanted)), None)
        if part is None:
            return config
        if quantization := getattr(config, "quantization_config", None):
            part.quantization_config = quantization
        return part

    def build_model(self, *, attn_implementation: str | None = None, dtype: Any = None, device: str | None = None):
        """Build the model with random weights, on `device`, in train mode; never quantized.

        Args:
            attn_implementation: "eager", "sdpa", ...; None: the library's choice.
            dtype: type of the weights, a torch.dtype or its name; None: the type that `Task.weights` returns.
            device: where the weights are created; "meta": without memory; None: the CPU.

        Raises:
            ValueError: transformers cannot build the configuration.
        """
        import torch

        whole, config = self.build_config(), self._config_of_class()
        options = {"dtype": getattr(torch, self._weights(config, dtype, None).dtype)}
        if attn_implementation:
            options["attn_implementation"] = attn_implementation
        torch.manual_seed(self.seed)
        try:
            with torch.device(device or "cpu"):
                kind = self.model_class(whole)
                kind = families.with_objective(kind, self.loss_objective) if self.loss_objective else kind
                model = kind._from_config(config, **options).train()
        except (ArithmeticError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"{self.model}: transformers cannot build this configuration ({error!r}): correct it"
            ) from error
        for pattern, kind in model._get_dtype_plan(options["dtype"]).items():  # as `from_pretrained` reads its files
            of_plan = re.compile(pattern.replace("*", ".*"))
            for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
                if of_plan.search(name) and weight.is_floating_point():
                    weight.data = weight.data.to(kind)
        return model

    def parameters(self) -> int:
        """Return the number of parameters, shared ones counted once; no memory is allocated for them."""
        return sum(parameter.numel() for parameter in self.build_model(device="meta").parameters())

    def with_text(self, **fields) -> "Task":
        """Return a copy of the task with `fields` replaced in its configuration.

        A composite configuration is changed in its text part.
        """
        config = self.build_config()
        text = families.text_of(config)
        part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
        return self.replace(config={part: fields} if part else fields)

    def with_padded_vocabulary(self, multiple: int) -> "Task":
        """Return a copy of the task with its vocabulary rounded up to a multiple of `multiple`.

        `resize_token_embeddings(pad_to_multiple_of=...)` rounds in the same way. Return the task itself if its
        vocabulary is a multiple of `multiple` already, or is unknown.
        """
        size = getattr(families.text_of(self.build_config()), "vocab_size", None) or 0
        return self.with_text(vocab_size=-(-size // multiple) * multiple) if size % multiple else self

    def length(self, config=None) -> int:
        """Return the tokens per sequence: `seq_len`, or its default.

        `config`: the task's configuration; None: build it.

        Raises:
            ValueError: `seq_len` exceeds the model's limit.
        """
        config = config or self.build_config()
        limit, family = positions(config), None
        if config.model_type in ("t5", "mt5", "umt5"):
            limit = None  # relative positions
        if limit and "roberta" in config.model_type:
            limit -= (config.pad_token_id or 0) + 1  # positions are numbered from the one after the padding token's
        if config.model_type in families.OF_SPECIAL_LENGTH:
            family = self.family()
        if family == "ctc":
            limit = families.frames(config, self.audio_seconds or families.SECONDS)
        if self.seq_len is None:
            usual = 512
            if family == "ctc":
                usual = max(limit // 4, 1)  # four outputs per character
            elif family == "image-text":
                usual = max(512, families.image_tokens(config, self.image_size) + 128)
            return min(usual, limit or usual)
        if limit and self.seq_len > limit:
            raise ValueError(f"seq_len={self.seq_len} is too large: {self.model} has positions for {limit} tokens")
        return self.seq_len

    def shortest(self) -> int:
        """Return the smallest possible `seq_len`: an image's tokens plus 2 for an image-text model; otherwise 1."""
        is_with_image = self.family() == "image-text"
        return families.image_tokens(self.build_config(), self.image_size) + 2 if is_with_image else 1

    def arrays(self, size: int | None = None) -> dict[str, Any]:
        """Generate `size` examples (None: `dataset_size`), and return {column: array}.

        A column is an input of the model's forward, or its labels: a numpy array with the examples along axis 0, or a
        list with one entry per example if the model takes a list (object detection, mask segmentation).

        Raises:
            ValueError: sizes that conflict, such as an image of more tokens than `seq_len`.
        """
        config, family = self.build_config(), self.family()
        if self.lengths and family not in families.OF_UNEQUAL_LENGTHS:
            raise ValueError(f"lengths are for sequences of text, not for {family}: give seq_len")
        length = self.length(config) if family not in families.WITHOUT_TOKENS else 0
        return families.Data(self, config, family, self.dataset_size if size is None else size, length).arrays()

    def dataset(self):
        """Return a `datasets.Dataset` of `dataset_size` examples, stored by Arrow and read as torch tensors."""
        from datasets import Dataset

        arrays = self.arrays()
        for name, array in arrays.items() if self.lengths else ():
            if array.ndim > 1 and array.dtype.kind != "f":  # floats are labels of whole examples, the others of tokens
                arrays[name] = [row[:size] for row, size in zip(array, self.lengths, strict=True)]
        return Dataset.from_dict(arrays).with_format("torch")

    def collator(self) -> Callable[[list[dict]], dict] | None:
        """Return the function that makes a batch of a list of examples; None: the Trainer's own collator can do it.

        The Trainer's own collator cannot batch examples of unequal `lengths`, or columns that stay lists in a batch.
        """
        if not self.lengths:
            names = families.LISTED.get(self.family())
            return functools.partial(families.listed, names=names) if names else None
        if self.packed:
            from transformers import DataCollatorWithFlattening

            return DataCollatorWithFlattening()
        return functools.partial(_padded, multiple=self.pad_to_multiple_of)

    def batch(self, size: int, device: Any = "cpu") -> dict[str, Any]:
        """Return `size` examples as one batch on `device`, {column: tensor}.

        Token ids have the shape (size, seq_len). If `arrays` returns a column as a list, the column is a list of
        tensors.
        """
        import torch

        def sent(value):
            if isinstance(value, dict):
                return {name: sent(each) for name, each in value.items()}
            return [sent(each) for each in value] if isinstance(value, list) else torch.tensor(value, device=device)

        return sent(self.arrays(size))

    def __str__(self) -> str:
        return f"{self.model}, {self.dataset_size} x {self.seq_len or 'model length'} ({self.data})"


def _padded(examples: list[dict], multiple: int) -> dict[str, Any]:
    """Return a batch of examples, {column: tensor}, with attention mask, padded to a multiple of `multiple` tokens."""
    import torch

    columns = {name: [example[name] for example in examples] for name in examples[0]}
    columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    width = -(-max(map(len, columns["input_ids"])) // multiple) * multiple

    def filled(row, value: int):
        is_of_tokens = row.dim() and not row.is_floating_point()  # floats are labels of whole examples
        return torch.nn.functional.pad(row, (0, width - len(row)), value=value) if is_of_tokens else row

    # Labels of tokens are padded with -100, which the loss ignores, other columns with 0.
    return {name: torch.stack([filled(row, -100 * (name == "labels")) for row in columns[name]]) for name in columns}


@dataclass(frozen=True)
class Profile:
    """Hold the defaults for one kind of machine: a task that it can run, a micro-batch, and how long to measure."""

    name: str
    task: Task
    micro_batch: int  # samples per device, of the vanilla recipe
    steps: int  # timed optimizer steps
    warmup_steps: int  # steps before these
    turns: int  # pairs of turns in a comparison
    # Seconds after which an experiment or comparison is ended: many times what it takes on a slow machine of that kind,
    # and no more than a learner waits.
    timeout: float


_SMALL, _LARGE = Task("bert-small", seq_len=256), Task("bert-large-uncased", seq_len=512)
PROFILES = {
    "cpu": Profile("cpu", _SMALL, micro_batch=4, steps=3, warmup_steps=1, turns=16, timeout=240),
    "t4": Profile("t4", _LARGE.replace(seq_len=256), micro_batch=4, steps=20, warmup_steps=3, turns=5, timeout=600),
    "gpu": Profile("gpu", _LARGE, micro_batch=4, steps=30, warmup_steps=5, turns=7, timeout=600),
}
# For tests in which lessons only have to run. Measurements at these sizes mean nothing, so no list of profiles has
# them, and "auto" never picks them. With fewer turns an exercise of lesson 03 would reject its own solution.
TINY = Profile("tiny", Task("bert-tiny", seq_len=32), micro_batch=4, steps=1, warmup_steps=1, turns=5, timeout=240)


def choose_profile(name: str = "auto", machine=None) -> Profile:
    """Return the profile called `name`.

    Args:
        name: "cpu", "t4" or "gpu"; "auto": the largest profile that the machine can hold; "tiny": for tests.
        machine: the `Machine` that "auto" looks at; None: this machine.

    Raises:
        ValueError: there is no profile of this name.
    """
    if name == "auto":
        machine = machine or hardware.describe()
        memory = max((gpu.memory_bytes or 0 for gpu in machine.gpus), default=0)
        name = "cpu" if machine.kind == "cpu" else "t4" if memory < 20e9 else "gpu"
    if name == TINY.name:
        return TINY
    if name not in PROFILES:
        raise ValueError(f"profile={shown(name)}: choose one of auto, {', '.join(PROFILES)}")
    return PROFILES[name]
