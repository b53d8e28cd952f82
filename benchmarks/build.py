"""Keep recorded course runs, and make their pictures, results/README.md and the tables of the pages in docs/.

python benchmarks/build.py --record build/course    keep a course run as results/<machine>/<date>.json, then build
python benchmarks/build.py --suite FILE             keep rows of measure_gpu.py (GPU suite), then do as --estimates does
python benchmarks/build.py --estimates              compare the estimate with the recorded GPU runs, then build
python benchmarks/build.py                          build from the newest run of each machine
python benchmarks/build.py --check                  write nothing; exit code 1 if a page is not up to date

This script writes all of results/README.md, which has every table. Some tables are also in pages that people write,
between markers: README has the claims and the lessons, docs/rehearsal.md the guides' ten recipes, docs/estimate.md the
comparison of the estimate with other tools. PLACES lists the page of each block.

Measured and rehearsed results (results/rehearsed/, by rehearse.py) are never mixed: their files are read separately,
and no column of a table mixes both.
"""

import argparse
import itertools
import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import cuda_page
import gpu_page
import matrix_page
import measure_programs
import published_lora
import published_programs
import recipes
from runner import RESULTS, read_record, write_record
from tables import MIB, mebibytes, share, spread, table, verdict, versions

from perf_helpers import plots
from perf_helpers.compare.compare import is_beyond_noise
from perf_helpers.course.course import find_lessons
from perf_helpers.course.ledger import Verdict, load
from perf_helpers.course.results import decided_again, load_results, measured_text, recorded
from trainmem.cards import named
from trainmem.core.hardware import Machine
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.records import CATEGORIES, Run, write_whole
from trainmem.texts import name_text

ROOT = RESULTS.parent
PLACES = {  # {block between markers: its page}
    "finding": ROOT / "README.md",
    "lessons": ROOT / "README.md",
    "machines": ROOT / "docs" / "trust.md",
    "rehearsed": ROOT / "docs" / "rehearsal.md",
    "card": ROOT / "docs" / "rehearsal.md",
    "programs": ROOT / "docs" / "rehearsal.md",
    "estimate": ROOT / "docs" / "estimate.md",
    "cuda": ROOT / "docs" / "estimate.md",
    "adapters": ROOT / "docs" / "estimate.md",
}
PAGE = RESULTS / "README.md"
BESIDE = RESULTS / "estimate.json"  # by benchmarks/measure_estimate.py
ON_GPUS = RESULTS / "estimate_cuda.json"  # by --estimates
MATRIX = RESULTS / "matrix.json"  # by benchmarks/matrix.py
PRODUCTS = Path(__file__).with_name("products.toml")
NIGHTS = RESULTS / "nights.json"  # by benchmarks/measure_nights.py
PARTS_OF_COURSE = {"00": "I See", "04": "II One GPU", "15": "III Many devices", "19": "IV Beyond"}  # by first lesson
SUMMARY_LESSON = "14"  # compares the guides' ten recipes
PARTS = "MiB allocated / reserved, without the context"  # in one cell, for GPUs


def record(course: Path) -> Path:
    """Copy a course run's results.json to results/<machine>/<date>.json, without the timelines of its runs; return the
    path.

    `course`: folder of the course run.

    Raises:
        ValueError: there are no results, they were rehearsed, or lessons are missing. The newest record of a machine
            must have all lessons.
    """
    data = load_results(course)
    if data["machine"].get("rehearsed"):
        raise ValueError(f"{course} was rehearsed, not measured: keep it by benchmarks/rehearse.py --course")
    run = {lesson["name"] for lesson in data["lessons"]}
    if missing := sorted({path.stem for path in find_lessons()} - run):
        raise ValueError(f"{course} lacks {', '.join(missing)}: record a run of the whole course, by make course")
    for run in data["runs"]:
        if run.get("memory"):
            run["memory"]["timeline"] = None
    target = RESULTS / Machine.from_dict(data["machine"]).slug / f"{data['date'][:10]}.json"
    write_record(target, data)
    return target


def rehearsals() -> dict[str, dict]:
    """Return {card: its newest rehearsal, the content of results/rehearsed/<card>/<date>.json}.

    Raises:
        ValueError: a file is not marked as rehearsed.
    """
    found = {}
    for path in sorted(RESULTS.glob("rehearsed/*/*.json")):  # the newest of each card comes last
        data = read_record(path)
        if data.get("rehearsed") is not True:
            raise ValueError(f"{path} is no rehearsal")
        found[named(data["card"]).name] = data  # under the card's current name
    return found


