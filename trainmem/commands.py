"""The commands about one training: measure it, estimate it, explain it, rehearse it, or find arguments that fit.

`cli` registers these functions as commands. They share their options and the way they print results.
"""

import contextlib
import dataclasses
import itertools
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmem.core import arguments, hardware
from trainmem.core.task import Task
from trainmem.measure.runner import Runner
from trainmem.records import Memory, Run
from trainmem.tables import table
from trainmem.texts import bytes_text, name_text, phase_text, whole_number

if TYPE_CHECKING:
    from trainmem.advise.measured_speedups import Published

# Options that several commands have. A command returns its exit code, or None for 0.
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
    typer.Option("--assume", help="Answer questions about unknown values, e.g. comparisons with false; count them."),
]
Card = Annotated[
    str | None, typer.Option(help="GPU model, e.g. t4, 'RTX 4090' or a100-80gb; this machine need not have one.")
]
Capability = Annotated[str | None, typer.Option(help="Compute capability of the GPU, e.g. 9.0 (default: the card's).")]


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """What a command gets beside its options, as the `obj` of its context."""

    words: list[str] = dataclasses.field(default_factory=list)  # of the command line, as they were typed
    published: "Published | None" = None  # speed ratios for `advise`


def measure(
    context: typer.Context,
    model: Model,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    dataset_size: DatasetSize = 512,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps to time, e.g. 10 (default: 3 on a CPU, 20 or 30 on a GPU).")
    ] = None,
    processes: Processes = 1,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Measure memory only; skip the timing.")] = False,
    inference: Inference = False,
    json_output: Json = False,
) -> int:
    """Train a model for a few steps in a fresh subprocess and print its memory and speed.

    Every other option is passed on as a training argument of transformers.
    Examples: --bf16, --per_device_train_batch_size 4, --gradient_checkpointing True, --optim adafactor.
    Exit code 0: it trained. 1: the training failed. 2: an argument is wrong.
    """
    given = _given(context, context.args)
    task = Task(model, seq_len, dataset_size, architecture)
    runner = Runner(timeout=3600)
    if inference:
        run = runner.infer(model, task=task, **given)
    else:
        meters = ("memory",) if memory_only else ("memory", "time")
        run = runner.train(model, task=task, measure=meters, steps=steps, processes=processes, **given)
    caption = "; ".join(filter(None, [f"{task}, {runner.machine.name}", run.weights]))
    answer(_run_json(run) if json_output else [repr(table([run], caption)), *_sizes(run.memory)])
    return _code(run)


