"""The commands about one training: what it takes, what it would take and why, where it fits.

The functions are `cli`'s commands; what they are told and how they answer is the same for all.
"""

import contextlib
import dataclasses
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from perf_helpers import plots
from perf_helpers.lab import Lab, Task, arguments, hardware
from perf_helpers.records import Memory, Run
from perf_helpers.texts import bytes_text, name_text, whole_number

# Options that several commands have. A command returns its exit code, or None for 0.
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output and nothing else.")]
Model = Annotated[str, typer.Option(help="Preset, config.json, model folder, or a name on the Hub.")]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", "--seq_len", help="Tokens in a sequence; default: 512 or the model's limit.")
]
Architecture = Annotated[str | None, typer.Option(help="Class of transformers, if not the config's.")]
DatasetSize = Annotated[int, typer.Option(help="Samples in the generated data set.")]
Processes = Annotated[int, typer.Option(help="Ranks (gloo on CPU, nccl on CUDA).")]
Inference = Annotated[bool, typer.Option("--inference", help="Forward passes, or with --max_new_tokens answers.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: this machine's.")]
Snapshot = Annotated[
    Path | None, typer.Option(help="A file for torch's memory viewer, docs.pytorch.org/memory_viz; on cuda only.")
]
Card = Annotated[str | None, typer.Option(help="A GPU, here or not, e.g. t4, 'RTX 4090', a100-80gb.")]
Capability = Annotated[str | None, typer.Option(help="Of the GPU, e.g. 9.0.")]