def caption(data: dict, short: bool = False) -> str:
    """Return a text with the machine, versions, profile and date of a record.

    `data`: the record, e.g. a course run; `short`: only torch's and transformers' versions, and no profile.
    """
    about = versions(data, "torch", "transformers") if short else f"{versions(data)}, profile {data['profile']}"
    return f"{data['machine']['name']}, {about}, {data['date'][:10]}"


def picture(data: dict) -> None:
    """Draw the peak memory of the guides' recipes in a course run into a PNG next to the run's record.

    Draw nothing if the run has no breakdown of a recipe's memory. `data`: the course run.
    """
    import matplotlib

    matplotlib.use("Agg")
    runs = [run for run in _ten(data).values() if run.memory and run.memory.breakdown]
    if runs:
        axes = plots.memory(runs, title="Peak memory of the guides' ten recipes")
        axes.figure.supxlabel(caption(data), fontsize=9, x=0.01, ha="left")
        axes.figure.savefig(data["file"].with_suffix(".png"), dpi=120, metadata={"Software": None})


def newest(measured: dict[str, dict]) -> dict:
    """Return the newest recorded course run.

    `measured`: {machine: its newest course run}.
    """
    return max(measured.values(), key=lambda data: data["date"])


def verdicts(data: dict) -> tuple[int, int, str]:
    """Return (number of refuted claims, number of testable claims, text with the numbers of the other verdicts).

    `data`: the content of a course run's results.json.
    """
    number = Counter(claim["verdict"] for claim in decided_again(data["claims"]))
    apart = number.pop(Verdict.NOT_TESTABLE, 0)
    text = f"{number[Verdict.HOLDS]} hold, {number[Verdict.SMALLER]} are smaller than promised and "
    return (
        number[Verdict.REFUTED],
        number.total(),
        f"{text}{number[Verdict.TOO_SMALL]} too small to tell; {apart} more are not testable there",
    )


def finding(measured: dict[str, dict]) -> str:
    """Return README's first finding: how many of the testable claims the newest recorded run refutes.

    `measured`: {machine: its newest course run}.
    """
    data = newest(measured)
    refuted, testable, others = verdicts(data)
    total, (tested, _, _) = len(decided_again(data["claims"])), others.partition(";")
    guides = sum(claim["reference"]["source"] in ("2022 guide", "2023 guide") for claim in data["claims"])
    cores, kind = data["machine"]["cpu_cores"], "a GPU" if data["machine"]["kind"] == "cuda" else "a CPU"
    return (
        f"- **{refuted} of {testable} testable claims are refuted** on {kind} with {cores} cores; {tested}. "
        f"The other {total - testable} of all {total} need hardware that this machine lacks, or cannot be measured. "
        f"{guides} of the {total} come from the two guides, the others from related pages, papers and issues "
        f"([every claim with its number](results/README.md#scoreboard): {caption(data, short=True)})."
    )


def counts(measured: dict[str, dict]) -> str:
    """Return the scoreboard, one line per machine: the number of testable claims, and their number per verdict.

    `measured`: {machine: its newest course run}.
    """
    lines = []
    for name, data in measured.items():
        refuted, testable, others = verdicts(data)
        lines.append(f"- **{name}**: of {testable} claims {refuted} are refuted, {others} ({caption(data)})")
    return "\n".join(lines)


def lessons(measured: dict[str, dict]) -> str:
    """Return README's table of lessons.

    Names come from the bibliography, questions from the notebooks, minutes from the newest recorded run, and addresses
    from pyproject.toml.

    `measured`: {machine: its newest course run}.
    """
    data = newest(measured)
    seconds = {each["name"]: each["seconds"] - each.get("waited_seconds", 0) for each in data["lessons"]}
    names = re.findall(r"(?m)^## ((\d\d) .+)$", (ROOT / "notebooks" / "BIBLIOGRAPHY.md").read_text(encoding="utf-8"))
    titles = {number: name for name, number in names}
    repository = address().removeprefix("https://github.com/")
    rows = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        colab = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{path.name}"
        binder = f"https://mybinder.org/v2/gh/{repository}/main?urlpath=lab/tree/notebooks/{path.name}"
        took = f"{max(round(seconds[path.stem] / 60), 1)}" if path.stem in seconds else "not recorded"
        name = f"[{titles[path.name[:2]]}](notebooks/{path.name})"
        question, part = first.splitlines()[0].removeprefix("# "), PARTS_OF_COURSE.get(path.name[:2], "")
        rows.append([part, name, question, took, f"[Colab]({colab}) [Binder]({binder})"])
    about = "Minutes, rounded and at least 1, in a run in which other lessons ran meanwhile: do not add them up. "
    minutes = f"{data.get('seconds', sum(seconds.values())) / 60:.0f} minutes"
    about += f"All together took {minutes} ({caption(data, short=True)})."
    return f"{table(['part', 'lesson', 'question', 'computing, minutes', 'open in'], rows)}\n\n{about}"


