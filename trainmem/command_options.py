"""The options that commands share, and the way commands read arguments and print results."""

import dataclasses
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmem.core import arguments
from trainmem.core.task import Task
from trainmem.records import APART, Memory, Run
from trainmem.texts import bytes_text, name_text

if TYPE_CHECKING:
    from trainmem.advise.measured_speedups import Published

# Options that several commands share. A command returns its exit code, or None for 0.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output and nothing else.")]
Model = Annotated[
    str, typer.Option(help="Model: a preset, a config.json, a model folder or a name on the Hub, e.g. bert-tiny.")
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len", "--seq_len", help="Tokens per sequence, e.g. 128 (default: 512, or the model's limit if smaller)."
    ),
]
Architecture = Annotated[
    str | None,
    typer.Option(help="Model class of transformers, e.g. LlamaForCausalLM (default: the one the config names)."),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        "--image_size",
        help="Height and width of images in pixels, e.g. 448 (default: the model's); 0: text only.",
    ),
]
AudioSeconds = Annotated[
    float | None,
    typer.Option("--audio-seconds", "--audio_seconds", help="Seconds of audio per sample, e.g. 10 (default: 10)."),
]
Objective = Annotated[
    str,
    typer.Option(
        help="Loss over pairs: contrastive (embeddings) or preference (a reward model) (default: the model's own)."
    ),
]
DatasetSize = Annotated[int, typer.Option(help="Samples in the generated data set, e.g. 64.")]
Processes = Annotated[int, typer.Option(help="Number of ranks, e.g. 2; they use gloo on a CPU, nccl on CUDA.")]
Inference = Annotated[
    bool, typer.Option("--inference", help="Run forward passes only; with --max_new_tokens N, generate N tokens.")
]
Device = Annotated[str | None, typer.Option(help="Device type: cpu or cuda (default: this machine's).")]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        help="Memory snapshot to write, e.g. oom.pickle, for the viewer at docs.pytorch.org/memory_viz (CUDA only)."
    ),
]
Assume = Annotated[
    bool,
    typer.Option("--assume", help="Assume unknown values, e.g. that comparisons are false, and count the assumptions."),
]
Card = Annotated[
    str | None, typer.Option(help="GPU model, e.g. t4, 'RTX 4090' or a100-80gb; this machine need not have one.")
]
Capability = Annotated[str | None, typer.Option(help="Compute capability of the GPU, e.g. 9.0 (default: the card's).")]


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """Hold the command line and, for `advise`, published speed ratios; commands get both from typer's `Context.obj`."""

    words: list[str] = dataclasses.field(default_factory=list)  # the command line as the user typed it
    published: "Published | None" = None  # function that returns speed ratios, for `advise`


def invocation(context: typer.Context) -> Invocation:
    """Return the `Invocation` in a typer context, or an empty one if it has none."""
    return context.obj or Invocation()


def task_of(context: typer.Context, model: str = "bert-tiny") -> Task:
    """Return the task that a command's options describe.

    If an option is missing or None, its field has the default of `Task`. `model`: the model if no option names one.
    """
    names = ("model", "seq_len", "dataset_size", "architecture", "image_size", "audio_seconds", "objective")
    given = {name: context.params[name] for name in names if context.params.get(name) is not None}
    return Task(**{"model": model} | given)


def training_arguments(context: typer.Context, words: list[str]) -> dict[str, Any]:
    """Parse the training arguments in `words` and return {name: value}.

    Raises:
        ValueError: a word that is not a training argument; the message suggests similar training arguments or options.
    """
    own = [name.lstrip("-") for parameter in context.command.params for name in parameter.opts]
    return arguments.parse(words, also=own).given


def function_of(text: str) -> Callable[[Task], Any]:
    """Return the function that "file.py:name" names; it takes a task.

    Raises:
        ValueError: no such file, or no such function in it.
    """
    file, _, name = text.rpartition(":")
    if not (file.endswith(".py") and Path(file).is_file()):
        raise ValueError(f"--function {text}: no such file; give file.py:function of an existing file")
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise ValueError(f"--function {text}: {file} has no function {name!r}; name one that it defines")
    return found


def capability(text: str | None) -> tuple[int, int] | None:
    """Parse a compute capability, e.g. "9.0" to (9, 0); None for None.

    Raises:
        ValueError: the text is not of the form major.minor.
    """
    if text is None:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ValueError(f"compute_capability={text!r}: give it as major.minor, e.g. 9.0 for an H100")
    return int(major), int(minor)


def size_lines(memory: Memory | None, binary: bool = False) -> list[str]:
    """Return memory sizes as lines of text; [] if `memory` is None or has no sizes.

    The lines are: each category's bytes at the peak; the total allocated and reserved bytes, on CUDA only; and the peak
    of each phase outside the training steps. `binary`: whether to print GiB instead of GB.
    """
    sizes = {name_text(category): size for category, size in ((memory and memory.breakdown) or {}).items() if size}
    if memory and memory.reserved_bytes:  # an allocator on CUDA
        sizes |= {"total allocated": memory.peak_bytes, "total reserved": memory.reserved_bytes}
    phases = (memory and memory.phases) or {}
    sizes |= {f"peak of {phase}": phases[phase] for phase in APART if phase in phases}
    return [f"  {name:<18} {bytes_text(size, binary):>12}" for name, size in sizes.items()]


def run_json(run: Run) -> dict[str, Any]:
    """Return a run as {field: value} for JSON; an unmeasured value is None.

    The fields include status, task, arguments, memory in bytes, and times in seconds.
    """
    record = run.to_dict()  # unknown values are None here
    timing = record["timing"] or {}
    about = ("status", "message", "weights", "arguments", "task", "processes", "losses", "machine", "versions", "date")
    figures = {name: record[name] for name in about} | memory_json(run.memory)
    figures |= {name: timing.get(name) for name in ("step_seconds", "steps", "samples_per_second")}
    return figures | {"step_seconds_spread": timing.get("spread_seconds")}


def memory_json(memory: Memory | None) -> dict[str, Any]:
    """Return the fields of a `Memory` as {name: bytes or value}; all values are None if `memory` is None.

    The name of the field `kind` becomes "peak_kind".
    """
    record = memory.to_dict() if memory else dict.fromkeys(item.name for item in dataclasses.fields(Memory))
    return {"peak_kind": record.pop("kind")} | record


def exit_code(run: Run) -> int:
    """Return a run's exit code: 0, or 1 if the run failed, with the reason printed to standard error."""
    if not run.ok:
        typer.echo(f"{run.status}: {run.message}", err=True)
    return int(not run.ok)


def answer(content: dict[str, Any] | list[str]) -> None:
    """Print one JSON object, or lines of text, to standard output."""
    typer.echo(json.dumps(content, default=str) if isinstance(content, dict) else "\n".join(content))