def measure(
    context: typer.Context,
    model: Model,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    dataset_size: DatasetSize = 512,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps to time.")] = None,
    processes: Processes = 1,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Leave the timing out.")] = False,
    inference: Inference = False,
    json_output: Json = False,
) -> int:
    """Train a model for a few steps in a clean process and say what it took.

    Every other option is a training argument of transformers, spelt as its own parser takes it: --bf16,
    --per_device_train_batch_size 4, --gradient_checkpointing True, --optim adafactor, --attn_implementation eager.
    """
    given = _given(context, context.args)
    task = Task(model, seq_len, dataset_size, architecture)
    lab = Lab(timeout=3600)
    if inference:
        run = lab.infer(model, task=task, **given)
    else:
        meters = ("memory",) if memory_only else ("memory", "time")
        run = lab.train(model, task=task, measure=meters, steps=steps, processes=processes, **given)
    table = repr(plots.table([run], "; ".join(filter(None, [f"{task}, {lab.machine.name}", run.weights]))))
    answer(_run_json(run) if json_output else [table, *_sizes(run.memory)])
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
    allocator_settings: Annotated[str, typer.Option(help="What PYTORCH_CUDA_ALLOC_CONF would say.")] = "",
    torch_version: Annotated[
        str | None,
        typer.Option("--torch", help="Release of torch whose allocator is meant, e.g. 2.10 (default: the installed)."),
    ] = None,
    snapshot: Snapshot = None,
    lengths: Annotated[Path | None, typer.Option(help="A file with each sample's tokens: its worst batch.")] = None,
    multiple: Annotated[int, typer.Option("--pad-to-multiple-of", "--pad_to_multiple_of", help="With --lengths.")] = 1,
    json_output: Json = False,
) -> None:
    """Predict the peak memory of a training without running it; no GPU is needed.

    Takes the same training arguments as `measure`.
    """
    from perf_helpers import estimate as room

    given = _given(context, context.args)
    whose = {"card": card, "device": device, "compute_capability": _capability(compute_capability)}
    if lengths is not None:
        if inference or snapshot or processes > 1 or seq_len or allocator_settings:
            raise ValueError("--lengths is for a training of one process, without --seq-len, a snapshot or settings")
        from perf_helpers.estimate import lengths as module

        task, pads = Task(model, architecture=architecture), {"pad_to_multiple_of": multiple}
        worst = module.worst_batch(task, module.read(lengths), **pads, **whose, **given)
        told = {"status": "ok", **worst.to_dict(), "versions": hardware.versions()}
        return answer(told if json_output else [repr(worst), *(f"- {text}" for text in worst.assumptions)])
    if multiple != 1:
        raise ValueError(f"--pad-to-multiple-of={multiple}: give it with --lengths, else nothing is padded")
    estimated = room.estimate(
        Task(model, seq_len, dataset_size, architecture),
        processes=processes,
        training=not inference,
        allocator_settings=allocator_settings,
        torch_version=torch_version,
        snapshot=snapshot,
        **whose,
        **given,
    )
    memory, fits = estimated.memory, [estimated.fits(card)] if card else []
    if json_output:
        about = {name: value for name, value in estimated.to_dict().items() if name not in ("name", "memory")}
        about |= fits[0].to_dict() if fits else {}
        answer({"status": "ok"} | about | _memory_json(memory) | {"versions": hardware.versions()})
        return
    on_gpu = estimated.device == "cuda"
    peak = f"peak {bytes_text(memory.peak_bytes, on_gpu)}, in the {memory.peak_phase}"
    sizes = _sizes(memory, on_gpu)
    lines = [f"{model} on {card or estimated.device}: {peak}; {estimated.weights}", *sizes, *map(repr, fits)]
    answer([*lines, f"followed in {estimated.seconds:.1f} s", *(f"- {text}" for text in estimated.assumptions)])


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
    """Why one recipe takes more memory than another: by switch, by tensor with its line of the model's code, and what
    may surprise. Training arguments before --then are those of A; B has them too, and what stands after --then, which
    adds to them or gives them another value: so the two differ in nothing that you did not mean to compare.

    perf-helpers explain --model gpt2 --card t4 --dtype bfloat16 --then --gradient_checkpointing --optim adafactor
    """
    from perf_helpers.estimate import explanation

    words = context.args
    if words.count("--then") != 1 or words[-1] == "--then":
        raise ValueError("--then: say it once, with training arguments of the second recipe after it")
    own = {name for parameter in context.command.params for name in parameter.opts} - {"--json"}
    if late := own & {word.partition("=")[0] for word in sys.argv[sys.argv.index("--then") :]}:
        raise ValueError(f"{min(late)} holds for both recipes: give it before --then")
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
    model: Annotated[str | None, typer.Option(help="As in `measure`.")] = None,
    function: Annotated[str | None, typer.Option(help="Your own, called with the task: file.py:function.")] = None,
    card: Card = None,
    compute_capability: Capability = None,
    device_memory: Annotated[str | None, typer.Option(help="Of the GPU, e.g. 16GB or 16GiB.")] = None,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    dataset_size: DatasetSize = 512,
    processes: Processes = 1,
    inference: Inference = False,
    snapshot: Snapshot = None,
    lessons: Annotated[str | None, typer.Option(help="Rehearse the course: all, core, or numbers as 05,06.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the course's rehearsal.")] = Path("build/rehearsal"),
    json_output: Json = False,
) -> int:
    """What a training takes on a GPU that is not here: torch's own CUDA allocator decides, and nothing is computed.

    Takes the same training arguments as `measure`. Exit code 1 where it does not fit: with torch's own message.
    After `--`, a command of yours is run on such a GPU instead: perf-helpers rehearse --card t4 -- python train.py
    """
    from perf_helpers import rehearsal
    from perf_helpers.rehearsal.lessons import rehearse_lessons

    if lessons is not None:
        with _rehearsing():
            failed = rehearse_lessons(lessons, out)
        summary = f"rehearsal: {len(failed)} problems" if failed else f"rehearsal: passed, see {out}"
        answer([*failed, summary])
        return int(bool(failed))
    whole_number("processes", processes, most=16)
    on = rehearsal.card(card, _capability(compute_capability), device_memory, processes)
    if "--" in sys.argv:
        if snapshot is not None:
            raise ValueError("--snapshot is for a model or a function; torch.cuda.memory._dump_snapshot is a command's")
        with _rehearsing():
            return rehearsal.run(sys.argv[sys.argv.index("--") + 1 :], on)
    given = _given(context, context.args)
    if function is None and model is None:
        raise ValueError("name a model with --model, a function with --function, or a command after --")
    task = Task(model or "bert-tiny", seq_len, dataset_size, architecture)
    what = task if function is None else _function(function)
    with _rehearsing():
        settings = {"processes": processes, "inference": inference, "snapshot": snapshot}
        run = rehearsal.rehearse(what, on=on, task=task, **settings, **given)
    assumed = (
        f"assumed: a CUDA context of {bytes_text(on.context_bytes, binary=True)}, no workspace for cuDNN's convolutions"
    )
    weights = f"; {run.weights}" if run.weights else ""
    lines = [f"{function or model} on {on.name}, rehearsed: {run.status}{weights}"]
    if memory := run.memory:
        peak = f"  allocated at the peak {bytes_text(memory.peak_bytes, binary=True)}, in the {memory.peak_phase}"
        lines += [peak, *_sizes(memory, binary=True)]
    figures = {"rehearsed": True, "card": on.name, "assumptions": [assumed], **_run_json(run)}
    answer(figures if json_output else [*lines, f"- {assumed}"])
    return _code(run)