def address() -> str:
    """Return the repository's address, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"]


def rehearsed_recipes(cards: dict[str, dict], measured: dict[str, dict], suites: dict[str, dict]) -> str:
    """Return a table of the memory of the guides' ten recipes: published, on rehearsed cards, on each machine, in the
    GPU suite.

    Args:
        cards: {card: its newest rehearsal}.
        measured: {machine: its newest course run}.
        suites: {machine: its newest report of the GPU suite}.
    """
    lines = []
    if not any(data["machine"]["kind"] == "cuda" for data in measured.values()):
        known = "speed measured by the GPU suite" if suites else "speed not measured"
        lines = [f"No GPU has run the whole course: memory rehearsed with torch's own allocator; {known}.", ""]
    one = next(iter(cards.values()))
    guide_card, context = one["guide"]["hardware"], one["guide"]["context_mb"]
    lines += [
        f"- **{guide_card}**, published: {one['guide']['source']}, MB (of 2**20 bytes) by NVML; in brackets less the "
        f"{context} MB that it gives for the CUDA context"
    ]
    columns = {}
    for name, data in cards.items():
        card = "compute capability {}.{}, {:.4g} GiB".format(*data["capability"], data["memory_bytes"] / 2**30)
        about = f"{card}, {Task.from_dict(data['task'])}, {versions(data)}, {data['date'][:10]}"
        lines.append(f"- **{name}**, rehearsed: {about}; {PARTS}")
        columns[f"{name}, rehearsed"] = {row["name"]: row for row in data["rows"]}
    for name, runs in ((name, _ten(data)) for name, data in measured.items()):
        if runs:
            lines.append(f"- **{name}**, measured: {_sizes(runs, one['task'])}")
            sizes = {run.name: {"status": run.status} | (run.to_dict()["memory"] or {}) for run in runs.values()}
            columns[f"{name}, measured"] = sizes
    for name, data in suites.items():
        lines.append(f"- **{name}**, measured by the GPU suite: {gpu_page.caption(data)}; {PARTS}")
        columns[f"{name}, measured by the suite"] = gpu_page.recipes_of(data)
    rows = []
    for row in one["rows"]:
        cells = [mebibytes(column.get(row["name"])) for column in columns.values()]
        rows.append([row["name"], f"{row['guide_mb']} ({row['guide_mb'] - context})", *cells])
    return "\n".join([*lines, "", table(["recipe", f"{guide_card}, published", *columns], rows)])


def rehearsed_claims(cards: dict[str, dict]) -> str:
    """Return a table of the memory claims that rehearsed courses decided: one row per claim, one column per card.

    `cards`: {card: its newest rehearsal}.
    """
    courses = {name: data["course"] for name, data in cards.items() if data["course"]}
    runs = "; ".join(f"{name}: profile {course['profile']}, {course['date'][:10]}" for name, course in courses.items())
    claims = _claims_table({f"{name}, rehearsed": course["claims"] for name, course in courses.items()}, "not decided")
    return f"The claims about memory, by the rehearsed course ({runs}):\n\n{claims}"


def rehearsed_counts(cards: dict[str, dict]) -> str:
    """Return one sentence with the number of rehearsed claims per verdict and card.

    `cards`: {card: its newest rehearsal}.
    """
    counted = [
        f"{name}, {_count(decided_again(data['course']['claims']))}" for name, data in cards.items() if data["course"]
    ]
    cards_text = "; ".join(counted) or "none yet"
    return f"The claims about memory, rehearsed: {cards_text}. [Each with its number](../results/README.md#on-gpus)."


def _claims_table(columns: dict[str, list[dict]], absent: str) -> str:
    """Return a table with a row per claim that any column decides.

    A row has the lesson, the claim, the guides' statement, the guides' figure and its machine, and verdicts.

    Args:
        columns: {heading: decided claims}.
        absent: text of a cell if the column does not decide the claim.
    """
    by_id = [{claim["id"]: claim for claim in decided_again(decided)} for decided in columns.values()]
    rows = []
    for claim in sorted(load().values(), key=lambda claim: claim.lesson):
        decisions = [decided.get(claim.id) for decided in by_id]
        if any(decisions):
            figure = ", on ".join(filter(None, (claim.guide.text, claim.guide.hardware)))
            about = [claim.lesson, f"`{claim.id}`", claim.says, figure]
            rows.append([*about, *(verdict(made, absent) for made in decisions)])
    return table(["lesson", "claim", "the guides say", "their figure", *columns], rows)


def _count(decided: list[dict]) -> str:
    """Count the verdicts of claims (rows of results.json) in words: "52 claims: 36 hold, 7 refuted, 9 not testable
    here".
    """
    number = Counter(claim["verdict"] for claim in decided)
    words = {each: "hold" if each is Verdict.HOLDS else str(each) for each in Verdict}
    return f"{len(decided)} claims: " + ", ".join(f"{number[key]} {word}" for key, word in words.items() if number[key])


def product_rates(measured: dict[str, dict]) -> str:
    """Return, in Markdown, a table of CPUs' matmul rates (GFLOP/s) in fp32, bf16 and fp16, and of the speed of training
    in bf16 divided by the speed in fp32.

    The rows are the CPUs listed in products.toml, then the CPUs of recorded course runs, where lesson 02 measures the
    rates and lesson 07 the speeds.

    `measured`: {machine: its newest course run, as in its results.json}.
    """
    rows = []
    for cpu in tomllib.loads(PRODUCTS.read_text(encoding="utf-8"))["cpu"]:
        rates = [cpu["fp32"], cpu["bf16"], cpu["fp16"]]
        rows.append([cpu["name"], cpu["flags"], *rates, cpu.get("training", "not measured"), cpu["measured"]])
    for data in measured.values():
        claims = {claim["id"]: claim for claim in data["claims"]}
        found = [run["value"][1] for run in data["runs"] if run["name"] == "two_ceilings" and run["value"]]
        if data["machine"]["kind"] == "cpu" and found and len(found[-1]) == 2:
            flags = ", ".join(flag for flag in data["machine"]["cpu_features"] if flag.endswith(("bf16", "fp16")))
            speed = claims.get("half-precision-faster-cpu")
            rates = [rate / 1e9 for rate in found[-1]]
            trained = measured_text(speed).replace("[", "(").replace(", ", " to ").replace("]", ")") if speed else ""
            when = f"one thread, {versions(data, 'torch')}, {data['date'][:10]}"
            rows.append([data["machine"]["name"], flags, *rates, "not measured", trained, when])
    shown = [[f"{cell:.3g}" if isinstance(cell, int | float) else cell for cell in row] for row in rows]
    ratios = [f"{row[3] / row[2]:.2g}" for row in rows]
    head = ["CPU", "16-bit flags", "fp32", "bf16", "bf16 / fp32", "fp16", "training in bf16 / in fp32", "measured"]
    lines = [[*row[:4], ratio, *row[4:]] for row, ratio in zip(shown, ratios, strict=True)]
    return f"Matmuls of 1024 x 1024, GFLOP/s.\n\n{table(head, lines)}"


def _ten(data: dict) -> dict[str, Run]:
    """Return {name: run} of the guides' ten recipes in a recorded course run; `data` is its results.json."""
    runs = [Run.from_dict(run) for run in data["runs"] if run["lesson"].startswith(SUMMARY_LESSON)]
    return {run.name: run for run in runs if run.name in recipes.ROWS}