def estimate(
    context: typer.Context,
    model: Model,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    dataset_size: DatasetSize = 512,
    processes: Processes = 1,
    device: Device = None,
    card: Card = None,
    compute_capability: Capability = None,
    inference: Inference = False,
    allocator_settings: Annotated[
        str,
        typer.Option(
            help="Value of PYTORCH_CUDA_ALLOC_CONF to assume, e.g. expandable_segments:True (default: unset)."
        ),
    ] = "",
    torch_version: Annotated[
        str | None,
        typer.Option("--torch", help="torch release whose CUDA allocator is modelled, e.g. 2.12 (default: installed)."),
    ] = None,
    snapshot: Snapshot = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Text file of the tokens of each sample, e.g. lengths.txt; estimates the largest batch they make."
        ),
    ] = None,
    multiple: Annotated[
        int,
        typer.Option(
            "--pad-to-multiple-of",
            "--pad_to_multiple_of",
            help="Padding of each batch in tokens, e.g. 8; with --lengths.",
        ),
    ] = 1,
    json_output: Json = False,
) -> None:
    """Predict the peak memory of a training without running it; no GPU is needed.

    Takes the same training arguments as `measure`, e.g. --bf16 --per_device_train_batch_size 4.
    """
    from trainmem import estimate as estimate_package

    given = _given(context, context.args)
    target_device = {"card": card, "device": device, "compute_capability": _capability(compute_capability)}
    if lengths is not None:
        conflicts = {
            "--inference": inference,
            "--snapshot": snapshot,
            "--processes": processes > 1,
            "--seq-len": seq_len,
            "--allocator-settings": allocator_settings,
        }
        if conflict := next((name for name, is_given in conflicts.items() if is_given), ""):
            raise ValueError(f"{conflict} cannot be combined with --lengths: leave one of the two out")
        from trainmem.estimate import lengths as module

        task, pads = Task(model, architecture=architecture), {"pad_to_multiple_of": multiple}
        worst = module.worst_batch(task, module.read(lengths), **pads, **target_device, **given)
        result = {"status": "ok", **worst.to_dict(), "versions": hardware.versions()}
        return answer(result if json_output else [repr(worst), *(f"- {text}" for text in worst.assumptions)])
    if multiple != 1:
        raise ValueError(f"--pad-to-multiple-of={multiple} has no effect without --lengths: add --lengths FILE")
    estimated = estimate_package.estimate(
        Task(model, seq_len, dataset_size, architecture),
        processes=processes,
        training=not inference,
        allocator_settings=allocator_settings,
        torch_version=torch_version,
        snapshot=snapshot,
        **target_device,
        **given,
    )
    memory, fits = estimated.memory, [estimated.fits(card)] if card else []
    if json_output:
        about = {name: value for name, value in estimated.to_dict().items() if name not in ("name", "memory")}
        about |= fits[0].to_dict() if fits else {}
        answer({"status": "ok"} | about | _memory_json(memory) | {"versions": hardware.versions()})
        return
    on_gpu = estimated.device == "cuda"
    peak = f"peak {bytes_text(memory.peak_bytes, on_gpu)}, {phase_text(memory.peak_phase)}"
    lines = [f"{model} on {card or estimated.device}: {peak}; {estimated.weights}"]
    lines += [*_sizes(memory, on_gpu), *map(repr, fits), f"estimated in {estimated.seconds:.1f} s"]
    lines += ["assumptions:"] if estimated.assumptions else []
    answer([*lines, *(f"- {text}" for text in estimated.assumptions)])


def explain(
    context: typer.Context,
    model: Model,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    dataset_size: DatasetSize = 512,
    processes: Processes = 1,
    device: Device = None,
    card: Card = None,
    compute_capability: Capability = None,
    json_output: Json = False,
) -> None:
    """Explain why one recipe takes more memory than another, argument by argument and tensor by tensor.

    The training arguments before --then are recipe A.
    Recipe B is A with the arguments after --then added; they replace A's values.
    Example: perf-helpers explain --model gpt2 --card t4 --then --gradient_checkpointing --optim adafactor
    """
    from trainmem.estimate import explanation

    words = context.args
    if words.count("--then") != 1 or words[-1] == "--then":
        raise ValueError("--then must be given once, followed by training arguments of recipe B, e.g. --then --bf16")
    own = {name for parameter in context.command.params for name in parameter.opts} - {"--json"}
    typed = _invocation(context).words  # `words` lacks the command's own options
    if late := own & {word.partition("=")[0] for word in itertools.dropwhile("--then".__ne__, typed)}:
        raise ValueError(f"{min(late)} applies to both recipes: give it before --then")
    place = words.index("--then")
    first, both = (_given(context, each) for each in (words[:place], words[:place] + words[place + 1 :]))
    found = explanation.explain(
        Task(model, seq_len, dataset_size, architecture),
        first,
        both,
        card=card,
        device=device,
        compute_capability=_capability(compute_capability),
        processes=processes,
    )
    answer({"status": "ok", **found.to_dict(), "versions": hardware.versions()} if json_output else [repr(found)])