def advise(
    model: Model,
    effective_batch: Annotated[int, typer.Option(help="Samples that an update sees.")],
    memory: Annotated[str | None, typer.Option(help="Of one device, e.g. 16GB or 16GiB; default: the card's.")] = None,
    card: Card = None,
    seq_len: SeqLen = None,
    architecture: Architecture = None,
    must: Annotated[list[str] | None, typer.Option(help="A fixed training argument, e.g. optim=adafactor.")] = None,
    avoid: Annotated[list[str] | None, typer.Option(help="A technique or argument that is not wanted.")] = None,
    may: Annotated[list[str] | None, typer.Option(help="Offered only to who allows it: lora, qlora.")] = None,
    largest: Annotated[
        str | None, typer.Option(help="model or sequence: the largest like this model, or the longest, that fits.")
    ] = None,
    processes: Processes = 1,
    device: Device = None,
    compute_capability: Capability = None,
    context_memory: Annotated[
        str | None, typer.Option("--context", help="Kept for the CUDA context, e.g. 450MiB; default: 530MiB.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train with the first recipe; without such a GPU it is rehearsed.")
    ] = False,
    json_output: Json = False,
) -> None:
    """The training arguments that fit a memory, the fastest first, and why not others.

    Exit code 0 also where nothing fits: it says by how much, and what would.
    """
    from perf_helpers import advise as room

    advice = room.advise(
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
    )
    with _rehearsing():
        verified = room.verify(advice) if verify and advice.recipes else None
    lines = [repr(advice), *([f"Verified: {verified!r}"] if verified else [])]
    answer(advice.to_dict() | {"verification": verified and verified.to_dict()} if json_output else lines)


@contextlib.contextmanager
def _rehearsing() -> Iterator[None]:
    """Where nothing can be rehearsed here, or a function needs values: the user's business, in one line."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"cannot be rehearsed: {error}") from error


def _given(context: typer.Context, words: list[str]) -> dict[str, Any]:
    """The training arguments among the words; of a misspelt one the command's own options are thought of too."""
    own = [name.lstrip("-") for parameter in context.command.params for name in parameter.opts]
    return arguments.parse(words, also=own).given


def _function(text: str) -> Callable[[Task], Any]:
    """The function that "file.py:name" names."""
    file, _, name = text.rpartition(":")
    if not (file.endswith(".py") and Path(file).is_file()):
        raise ValueError(f"--function {text}: write it as file.py:name, of a file that is there")
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise ValueError(f"{file} has no function {name!r}")
    return found


def _capability(text: str | None) -> tuple[int, int] | None:
    """The compute capability that "9.0" names."""
    if text is None:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ValueError(f"compute_capability={text!r}: write it as major.minor, e.g. 9.0 for an H100")
    return int(major), int(minor)


def _sizes(memory: Memory | None, binary: bool = False) -> list[str]:
    """Return the parts of a peak, if they are known, and what the allocator reserved; `binary` as in `bytes_text`."""
    parts = (memory and memory.breakdown) or {}
    lines = [f"  {name_text(category):<18} {bytes_text(size, binary):>12}" for category, size in parts.items() if size]
    if memory and memory.reserved_bytes:
        lines.append(f"  reserved by the allocator {bytes_text(memory.reserved_bytes, binary)}")
    return lines


def _run_json(run: Run) -> dict[str, Any]:
    """A run's figures side by side, in bytes and seconds; null where not measured."""
    record = run.to_dict()  # which has null for what is unknown
    timing = record["timing"] or {}
    about = ("status", "message", "weights", "arguments", "task", "processes", "losses", "machine", "versions", "date")
    figures = {name: record[name] for name in about} | _memory_json(run.memory)
    figures |= {name: timing.get(name) for name in ("step_seconds", "steps", "samples_per_second")}
    return figures | {"step_seconds_spread": timing.get("spread_seconds")}


def _memory_json(memory: Memory | None) -> dict[str, Any]:
    """All of a memory, its kind as "peak_kind"; null where not measured."""
    record = memory.to_dict() if memory else dict.fromkeys(item.name for item in dataclasses.fields(Memory))
    return {"peak_kind": record.pop("kind")} | record


def _code(run: Run) -> int:
    """The exit code of a run; why it failed goes to standard error."""
    if not run.ok:
        typer.echo(f"{run.status}: {run.message}", err=True)
    return int(not run.ok)


def answer(content: dict[str, Any] | list[str]) -> None:
    """One JSON object, or lines, on standard output."""
    typer.echo(json.dumps(content, default=str) if isinstance(content, dict) else "\n".join(content))