def _sizes(runs: dict[str, Run], rehearsed: dict) -> str:
    """Describe a table's column of measured recipes in words, for the list above the table.

    The text names the task, its precision, and the kind of memory: counted by the lab, or allocated and reserved by
    torch. If the measured and the rehearsed task differ, the text warns that the column is about another model.

    Args:
        runs: {name of a recipe: its run}.
        rehearsed: the task of the rehearsed columns, as a dict.
    """
    first = next(iter(runs.values()))
    task = Task.from_dict(first.task)
    half = ", bf16 as half precision" if any(run.arguments.get("bf16") for run in runs.values()) else ""
    counted = not first.memory or first.memory.kind == "counted"
    what = "MiB counted" if counted else PARTS
    other = "" if task.to_dict() == rehearsed else "; **another model**: compare within this column only"
    return f"{task}{''.join(f', {name} {value}' for name, value in task.config.items())}{half}; {what}{other}"


def of_suite(data: dict) -> dict:
    """Return {"machine", "runs"} of a GPU suite, as a course run has them.

    The runs are the successful trainings of the part "estimate", which the estimate is compared with.

    `data`: the suite's report, a file of results/<machine>/gpu.
    """
    rows = [row for row in data["rows"] if row["part"] == "estimate" and row["status"] == "ok"]
    return {"machine": data["machine"], "runs": [run for row in rows for run in row["runs"]]}


