"""The commands about one training: measure it, estimate it, explain it, rehearse it, or find arguments that fit.

`cli` registers these functions as commands. The commands share options and the way of printing results. `task_of` reads
the options that describe the task.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainmem import command_options as common
from trainmem.core import arguments, hardware
from trainmem.core.task import Task
from trainmem.measure.runner import Runner
from trainmem.tables import table
from trainmem.texts import bytes_text, phase_text, whole_number


def measure(
    context: typer.Context,
    model: common.Model,
    seq_len: common.SeqLen = None,
    architecture: common.Architecture = None,
    image_size: common.ImageSize = None,
    audio_seconds: common.AudioSeconds = None,
    objective: common.Objective = "",
    dataset_size: common.DatasetSize = 512,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps to time, e.g. 10 (default: 3 on a CPU, 20 or 30 on a GPU).")
    ] = None,
    processes: common.Processes = 1,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Measure memory only; skip the timing.")] = False,
    inference: common.Inference = False,
    json_output: common.Json = False,
) -> int:
    """Train a model for a few steps in a fresh subprocess and print its memory and speed.

    Every other option is passed on as a training argument of transformers.
    Examples: --bf16, --per_device_train_batch_size 4, --gradient_checkpointing True, --optim adafactor.
    Exit code 0: the training ran to its end. 1: the training failed. 2: an argument is wrong.
    """
    given = common.training_arguments(context, context.args)
    task = common.task_of(context)
    runner = Runner(timeout=3600)
    if inference:
        run = runner.infer(model, task=task, **given)
    else:
        meters = ("memory",) if memory_only else ("memory", "time")
        run = runner.train(model, task=task, measure=meters, steps=steps, processes=processes, **given)
    caption = "; ".join(filter(None, [f"{task}, {runner.machine.name}", run.weights]))
    lines = [repr(table([run], caption)), *common.size_lines(run.memory)]
    common.answer(common.run_json(run) if json_output else lines)
    return common.exit_code(run)


def estimate(
    context: typer.Context,
    model: common.Model,
    seq_len: common.SeqLen = None,
    architecture: common.Architecture = None,
    image_size: common.ImageSize = None,
    audio_seconds: common.AudioSeconds = None,
    objective: common.Objective = "",
    dataset_size: common.DatasetSize = 512,
    processes: common.Processes = 1,
    device: common.Device = None,
    card: common.Card = None,
    compute_capability: common.Capability = None,
    inference: common.Inference = False,
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
    snapshot: common.Snapshot = None,
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
    json_output: common.Json = False,
) -> None:
    """Predict the peak memory of a training without running it; no GPU is needed.

    Takes the same training arguments as `measure`, e.g. --bf16 --per_device_train_batch_size 4.
    """
    from trainmem import estimate as estimate_package
    from trainmem.estimate import answers

    stored = context.with_resource(answers.stored())
    given = common.training_arguments(context, context.args)
    target_device = {"card": card, "device": device, "compute_capability": common.capability(compute_capability)}
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
        return common.answer(result if json_output else [repr(worst), *(f"- {text}" for text in worst.assumptions)])
    if multiple != 1:
        raise ValueError(f"--pad-to-multiple-of={multiple} has no effect without --lengths: add --lengths FILE")
    estimated = estimate_package.estimate(
        common.task_of(context),
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
        common.answer({"status": "ok"} | about | common.memory_json(memory) | {"versions": hardware.versions()})
        return
    on_gpu = estimated.device == "cuda"
    peak = f"peak {bytes_text(memory.peak_bytes, on_gpu)}, {phase_text(memory.peak_phase)}"
    lines = [f"{model} on {card or estimated.device}: {peak}; {estimated.weights}"]
    how = stored.note or f"estimated in {estimated.seconds:.1f} s"
    lines += [*common.size_lines(memory, on_gpu), *map(repr, fits), how]
    lines += ["assumptions:"] if estimated.assumptions else []
    common.answer([*lines, *(f"- {text}" for text in estimated.assumptions)])


def explain(
    context: typer.Context,
    model: common.Model,
    seq_len: common.SeqLen = None,
    architecture: common.Architecture = None,
    image_size: common.ImageSize = None,
    audio_seconds: common.AudioSeconds = None,
    objective: common.Objective = "",
    dataset_size: common.DatasetSize = 512,
    processes: common.Processes = 1,
    device: common.Device = None,
    card: common.Card = None,
    compute_capability: common.Capability = None,
    json_output: common.Json = False,
) -> None:
    """Explain why one recipe takes more memory than another, argument by argument and tensor by tensor.

    The training arguments before --then are recipe A.
    Recipe B is A with the arguments after --then added; they replace A's values.
    Example: perf-helpers explain --model gpt2 --card t4 --then --gradient_checkpointing --optim adafactor
    """
    from trainmem.estimate import answers, explanation

    stored = context.with_resource(answers.stored())
    words = context.args
    if words.count("--then") != 1 or words[-1] == "--then":
        raise ValueError("--then must be given once, followed by training arguments of recipe B, e.g. --then --bf16")
    own = {name for parameter in context.command.params for name in parameter.opts} - {"--json"}
    typed = common.invocation(context).words  # `words` lacks the command's own options
    if late := own & {word.partition("=")[0] for word in itertools.dropwhile("--then".__ne__, typed)}:
        raise ValueError(f"{min(late)} applies to both recipes: give it before --then")
    place = words.index("--then")
    first, both = (
        common.training_arguments(context, each) for each in (words[:place], words[:place] + words[place + 1 :])
    )
    found = explanation.explain(
        common.task_of(context),
        first,
        both,
        card=card,
        device=device,
        compute_capability=common.capability(compute_capability),
        processes=processes,
    )
    lines = [repr(found), *([stored.note] if stored.note else [])]
    common.answer({"status": "ok", **found.to_dict(), "versions": hardware.versions()} if json_output else lines)


def rehearse(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Model: a preset, a config.json, a model folder or a name on the Hub, e.g. gpt2.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Function of yours to run instead, called with the task, e.g. train.py:main.")
    ] = None,
    card: common.Card = None,
    compute_capability: common.Capability = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of the GPU, e.g. 16GB or 16GiB (default: the card's).")
    ] = None,
    seq_len: common.SeqLen = None,
    architecture: common.Architecture = None,
    image_size: common.ImageSize = None,
    audio_seconds: common.AudioSeconds = None,
    objective: common.Objective = "",
    dataset_size: common.DatasetSize = 512,
    processes: common.Processes = 1,
    inference: common.Inference = False,
    snapshot: common.Snapshot = None,
    assume: common.Assume = False,
    json_output: common.Json = False,
) -> int:
    """Run a training dry on a GPU you do not have, and print the memory that torch's own CUDA allocator takes.

    A rehearsal runs torch's CUDA build on a stub CUDA runtime: nothing is computed or timed.
    The command takes the same training arguments as `measure`.
    Exit code 0: the training fits and ran to its end. 1: it does not fit, or failed.
    Exit code 2: an argument is wrong, or the training needs a tensor's value.

    To rehearse a command of yours, put it after `--`: perf-helpers rehearse --card t4 -- python train.py
    When your command ends, even by an error, the peaks of each of its processes are printed to standard error.
    The exit code is then 0 if your command finished, and 4 if it ran out of memory.
    It is 3 if your command needed a tensor's value, or a library that the stub lacks; see --assume.
    In all other cases it is the exit code of your command.
    """
    from trainmem import rehearsal

    whole_number("processes", processes, most=16)
    on = rehearsal.card(card, common.capability(compute_capability), device_memory, processes)
    if (words := rehearsal.own_command(common.invocation(context).words)) is not None:
        with _rehearsing():
            program = rehearsal.run(words, on, assumes=assume, output=2 if json_output else None)
        common.answer(program.to_dict()) if json_output else typer.echo(f"\n{program!r}", err=True)
        return program.exit_code
    if function is None and model is None and context.args and not context.args[0].startswith("-"):
        raise ValueError(f"a command of yours needs -- before it: -- {' '.join(context.args)}")
    given = common.training_arguments(context, context.args)
    if function is None and model is None:
        raise ValueError("nothing to rehearse: give --model, --function, or a command after --")
    task = common.task_of(context)
    what = task if function is None else common.function_of(function)
    with _rehearsing():
        settings = {"processes": processes, "inference": inference, "snapshot": snapshot}
        run = rehearsal.rehearse(what, on=on, task=task, **settings, **given)
    assumed = rehearsal.assumed(on)
    weights = f"; {run.weights}" if run.weights else ""
    lines = [f"{function or model} rehearsed on {on.name}: {run.status}{weights}"]
    if memory := run.memory:
        peak = f"  peak {bytes_text(memory.peak_bytes, binary=True)} allocated, {phase_text(memory.peak_phase)}"
        lines += [peak, *common.size_lines(memory, binary=True)]
    figures = {"rehearsed": True, "card": on.name, "assumptions": [assumed], **common.run_json(run)}
    common.answer(figures if json_output else [*lines, f"- {assumed}"])
    return common.exit_code(run)


def advise(
    context: typer.Context,
    model: common.Model,
    effective_batch: Annotated[int, typer.Option(help="Samples per optimizer update, over all ranks, e.g. 64.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of one device, e.g. 16GB or 16GiB (default: the card's).")
    ] = None,
    card: common.Card = None,
    seq_len: common.SeqLen = None,
    architecture: common.Architecture = None,
    image_size: common.ImageSize = None,
    audio_seconds: common.AudioSeconds = None,
    objective: common.Objective = "",
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
    processes: common.Processes = 1,
    device: common.Device = None,
    compute_capability: common.Capability = None,
    context_memory: Annotated[
        str | None, typer.Option("--context", help="Memory kept for the CUDA context, e.g. 450MiB (default: 530MiB).")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the first recipe by training with it, or without the GPU, rehearsing it."),
    ] = False,
    json_output: common.Json = False,
) -> None:
    """List the training arguments that fit a memory, the fastest first.

    Also prints why other recipes were left out.
    If nothing fits, it prints how much memory is missing, and which changes would help; the exit code is still 0.
    """
    from trainmem import advise as advise_package
    from trainmem.estimate import answers

    stored = context.with_resource(answers.stored())
    advice = advise_package.advise(
        common.task_of(context),
        effective_batch=effective_batch,
        memory=memory,
        card=card,
        must=arguments.parse([f"--{word}" for word in must or []]).given,
        avoid=avoid or [],
        may=may or [],
        largest=largest,
        device=device,
        compute_capability=common.capability(compute_capability),
        context_memory=context_memory,
        processes=processes,
        published=common.invocation(context).published,
    )
    with _rehearsing():
        verified = advise_package.verify(advice) if verify and advice.recipes else None
    lines = [repr(advice), *([f"Verified: {verified!r}"] if verified else []), *([stored.note] if stored.note else [])]
    common.answer(advice.to_dict() | {"verification": verified and verified.to_dict()} if json_output else lines)


@contextlib.contextmanager
def _rehearsing() -> Iterator[None]:
    """Turn a RuntimeError of a rehearsal (which computes no values) into a ValueError."""
    try:
        yield
    except RuntimeError as error:  # this machine cannot rehearse, or the code reads a tensor's values
        raise ValueError(f"cannot be rehearsed: {error}") from error
