"""perf-helpers: the command line. Results go to standard output, everything else to standard error."""

import dataclasses
import functools
import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from perf_helpers import commands
from perf_helpers.commands import Json, answer
from perf_helpers.lab import Lab, hardware, optional_packages
from perf_helpers.lab.forkserver import SERVER
from perf_helpers.texts import nearest_text

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure what training a transformer costs, and run the course that shows how to make it cost less.",
)
FailOn = Annotated[str, typer.Option("--fail-on", help="What may not be worse: memory, verdict, speed; with commas.")]
CourseFolder = Annotated[Path, typer.Option(help="Folder for notebooks, results.json, junit.xml, index.html.")]
_WITH_CLEAN_PROCESSES = ("measure", "estimate", "explain", "advise")
_INTERRUPTED = 130  # the exit code after Ctrl-C
TRAINING_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}  # all other options are such


@app.command()
def doctor(json_output: Json = False) -> int:
    """What this machine is and can do, what is wrong, and the remedy. Exit code 1: lessons cannot run as it is."""
    from perf_helpers.lab.doctor import diagnose

    machine, versions = hardware.describe(), hardware.versions()
    findings = diagnose(machine, versions)
    if not (broken := any(finding.level == "error" for finding in findings)):  # its room imports what may be broken
        from perf_helpers.rehearsal import build

        findings.append(build.finding())
    lines = [machine.name]
    for finding in findings:
        lines.append(f"{finding.level:>8}  {finding.subject}: {finding.text}")
        lines += [f"          -> {finding.remedy}"] if finding.remedy else []
    found = {"machine": machine.to_dict(), "versions": versions, "findings": [*map(dataclasses.asdict, findings)]}
    answer(found if json_output else lines)
    return int(broken)


@app.command()
def course(
    lessons: Annotated[list[str] | None, typer.Argument(help="Numbers, names or paths; none: all of them.")] = None,
    profile: Annotated[str, typer.Option(help="Sizes: auto, cpu, t4 or gpu.")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="A lesson fails at a verdict that is not expected.")] = False,
    out: CourseFolder = Path("build/course"),
    baseline: Annotated[Path | None, typer.Option(help="results.json of an earlier run to compare with.")] = None,
    fail_on: FailOn = "memory,verdict,speed",
    speeds: Annotated[bool, typer.Option(help="Time a few recipes, for comparison with other days.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one lesson may take.")] = 900,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Lessons at once (default: 2 on a CPU with the cores and memory, else 1).")
    ] = None,
) -> int:
    """Execute the lessons. Exit code 0: every lesson ran, and nothing is worse than in the baseline; with --strict also
    every verdict is the expected one. Else 1, and 2 where it could not run."""
    from perf_helpers.compare.compare import run_night
    from perf_helpers.course.results import failures, problems, to_send

    options = {"lessons": lessons or (), "profile": profile, "strict": strict, "timeout_per_lesson": timeout}
    options["at_once"] = at_once
    data, worse = run_night(out, baseline, _axes(fail_on), speeds, **options)
    for change in worse:
        typer.echo(f"worse than the baseline: {change['text']}", err=True)
    if lines := to_send(data):
        head = "This machine differs from those we know. Please send us these lines (an issue of the repository):"
        typer.echo("\n  ".join([head, *lines]), err=True)
    answer([str(out / "index.html")])
    return int(bool(worse or (problems(data) if strict else failures(data))))


@app.command()
def compare(
    old: Path,
    new: Path,
    fail_on: FailOn = "memory,verdict,speed",
    html: Annotated[Path | None, typer.Option(help="A file for the page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="A file for CI.")] = None,
    json_output: Json = False,
) -> int:
    """Two results.json: verdicts that changed, bytes that moved, values and speeds that moved beyond their noise.

    Exit code 0: the same or better; 1: worse; 2: could not be compared.
    """
    from perf_helpers.compare import compare as module
    from perf_helpers.records import write_whole

    axes = _axes(fail_on)
    found = module.compare(old, new)
    if html:
        write_whole(html, found.to_html())
    if junit:
        write_whole(junit, found.to_junit(axes))
    answer(found.to_dict() if json_output else [found.to_text()])
    return int(bool(found.worse(axes)))


@app.command()
def history(
    folder: Path,
    out: Annotated[Path, typer.Option(help="A file for the page.")] = Path("build/history.html"),
    json_output: Json = False,
) -> None:
    """All results.json below a folder as lines over time, with the runs in which a line changed."""
    from perf_helpers.compare import history as module

    histories = module.write(folder, out)
    answer({"histories": [*map(dataclasses.asdict, histories)]} if json_output else [str(out)])


@app.command()
def sweep(
    file: Path,
    scheduler: Annotated[str, typer.Option(help="Address of Dask's; default: workers on this machine.")] = "",
    workers: Annotated[int | None, typer.Option(help="On this machine; default: one for each GPU, else one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl.")] = Path("build/sweep"),
    wait: Annotated[float, typer.Option(help="Seconds to wait for a worker where there is none.")] = 600,
    json_output: Json = False,
) -> int:
    """Train with every combination of a grid of arguments (TOML), on several workers at once.

    Exit code 0: every row trained; 1: one did not; 2: could not run. What is in the folder already is not run again.
    """
    from perf_helpers import sweep as module

    tell, plan = functools.partial(typer.echo, err=True), module.Plan.read(file)
    with module.connected(scheduler, workers, wait, tell) as executor:
        found = module.run(Lab(out=out, executor=executor), plan, tell=tell)
    answer(found.to_dict() if json_output else [repr(found)])
    return int(not found.ok)


@app.command()
def report(directory: Path) -> None:
    """Make the pages of a course run again from its results.json and executed notebooks."""
    from perf_helpers.course.report import report as make

    answer([str(make(directory))])


def _axes(text: str) -> list[str]:
    """What "memory,speed" names."""
    from perf_helpers.compare.compare import AXES

    axes = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := set(axes) - {*AXES}:
        raise ValueError(f"fail-on: {nearest_text(min(unknown), AXES)}")
    return axes


for command in (commands.measure, commands.estimate, commands.explain, commands.rehearse):
    app.command(context_settings=TRAINING_ARGUMENTS)(command)
app.command()(commands.advise)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error (and JSON where JSON was asked for), exit code 2."""
    if len(sys.argv) < 2:
        sys.argv.append("--help")
    if any(word.startswith("--peft") or "lora" in word.lower() for word in sys.argv):
        optional_packages.offer("peft")
    if sys.argv[1] in _WITH_CLEAN_PROCESSES:
        # It takes seconds, in which a command does what it can; advice looks at optimizers of 8 bits.
        SERVER.start(with_bitsandbytes=sys.argv[1] == "advise")
    try:
        code = app(standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):  # older typers raise; a newer one makes the code of it
        code = _INTERRUPTED
    except Exception as error:
        # The parser's own mistakes are of classes that typer has from click or brings itself, depending on its version.
        told = getattr(error, "format_message", None)
        if not told and not isinstance(error, ValueError | OSError):
            raise
        message = " ".join((told() if told else str(error)).split())
        if "--json" in sys.argv:
            answer({"status": "invalid", "message": message})
        print(f"perf-helpers: {message}", file=sys.stderr)
        code = 2
    if code == _INTERRUPTED:
        print("perf-helpers: interrupted", file=sys.stderr)
    gc.freeze()  # else the interpreter looks for garbage among all that was imported, before it ends
    sys.exit(code)


if __name__ == "__main__":
    main()