def held_against(measured: dict[str, dict]) -> list[dict]:
    """Return one row per recorded training on a GPU: estimated memory next to measured memory.

    A row has "machine", "name", "task" and "arguments". "peak_bytes", "reserved_bytes" and "device_used_bytes" are each
    [estimated bytes, measured bytes]; "breakdown" is [estimated, measured], both {category: bytes}.

    `measured`: {machine: its newest course run}.
    """
    rows = []
    for data in measured.values():
        machine = Machine.from_dict(data["machine"])
        for run in map(Run.from_dict, data["runs"] if machine.kind == "cuda" else []):
            # A custom loop or a custom optimizer is not in the arguments, so it cannot be estimated.
            of_a_trainer = run.arguments and run.kind == "training" and run.value is None
            if run.ok and of_a_trainer and run.memory and run.memory.kind == "allocated":
                release = ".".join((machine.torch_build or "").split(".")[:2]) or None
                options = {"compute_capability": machine.gpus[0].capability, "processes": run.processes}
                options |= {"device": "cuda", "torch_version": release}
                estimated = estimate(Task.from_dict(run.task), **options, **run.arguments).memory
                row = {"machine": machine.name, "name": run.name, "task": run.task, "arguments": run.arguments}
                for name in ("peak_bytes", "reserved_bytes", "device_used_bytes", "breakdown"):
                    row[name] = [getattr(estimated, name), getattr(run.memory, name)]
                rows.append(row)
    return rows


def error_table(rows: list[dict]) -> str:
    """Return a table of the estimate's errors on GPUs, in per cent: median, 95th percentile and worst.

    It has a line for allocated, reserved and device-used bytes, and one for each category of memory. The error of a
    category is a share of the measured peak. If there are no rows, return a sentence instead.

    `rows`: one per training, as `held_against` returns them.
    """
    if not rows:
        return "On a GPU: not yet checked. Memory rehearsed by torch's own allocator; speed not measured."
    totals = {"allocated": "peak_bytes", "reserved": "reserved_bytes", "device-used": "device_used_bytes"}
    errors = {}
    for label, name in totals.items():
        errors[label] = [abs(value / true - 1) for value, true in (row[name] for row in rows) if value and true]
    pairs = [(row["breakdown"], row["peak_bytes"][1]) for row in rows if all(row["breakdown"])]
    for category in CATEGORIES:
        errors[f"{name_text(category)}, share of the peak"] = [
            abs(value.get(category, 0) - true.get(category, 0)) / peak for (value, true), peak in pairs
        ]
    lines = []
    for label, shares in errors.items():
        if shares:
            lines.append([label, str(len(shares)), *map(share, spread(shares).values())])
    return f"On GPUs, {len(rows)} trainings:\n\n{table(['', 'trainings', 'median', '95th percentile', 'worst'], lines)}"


def _estimate() -> str:
    """Return tables as text: the estimate compared with other tools on the same trainings, and its errors on GPUs."""
    report = read_record(BESIDE)
    on_gpus = read_record(ON_GPUS) if ON_GPUS.exists() else []
    head = ["tool", "answered", "median error", "worst", "seconds, median", "own memory, at most", "cannot express"]
    rows = []
    for row in report["table"]:
        errors = (share(row[name]) for name in ("median_error", "worst_error"))
        own = f"{row['most_own_bytes'] / MIB:.0f} MiB"
        answered = f"{row['answered']} of {row['asked']}"
        rows.append([row["tool"], answered, *errors, f"{row['median_seconds']:.1f}", own, row["cannot_express"]])
    large = []
    for name, answer in report["large"].items():
        cost = f"{answer['seconds']:.1f} s, {answer['own_bytes'] / MIB:.0f} MiB" if "seconds" in answer else "none"
        large.append(f"{name} {cost}")
    made_with = versions(report, "torch", "transformers")
    about = f"{report['what']}. {report['machine']}, {made_with}, {report['date'][:10]}."
    cost_text = f"Large models at 512 tokens, after the libraries were imported: {'; '.join(large)}."
    return "\n\n".join([about, table(head, rows), cost_text, error_table(on_gpus)])


