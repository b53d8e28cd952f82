"""The command line, `perf-helpers`. Results go to standard output, everything else to standard error."""

import dataclasses
import functools
import gc
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from perf_helpers.course.published_speedups import published
from perf_helpers.lab import Lab
from trainmem import commands
from trainmem.command_options import Invocation, Json, answer
from trainmem.core import hardware, optional_packages
from trainmem.measure.forkserver import SERVER
from trainmem.texts import nearest_text

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure or predict the memory and time of training a transformer, and run the course about reducing them.",
)
FailOn = Annotated[
    str,
    typer.Option("--fail-on", help="Comparisons that decide the exit code, separated by commas, e.g. memory,verdict."),
]
CourseFolder = Annotated[
    Path, typer.Option(help="Output folder for executed notebooks, results.json, junit.xml and index.html.")
]
_STARTS_SUBPROCESSES = ("measure", "estimate", "explain", "advise")
_INTERRUPTED = 130  # the exit code after Ctrl-C
TRAINING_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}  # the command itself parses them


def _needs_course(command: str) -> None:
    """Raise ValueError, naming the subcommand `command`, if a package that only the course needs is missing."""
    needed = "papermill", "nbconvert", "ipykernel", "ipywidgets", "matplotlib"
    if missing := [name for name in needed if not find_spec(name)]:
        raise ValueError(f"{command} needs {', '.join(missing)}: pip install 'perf-helpers[course]'")


@app.command()
def doctor(json_output: Json = False) -> int:
    """Check this machine: print what it can do, what is wrong and how to fix it.

    Exit code 0: lessons can run. 1: they cannot, until the lines marked "error" are fixed.
    """
    from perf_helpers.lab.doctor import about_rehearsal, diagnose

    machine, versions = hardware.describe(), hardware.versions()
    findings = diagnose(machine, versions)
    if not (broken := any(finding.level == "error" for finding in findings)):
        findings.append(about_rehearsal())
    lines = [machine.name]
    for finding in findings:
        lines.append(f"{finding.level:>8}  {finding.subject}: {finding.text}")
        lines += [f"          -> {finding.remedy}"] if finding.remedy else []
    found = {"machine": machine.to_dict(), "versions": versions, "findings": [*map(dataclasses.asdict, findings)]}
    answer(found if json_output else lines)
    return int(broken)