def rehearse(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Model: a preset, a config.json, a model folder or a name on the Hub, e.g. gpt2.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Function of yours to run instead, called with the task, e.g. train.py:main.")
    ] = None,
    card: Card = None,
    compute_capability: Capability = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of the GPU, e.g. 16GB or 16GiB (default: the card's).")
    ] = None,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    dataset_size: DatasetSize = 512,
    processes: Processes = 1,
    inference: Inference = False,
    snapshot: Snapshot = None,
    assume: Assume = False,
    json_output: Json = False,
) -> int:
    """Run a training dry on a GPU you do not have, and print the memory that torch's own CUDA allocator takes.

    A rehearsal runs torch's CUDA build on a stub CUDA runtime: nothing is computed or timed.
    It takes the same training arguments as `measure`.
    Exit code 1: the training does not fit, or failed.

    To rehearse a command of yours, put it after `--`: perf-helpers rehearse --card t4 -- python train.py
    At its end, whatever the end, this prints the peaks of each process to standard error.
    Exit code 0: it came to its end. 3: it needed a value, or a library that the stub does not have; see --assume.
    4: it ran out of memory. Otherwise: the program's own exit code.
    """
    from trainmem import rehearsal

    whole_number("processes", processes, most=16)
    on = rehearsal.card(card, _capability(compute_capability), device_memory, processes)
    if (words := rehearsal.own_command(_invocation(context).words)) is not None:
        with _rehearsing():
            program = rehearsal.run(words, on, assumes=assume, output=2 if json_output else None)
        answer(program.to_dict()) if json_output else typer.echo(repr(program), err=True)
        return program.exit_code
    given = _given(context, context.args)
    if function is None and model is None:
        raise ValueError("nothing to rehearse: give --model, --function, or a command after --")
    task = Task(model or "bert-tiny", seq_len, dataset_size, architecture)
    what = task if function is None else _function(function)
    with _rehearsing():
        settings = {"processes": processes, "inference": inference, "snapshot": snapshot}
        run = rehearsal.rehearse(what, on=on, task=task, **settings, **given)
    assumed = rehearsal.assumed(on)
    weights = f"; {run.weights}" if run.weights else ""
    lines = [f"{function or model} rehearsed on {on.name}: {run.status}{weights}"]
    if memory := run.memory:
        peak = f"  peak {bytes_text(memory.peak_bytes, binary=True)} allocated, {phase_text(memory.peak_phase)}"
        lines += [peak, *_sizes(memory, binary=True)]
    figures = {"rehearsed": True, "card": on.name, "assumptions": [assumed], **_run_json(run)}
    answer(figures if json_output else [*lines, f"- {assumed}"])
    return _code(run)


def advise(
    context: typer.Context,
    model: Model,
    effective_batch: Annotated[int, typer.Option(help="Samples per optimizer update, over all ranks, e.g. 64.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of one device, e.g. 16GB or 16GiB (default: the card's).")
    ] = None,
    card: Card = None,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    must: Annotated[
        list[str] | None, typer.Option(help="Training argument to keep, e.g. optim=adafactor; may be repeated.")
    ] = None,
    avoid: Annotated[
        list[str] | None,
        typer.Option(help="Technique or argument to leave out, e.g. gradient_checkpointing; may be repeated."),
    ] = None,
    may: Annotated[
        list[str] | None,
        typer.Option(help="Adapters to allow as well: lora or qlora (default: none); may be repeated."),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            help="Quantity to maximize: model (the largest similar preset that fits) or sequence (the longest)."
        ),
    ] = None,
    processes: Processes = 1,
    device: Device = None,
    compute_capability: Capability = None,
    context_memory: Annotated[
        str | None, typer.Option("--context", help="Memory kept for the CUDA context, e.g. 450MiB (default: 530MiB).")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the first recipe by training with it, or without the GPU, rehearsing it."),
    ] = False,
    json_output: Json = False,
) -> None:
    """List the training arguments that fit a memory, the fastest first.

    Also prints why other recipes were left out.
    If nothing fits, it prints by how much, and which changes would help; the exit code is 0 then, too.
    """
    from trainmem import advise as advise_package

    advice = advise_package.advise(
        Task(model, seq_len, architecture=architecture),
        effective_batch=effective_batch,
        memory=memory,
        card=card,
        must=arguments.parse([f"--{word}" for word in must or []]).given,
        avoid=avoid or [],
        may=may or [],
        largest=largest,
        device=device,
        compute_capability=_capability(compute_capability),
        context_memory=context_memory,
        processes=processes,
        published=_invocation(context).published,
    )
    with _rehearsing():
        verified = advise_package.verify(advice) if verify and advice.recipes else None
    lines = [repr(advice), *([f"Verified: {verified!r}"] if verified else [])]
    answer(advice.to_dict() | {"verification": verified and verified.to_dict()} if json_output else lines)