def _speed() -> str:
    """Return the tables on the reliability of speed comparisons on a CPU, from speed.json."""
    report = read_record(RESULTS / "speed.json")
    about = f"{report['machine']}, {versions(report)}, {report['date'][:10]}; half of them under other load."
    rows = []
    for clock, name in (("cpu", "CPU time, which decides"), ("wall", "wall clock")):
        values = sorted(row[clock][0] for row in report["itself"])
        middle = values[len(values) // 40 : len(values) - len(values) // 40]
        spread = f"{middle[0]:.3f} to {middle[-1]:.3f}"
        rows.append([name, report["called an effect"][clock], spread, f"{values[0]:.3f} to {values[-1]:.3f}"])
    decided = []
    for name, verdicts in report["verdicts"].items():
        ratios = sorted(row["cpu"][0] for row in report["claims"] if row["name"] == name)
        counted = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        decided.append([f"`{name}`", counted, f"{ratios[0]:.3f} to {ratios[-1]:.3f}"])
    head = ["a recipe compared with itself, by", "called an effect", "95 % of the ratios", "all of them"]
    parts = [f"By `lab.compare`. {about}", table(head, rows)]
    return "\n\n".join([*parts, table(["claim, measured again each time", "verdicts", "ratios"], decided)])


def _nights() -> str:
    """Return the tables on the reliability of comparing two nightly runs, from nights.json and speed.json."""
    pairs, called = _false_alarms_of_claims()
    claims = (
        f"{called} of {pairs:,} pairs of the comparisons above, each of a recipe with itself, would be called a change."
    )
    report = read_record(NIGHTS)
    about = f"{report['machine']}, {versions(report, 'torch', 'transformers')}, {report['date'][:10]}"
    rows = [["the same code, called slower", *report["false alarms"].values()]]
    rows += [[f"a step {share} longer, found", *found.values()] for share, found in report["found"].items()]
    timed = f"Step times of a few recipes (`perf_helpers.compare.step_times`) in repeated nightly runs. {about}."
    head = ["pairs of nightly runs", "all, half under other load", "both quiet"]
    return "\n\n".join([claims, timed, table(head, rows)])


def _false_alarms_of_claims() -> tuple[int, int]:
    """Return (number of pairs of recorded speed comparisons, number of those pairs that would be reported as a change).

    Each comparison is of a recipe with itself, so every reported change is a false alarm. A change is reported if two
    speed ratios differ by more than a limit. `is_beyond_noise` sets the limit: the more values are compared, the higher
    it is. Here it is the limit for as many values as there are claims about time.
    """
    report = read_record(RESULTS / "speed.json")
    number = sum(claim.decided_by == "time" for claim in load().values())
    pairs = list(itertools.combinations([row["cpu"] for row in report["itself"]], 2))
    return len(pairs), sum(is_beyond_noise(a[0], a[1:], b[0], b[1:], number) for a, b in pairs)


def gpu_suites(suites: dict[str, dict], cards: dict[str, dict]) -> str:
    """Return the GPU suite's tables, one per machine, and a table of the claims that the suite decides.

    `suites`: {machine: its newest report of the GPU suite}; `cards`: {card: its newest rehearsal}.
    """
    if not suites:
        return gpu_page.NONE
    claims = _claims_table({name: data["claims"] for name, data in suites.items()}, "not decided")
    return "\n\n".join([*(gpu_page.section(name, data, cards) for name, data in suites.items()), claims])


def written(measured: dict[str, dict], cards: dict[str, dict], suites: dict[str, dict]) -> dict[Path, str]:
    """Return {page: its text} of the pages that people write, with the tables between markers brought up to date.

    Args:
        measured: {machine: its newest course run}.
        cards: {card: its newest rehearsal}.
        suites: {machine: its newest report of the GPU suite}.

    Raises:
        ValueError: the markers of a block are missing in its page, or occur twice.
    """
    blocks = {
        "finding": finding(measured),
        "lessons": lessons(measured),
        "machines": product_rates(measured),
        "rehearsed": f"{rehearsed_recipes(cards, measured, suites)}\n\n{rehearsed_counts(cards)}",
        "card": gpu_page.beside_a_card(suites),
        "programs": measure_programs.page(),
        "estimate": _estimate(),
        "adapters": cuda_page.adapters(),
        "cuda": f"{cuda_page.nearness()}\n\n{cuda_page.cuda_tools()}",
    }
    texts = {path: path.read_text(encoding="utf-8") for path in PLACES.values()}
    for name, path in PLACES.items():
        begin, end = f"<!-- {name}: made by benchmarks/build.py -->", f"<!-- end of {name} -->"
        block = f"{begin}\n{blocks[name]}\n{end}"
        found = f"{re.escape(begin)}.*?{re.escape(end)}"
        texts[path], count = re.subn(found, lambda _, b=block: b, texts[path], flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{path.name} has {count} places for {begin} ... {end}; it needs one")
    return texts


def page(measured: dict[str, dict], cards: dict[str, dict], suites: dict[str, dict]) -> str:
    """Return the text of results/README.md: every table, with the machine, versions and date of its numbers.

    Args:
        measured: {machine: its newest course run}.
        cards: {card: its newest rehearsal}.
        suites: {machine: its newest report of the GPU suite}.
    """
    pictures = {name: data["file"].with_suffix(".png") for name, data in measured.items()}
    parts = [
        "# Recorded results",
        "<!-- made by benchmarks/build.py, as a whole -->\n"
        "Each number is given with its machine; do not mix numbers of different machines. "
        "A number without an interval is an exact count or a single measurement.",
        "## Scoreboard",
        counts(measured),
        _claims_table({name: data["claims"] for name, data in measured.items()}, "not measured"),
        *(
            f"![Peak memory of the guides' ten recipes on {name}]({path.relative_to(RESULTS)})"
            for name, path in pictures.items()
            if path.exists()
        ),
        "## Library matrix",
        matrix_page.section(read_record(MATRIX)),
        "## Speed on a CPU",
        _speed(),
        "## Nights",
        _nights(),
        "## On GPUs",
        rehearsed_recipes(cards, measured, suites),
        rehearsed_claims(cards),
        "## The GPU suite",
        gpu_suites(suites, cards),
        "### A real card beside rehearsal and estimate",
        gpu_page.beside_a_card(suites),
        "## The estimate",
        _estimate(),
        "## The estimate for CUDA",
        cuda_page.nearness(),
        "### One rank of several",
        cuda_page.ranks(),
        "### Other tools",
        cuda_page.cuda_tools(),
        "## The estimate against published measurements",
        cuda_page.published(),
        "## LoRA on a T4, and which torch it was",
        published_lora.page(),
        "## Programs whose projects publish their memory",
        published_programs.page(),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments=None) -> int:
    """Keep measurements, build the pages, or check that they are up to date; return the exit code.

    `arguments`: words of the command line; None: `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(description="Keep course runs; make the tables and pictures of their results.")
    parser.add_argument("--record", type=Path, metavar="DIR", help="folder of a course run to keep")
    parser.add_argument("--suite", type=Path, metavar="FILE", help="report of the GPU suite to keep")
    parser.add_argument("--estimates", action="store_true", help="compare the estimate with recorded GPU runs")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    options = parser.parse_args(arguments)
    if options.record:
        print(record(options.record))
    if options.suite:
        print(gpu_page.keep(options.suite, RESULTS))
    measured, cards, suites = recorded(RESULTS), rehearsals(), gpu_page.suites(RESULTS)
    if not measured:
        print("no recorded runs in results/<machine>/", file=sys.stderr)
        return 1
    if options.estimates or options.suite:
        write_record(ON_GPUS, held_against(measured | {f"{name}, suite": of_suite(suites[name]) for name in suites}))
    if not options.check:
        for data in measured.values():
            picture(data)
    pages = written(measured, cards, suites) | {PAGE: page(measured, cards, suites)}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = path.relative_to(PAGE.parents[1])
        if options.check:
            print(f"{name} is stale; run python benchmarks/build.py", file=sys.stderr)
        else:
            write_whole(path, pages[path])
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
