"""Tables of the estimate for CUDA, compared with torch's own allocator, other tools, and published measurements."""

import re
from textwrap import shorten

from runner import RESULTS, read_record
from tables import MIB, share, table, versions

PUBLISHED = RESULTS / "published.json"  # by benchmarks/published.py
RANKS = RESULTS / "ranks.json"  # by benchmarks/measure_ranks.py
CUDA_TOOLS = RESULTS / "cuda_tools.json"  # by benchmarks/measure_cuda_tools.py
PUBLISHED_TOOLS = RESULTS / "published_tools.json"  # by benchmarks/published_tools.py


def nearness() -> str:
    """Describe how near the estimate for CUDA is to torch's own allocator, and to published measurements."""
    report, lists = (read_record(RESULTS / f"{name}.json") for name in ("cuda", "allocator"))
    cases = [row for row in report["rows"] if "rehearsed" in row]
    architectures, optimizers = {row["architecture"] for row in cases}, {row["arguments"]["optim"] for row in cases}
    found, few = report["summary"]["estimated"], report["summary"].get("extrapolated")  # the latter: in older records
    of_few = f" With few layers traced, {few['answered']} of them: {_equal_or_off(few)}." if few else ""
    figures = read_record(PUBLISHED)["like_for_like"]["all"]
    when = f"{versions(report, 'torch', 'transformers')}, {report['date'][:10]}"
    lines = [
        f"{len(cases)} generated trainings ({len(architectures)} architectures, {len(optimizers)} optimizers, compute "
        f"capability 7.5 to 9.0) compared with torch's own allocator in rehearsals ({when}): "
        f"{_equal_or_off(found)}.{of_few}",
        f"The allocator model compared with torch's allocator on {lists['traces']:,} random traces of allocations and "
        f"frees: {lists['mismatches']} mismatches.",
        f"Compared with {figures['rows']} figures that others measured on real GPUs with comparable set-ups: median "
        f"error {share(figures['median'])}, 95 of 100 within {share(figures['percentile_95'])}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _equal_or_off(found: dict) -> str:
    """Describe the estimate's errors in allocated and in reserved bytes.

    `found`: the entry "estimated" of a summary, see `measure_cuda.summary`.
    """
    if not found["allocated_worst"] + found["reserved_worst"]:
        return "allocated and reserved **equal to the byte in all**"
    return (
        f"allocated **equal to the byte in {found['allocated_equal']} of {found['answered']}**, the worst "
        f"{share(found['allocated_worst'])} off; reserved {share(found['reserved_median'])} off in the median, "
        f"{share(found['reserved_worst'])} at worst"
    )


def adapters() -> str:
    """Describe how near the estimate is for adapters and quantized bases, on a CPU and for CUDA."""
    report = read_record(RESULTS / "adapters.json")
    on_cpu, on_cuda = (report["summary"][kind] for kind in ("cpu", "cuda"))
    kinds = {row["arguments"]["peft"].get("peft_type", "LoRA") for row in report["rows"]}
    made_with = f"{versions(report, 'torch', 'transformers', 'peft', 'bitsandbytes')}, {report['date'][:10]}"
    equal = on_cpu["equal_in_every_category"]
    lines = [
        f"{on_cpu['compared']} generated trainings ({len(kinds)} kinds of adapters; bases of 16, 8 and 4 bits too) on "
        f"a CPU ({made_with}): **{equal} equal to the byte in every category**.",
        f"{on_cuda['compared']} other trainings for CUDA, compared with torch's own allocator in rehearsals: "
        f"{_equal_or_off(on_cuda['estimated'])}.",
        f"{on_cpu['left_out'] + on_cuda['left_out']} more were left out: peft or another library refuses them, or they "
        "need values that a rehearsal does not have.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def ranks() -> str:
    """Return a table of the memory of one rank of several: torch's own allocator, the estimate, and ZeRO's formulas."""
    report = read_record(RANKS)
    rows, failed, off = [], {}, 0
    for row in report["rows"]:
        if "rehearsed" not in row:
            error = re.sub(r"^rank \d+: | \(line \d+ of \S+\)$", "", row["error"])
            failed.setdefault(error, []).append(row["setup"])
            continue
        sizes = [
            f"{row[source][what] / MIB:.1f}" if source in row else "not followed"
            for what in ("allocated", "reserved")
            for source in ("rehearsed", "estimated")
        ]
        parts = [" + ".join(f"{size:.2f}" for size in row["kept"]), " + ".join(f"{size:g}" for size in row["formula"])]
        rows.append([row["setup"], row["model"], str(row["ranks"]), *parts, *sizes])
        if "estimated" in row:
            off = max(off, abs(row["estimated"]["allocated"] - row["rehearsed"]["allocated"]))
    head = ["set-up", "model", "ranks", "weights + gradients + states, bytes per parameter", "by the formula"]
    head += ["allocated, MiB", "estimated", "reserved, MiB", "estimated"]
    lines = [
        f"Rehearsed on {report['card'].upper()}s, one process per card ({versions(report, 'torch', 'transformers')}, "
        f"accelerate {report['versions']['accelerate']}, {report['date'][:10]}). The figures are of the fullest rank, "
        "after backward. The estimate traces one rank: allocated and reserved **equal to the byte in "
        f"{report['equal']} of {report['followed']}**, the largest difference {off} B. Under DDP, buckets are a second "
        f"set of gradients. DeepSpeed {report['versions']['deepspeed']} keeps an fp32 copy of a rank's shard of the "
        "weights, even if they are fp32 (stage 3 counts it among the inputs here), and gradients in flight. Its memory "
        "on the host is rehearsed but not traced.",
        table(head, rows),
        "Not trained, in the rehearsal as in the estimate:",
        "\n".join(f"- {', '.join(dict.fromkeys(names))}: {error}" for error, names in failed.items()),
    ]
    return "\n\n".join(lines)


def cuda_tools() -> str:
    """Return a table of the estimate for CUDA and other tools on the same trainings, against torch's own allocator."""
    report = read_record(CUDA_TOOLS)
    head = ["tool", "its figure", "answered", "median error", "worst", "median on dense decoders"]
    head += ["whole figure, median error", "seconds, median", "own memory, at most", "cannot express"]
    rows = []
    for row in report["table"]:
        names = ("median_error", "worst_error", "median_error_decoders", "median_error_reserved")
        cells = [f"{row['tool']} {row['version']}".strip(), row["claims"], f"{row['answered']} of {row['asked']}"]
        cells += [share(row[name]) for name in names]
        rows.append([*cells, f"{row['median_seconds']:.2g}", f"{row['most_own_bytes'] / MIB:.0f} MiB"])
        rows[-1].append(row["cannot_express"])
    made_with = versions(report, "torch", "transformers")
    about = f"{report['what']}. {report['machine']}, {made_with}, {report['date'][:10]}. {report['note']}".strip()
    text = (
        "Median and worst error: a tool's figure for tensors, compared with the peak of allocated memory. *Whole "
        "figure*: everything that a tool reports, including its allowance for the context, fragmentation and safety, "
        "compared with the peak of reserved memory. Examined but not run: "
    )
    text += "; ".join(f"{name} ({reason})" for name, reason in report["not_run"].items())
    return "\n\n".join([about, table(head, rows), f"{text}.", published_tools()])


def published_tools() -> str:
    """Return a table of the estimate for CUDA and other tools against published measurements on real cards."""
    report, rows, worst = read_record(PUBLISHED_TOOLS), [], []
    figures = {"allocated": "bytes", "reserved": "total_bytes"}
    for row in report["table"]:
        cells = [f"{row['tool']} {row['version']}" + (f", without {row['left_out']}.toml" if row["left_out"] else "")]
        for found in map(row.get, figures):
            cells += [f"{found['answered']} of {found['asked']}", *(share(found.get(e)) for e in ("median", "worst"))]
        refused = ((count, shorten(reason.rpartition("Error: ")[2], 45)) for reason, count in row["refused"])
        rows.append([*cells, "; ".join(f"{count}: {reason}" for count, reason in refused)])
    for figure, what in figures.items():
        pairs = [(row["said"]["this estimate"][what], row) for row in report["pairs"] if figure in row]
        off, name = max(
            ((values / row[figure] - 1, row["name"]) for values, row in pairs), key=lambda pair: abs(pair[0])
        )
        worst.append(f"{off:+.2%} of the {figure} memory ({name})")
    head = ["tool", *(f"{figure}, {what}" for figure in figures for what in ("answered", "median error", "worst"))]
    made_with = f"{report['machine']}, {versions(report, 'torch', 'transformers', 'peft')}, {report['date'][:10]}"
    about = f"{report['what']}. {made_with}. {report['note']}"
    text = f"Largest errors of this estimate: {' and '.join(worst)}. Examined but not run: "
    text += "; ".join(f"{name} ({reason})" for name, reason in report["not_run"].items())
    return "\n\n".join([about, table([*head, "refused"], rows), f"{text}."])


def published() -> str:
    """Return tables of the estimate against published measurements on real GPUs: errors by kind, then every row."""
    report = read_record(PUBLISHED)
    errors = [
        [kind, str(values["rows"]), *(share(values[name]) for name in ("median", "percentile_95", "worst"))]
        for kind, values in report["like_for_like"].items()
    ]
    rows = []
    for row in report["table"]:
        sizes = [row[name] for name in ("published", "predicted", "older_rules_add", "rehearsed")]
        cells = ["" if size is None else f"{size:,.2f}" for size in sizes]
        error = f"{row['error']:+.3%}"
        rows.append([row["name"], row["quantity"], *cells, error if row["like_for_like"] else f"({error})"])
    notes = {(row["name"].rsplit(": ", 1)[0], row["reason"]) for row in report["table"] if row["reason"]}
    head = ["measured", "quantity", "published", "predicted", "of it older rules", "rehearsed", "error"]
    about = f"{report['what']}. {versions(report, 'torch', 'transformers')}, {report['date'][:10]}."
    facts = "[published.toml](../benchmarks/published.toml)"
    text = f"Sources, versions and set-ups are in {facts}. In brackets, not like for like:"
    parts = [about, table(["like for like", "rows", "median", "95th percentile", "worst"], errors), text]
    return "\n\n".join([*parts, "\n".join(f"- {name}: {reason}" for name, reason in sorted(notes)), table(head, rows)])