@app.command()
def course(
    lessons: Annotated[
        list[str] | None, typer.Argument(help="Lesson numbers, names or paths, e.g. 05 06 (default: all lessons).")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Model and batch sizes: cpu, t4, gpu, or auto to fit this machine's memory.")
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail a lesson if a verdict is not the expected one.")
    ] = False,
    out: CourseFolder = Path("build/course"),
    baseline: Annotated[
        Path | None, typer.Option(help="Earlier run to compare with: its results.json or its folder (default: none).")
    ] = None,
    fail_on: FailOn = "memory,verdict,speed",
    speeds: Annotated[bool, typer.Option(help="Time a few fixed recipes, so that later runs can be compared.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit per lesson in seconds, e.g. 600.")] = 900,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Lessons to run at once (default: up to 4 on a CPU with enough memory, otherwise 1)."),
    ] = None,
) -> int:
    """Run the lessons, all or those named, and write a report.

    Exit code 0: every lesson ran, and nothing is worse than in --baseline.
    Exit code 1: a lesson failed or something is worse; with --strict also: a claim's verdict is not the expected one.
    Exit code 2: the course could not start.
    """
    _needs_course("course")
    from perf_helpers.compare.compare import run_nightly
    from perf_helpers.course.results import failures, problems, to_send

    options = {"lessons": lessons or (), "profile": profile, "strict": strict, "timeout_per_lesson": timeout}
    options["at_once"] = at_once
    data, worse = run_nightly(out, baseline, _axes(fail_on), speeds, **options)
    for change in worse:
        typer.echo(f"worse than the baseline: {change['text']}", err=True)
    if lines := to_send(data):
        head = "Some verdicts are not the expected ones. Please report these lines in an issue of the repository:"
        typer.echo("\n  ".join([head, *lines]), err=True)
    answer([str(out / "index.html")])
    return int(bool(worse or (problems(data) if strict else failures(data))))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="Earlier run: its results.json or its folder.")],
    new: Annotated[Path, typer.Argument(help="Later run: its results.json or its folder.")],
    fail_on: FailOn = "memory,verdict,speed",
    html: Annotated[Path | None, typer.Option(help="HTML report to write, e.g. compare.html (default: none).")] = None,
    junit: Annotated[
        Path | None, typer.Option(help="JUnit XML report for CI to write, e.g. compare.xml (default: none).")
    ] = None,
    json_output: Json = False,
) -> int:
    """Compare two runs of the course: list changed verdicts of claims, changed bytes, and speed changes beyond noise.

    Exit code 0: no comparison in --fail-on is worse. 1: at least one is. 2: the runs cannot be compared.
    """
    from perf_helpers.compare import compare as module
    from trainmem.records import write_whole

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
    folder: Annotated[
        Path, typer.Argument(help="Folder of course runs, e.g. nightly; every results.json below it is read.")
    ],
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("build/history.html"),
    json_output: Json = False,
) -> None:
    """Plot many course runs over time: changes of exact values, e.g. bytes, and medians of noisy ones, e.g. seconds."""
    from perf_helpers.compare import history as module

    histories = module.write(folder, out)
    answer({"histories": [*map(dataclasses.asdict, histories)]} if json_output else [str(out)])


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="TOML file with the task and the grid of arguments, e.g. grid.toml.")],
    scheduler: Annotated[
        str, typer.Option(help="Address of a Dask scheduler, e.g. tcp://host:8786 (default: workers on this machine).")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(help="Number of workers on this machine, e.g. 2 (default: one per GPU, at least one).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that keeps the runs, in runs.jsonl.")] = Path("build/sweep"),
    wait: Annotated[float, typer.Option(help="Time limit in seconds while no worker is connected, e.g. 60.")] = 600,
    json_output: Json = False,
) -> int:
    """Train with every combination of a grid of arguments, on one or several workers.

    Runs that --out already holds are not repeated.
    Exit code 0: every combination trained. 1: at least one failed. 2: the sweep could not run.
    """
    from perf_helpers import sweep as module

    tell, plan = functools.partial(typer.echo, err=True), module.Plan.read(file)
    with module.connected(scheduler, workers, wait, tell) as executor:
        found = module.run(Lab(out=out, executor=executor), plan, tell=tell)
    answer(found.to_dict() if json_output else [repr(found)])
    return int(not found.ok)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Folder of a course run, e.g. build/course.")],
) -> None:
    """Rewrite the report of a course run, from its results.json and executed notebooks."""
    _needs_course("report")
    from perf_helpers.course.report import report as make

    answer([str(make(directory))])


def _axes(text: str) -> list[str]:
    """Split e.g. "memory,speed" into the axes of a comparison. Raises ValueError for an unknown axis."""
    from perf_helpers.compare.compare import AXES

    axes = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := set(axes) - {*AXES}:
        raise ValueError(f"--fail-on: {min(unknown)!r} is not a valid value. {nearest_text(min(unknown), AXES)}")
    return axes


for command in (commands.measure, commands.estimate, commands.explain, commands.rehearse):
    app.command(context_settings=TRAINING_ARGUMENTS)(command)
app.command()(commands.advise)


def main() -> None:
    """Run the command line.

    A user's mistake prints one line on standard error (with --json also an object on standard output) and exits with 2.
    """
    if len(sys.argv) < 2:
        sys.argv.append("--help")
    if any(word.startswith("--peft") or "lora" in word.lower() for word in sys.argv):
        optional_packages.offer("peft")
    if sys.argv[1] in _STARTS_SUBPROCESSES:
        # The fork server needs seconds to start, while the command prepares its work. `advise` tries 8-bit optimizers.
        SERVER.start(with_bitsandbytes=sys.argv[1] == "advise")
    warnings.formatwarning = lambda message, *_, **__: f"perf-helpers: {message}\n"
    try:
        code = app(standalone_mode=False, obj=Invocation(sys.argv[1:], published)) or 0
    except (typer.Abort, KeyboardInterrupt):  # older versions of typer raise; newer ones return the exit code
        code = _INTERRUPTED
    except Exception as error:
        # A usage error's class is click's or typer's own, depending on the version of typer; both have this method.
        format_message = getattr(error, "format_message", None)
        if not format_message and not isinstance(error, ValueError | OSError):
            raise
        message = " ".join((format_message() if format_message else str(error)).split())
        if "--json" in sys.argv:
            answer({"status": "invalid", "message": message})
        print(f"perf-helpers: {message}", file=sys.stderr)
        code = 2
    if code == _INTERRUPTED:
        print("perf-helpers: interrupted", file=sys.stderr)
    gc.freeze()  # otherwise the interpreter searches all imported modules for garbage before it exits
    sys.exit(code)


if __name__ == "__main__":
    main()