@contextlib.contextmanager
def _rehearsing() -> Iterator[None]:
    """Raise ValueError for a RuntimeError of the rehearsal: this machine cannot rehearse, or the code needs values."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"cannot be rehearsed: {error}") from error


def _invocation(context: typer.Context) -> Invocation:
    return context.obj or Invocation()


def _given(context: typer.Context, words: list[str]) -> dict[str, Any]:
    """Parse the training arguments in `words`; the suggestions for a misspelt one include the command's options."""
    own = [name.lstrip("-") for parameter in context.command.params for name in parameter.opts]
    return arguments.parse(words, also=own).given


def _function(text: str) -> Callable[[Task], Any]:
    """Return the function that "file.py:name" names. Raises ValueError if there is none."""
    file, _, name = text.rpartition(":")
    if not (file.endswith(".py") and Path(file).is_file()):
        raise ValueError(f"--function {text}: no such file; give file.py:function of an existing file")
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise ValueError(f"--function {text}: {file} has no function {name!r}; name one that it defines")
    return found


def _capability(text: str | None) -> tuple[int, int] | None:
    """Return the compute capability that e.g. "9.0" names, as (9, 0)."""
    if text is None:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ValueError(f"compute_capability={text!r}: give it as major.minor, e.g. 9.0 for an H100")
    return int(major), int(minor)


def _sizes(memory: Memory | None, binary: bool = False) -> list[str]:
    """Return a line per category of the peak, if they are known, and the totals that are allocated and reserved.

    `binary` is that of `bytes_text`.
    """
    sizes = {name_text(category): size for category, size in ((memory and memory.breakdown) or {}).items() if size}
    if memory and memory.reserved_bytes:  # an allocator on CUDA
        sizes |= {"total allocated": memory.peak_bytes, "total reserved": memory.reserved_bytes}
    return [f"  {name:<18} {bytes_text(size, binary):>12}" for name, size in sizes.items()]


def _run_json(run: Run) -> dict[str, Any]:
    """Return a run's figures by name, in bytes and seconds; None means not measured."""
    record = run.to_dict()  # which has null for what is unknown
    timing = record["timing"] or {}
    about = ("status", "message", "weights", "arguments", "task", "processes", "losses", "machine", "versions", "date")
    figures = {name: record[name] for name in about} | _memory_json(run.memory)
    figures |= {name: timing.get(name) for name in ("step_seconds", "steps", "samples_per_second")}
    return figures | {"step_seconds_spread": timing.get("spread_seconds")}


def _memory_json(memory: Memory | None) -> dict[str, Any]:
    """Return a memory's fields, its kind as "peak_kind"; None means not measured."""
    record = memory.to_dict() if memory else dict.fromkeys(item.name for item in dataclasses.fields(Memory))
    return {"peak_kind": record.pop("kind")} | record


def _code(run: Run) -> int:
    """Return a run's exit code, 0 or 1; if it failed, print why to standard error."""
    if not run.ok:
        typer.echo(f"{run.status}: {run.message}", err=True)
    return int(not run.ok)


def answer(content: dict[str, Any] | list[str]) -> None:
    """Print one JSON object, or lines, to standard output."""
    typer.echo(json.dumps(content, default=str) if isinstance(content, dict) else "\n".join(content))
