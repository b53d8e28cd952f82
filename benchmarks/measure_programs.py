"""Rehearse programs of other projects, unmodified, and record how each ends.

    .venv/bin/python benchmarks/measure_programs.py              all of benchmarks/programs.toml
    .venv/bin/python benchmarks/measure_programs.py --rows run_clm

Sources and packages are fetched into build/programs: a release by pip, a repository by git. If a fetch fails, the row
says so. A folder build/programs/OWNER+NAME that exists is used without fetching; unless it is a clone, its file VERSION
names the version. None of the programs' code is in the record. Models, tokenizers and data are generated here, in tiny
sizes, so no Hub is needed.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from runner import HERE, RESULTS, Measurement, Named, read_record
from tables import MIB, table, versions

from trainmem import rehearsal
from trainmem.rehearsal.program_report import CODES, peaks_of

FOLDER = HERE.parent / "build" / "programs"
INPUTS, PACKAGES = FOLDER / "inputs", FOLDER / "packages"
SECONDS = 600  # that fetching may take


def cases(_) -> Named:
    return tomllib.loads(Path(__file__).with_name("programs.toml").read_text(encoding="utf-8"))["programs"]


def measure(programs: Named, options: argparse.Namespace) -> Iterable[tuple[str, dict]]:
    inputs(INPUTS)
    for name, program in programs.items():
        yield name, row(name, program, options)


def row(name: str, program: dict, options: argparse.Namespace) -> dict:
    """Rehearse a program, and return the program's row for the record.

    The row has "status", "version", "message" if the program failed, and facts about the run, e.g. "minutes". "peaks"
    is [allocated bytes, reserved bytes] of the first process that used the card; it is missing if no process did.

    Args:
        name, program: the program's name and its entry in programs.toml. "fields", if given, are {name: text} that its
            words may contain.
        options: the script's options.
    """
    about = {"name": name, "card": options.card}
    about |= {key: program[key] for key in ("source", "packages", "command") if key in program}
    try:
        about["version"], source = fetched(program)
    except (subprocess.SubprocessError, OSError) as error:
        return about | {"status": "not fetched", "message": str(error).splitlines()[0][:200]}
    out = FOLDER / "runs" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for target_name, each in program.get("beside", {}).items():
        origin, target = (FOLDER if each.startswith("inputs/") else source) / each, out / target_name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(origin, target, dirs_exist_ok=True) if origin.is_dir() else shutil.copy(origin, target)
    places = {"source": source, "inputs": INPUTS, "out": out, "packages": PACKAGES} | program.get("fields", {})
    words = [word.format(**places) for word in program["command"]]
    variables = {name: value.format(**places) for name, value in program.get("variables", {}).items()}
    with surroundings(out, [*(source / each for each in program.get("paths", ())), PACKAGES], variables):
        for setup in program.get("setup", ()):
            subprocess.run([sys.executable, *(word.format(**places) for word in setup)], check=True, timeout=SECONDS)
        start = time.monotonic()
        with (out / "output.txt").open("w") as output:
            run = rehearsal.run(words, rehearsal.CARDS[options.card], assumes=not options.plain, output=output.fileno())
    if run.status == "interrupted":
        raise SystemExit("interrupted: the rows until here are kept")
    (out / "report.txt").write_text(repr(run))
    print(repr(run), file=sys.stderr)
    found = about | {"status": run.status, "code": run.code, "minutes": round((time.monotonic() - start) / 60, 1)}
    used = [each for each in run.processes if each["phases"]]
    if used:
        first = used[0]
        found |= {"processes": len(used), "steps": first["steps"], "phases": first["phases"], "peaks": peaks_of(first)}
        found |= {"answers": first["answers"], "saved": len(first["saved"])}
    if errors := [each["error"] for each in run.processes if each["error"]]:
        place = re.sub(r"^.*/(?=[^/]+, line)|: .*$", "", errors[0]["line"])  # no line of another project's code
        found |= {"message": errors[0]["message"], "line": place}
    return found


@contextlib.contextmanager
def surroundings(folder: Path, paths: list[Path], variables: Named) -> Iterator[None]:
    """Run programs in this context with a working directory, import paths and environment variables, and without the
    Hub.

    Args:
        folder: the working directory.
        paths: added to the import path.
        variables: {name: value} of environment variables.
    """
    before, old = Path.cwd(), dict(os.environ)
    path = os.pathsep.join([*map(str, paths), *filter(None, [old.get("PYTHONPATH")])])
    os.environ.update(PYTHONPATH=path, HF_HUB_OFFLINE="1", HF_HOME=str(FOLDER / "hub"), TOKENIZERS_PARALLELISM="false")
    os.environ.update(variables)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(old)


def fetched(program: dict) -> tuple[str, Path]:
    """Fetch a program's packages and source unless they exist; return its version and the folder of the source.

    `program`: its entry in programs.toml.
    """
    for package in program.get("packages", ()):
        install(package)
    kind, _, name = program["source"].partition(":")
    if kind == "pip":
        return install(name), PACKAGES
    name, _, revision = name.partition("@")
    folder = FOLDER / name.replace("/", "+")
    if not folder.exists():
        words = ["git", "clone", "--quiet", "--depth", "1", *(["--branch", revision] if revision else [])]
        address = f"https://github.com/{name}"
        subprocess.run([*words, address, folder], check=True, timeout=SECONDS, capture_output=True)
    if (folder / "VERSION").exists():  # not a clone
        return (folder / "VERSION").read_text().strip(), folder
    described = ["git", "-C", folder, "describe", "--tags", "--always"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip(), folder


@functools.cache
def install(package: str) -> str:
    """Install a package, e.g. "trl==1.16.0", without its dependencies; return its version."""
    name = re.split(r"[=<>~!]", package)[0]
    if not (found := version_of(name)):
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", PACKAGES, package]
        subprocess.run(words, check=True, timeout=SECONDS)
        found = version_of(name)
    return found or ""


def version_of(name: str) -> str | None:
    found = [*importlib.metadata.distributions(name=name, path=[str(PACKAGES)])]
    return found[0].version if found else None


def inputs(folder: Path) -> None:
    """Write texts, preference pairs, pictures, a tokenizer and tiny models into a folder, all from one seed."""
    if (folder / "complete").exists():
        return
    import pyarrow.parquet
    import tokenizers
    import transformers

    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["".join(random.choices("aeioulmnrst", k=random.randint(2, 7))) for _ in range(400)]
    lines = [" ".join(random.choices(words, k=random.randint(20, 60))) for _ in range(2000)]
    (folder / "words.txt").write_text("\n".join(lines))
    short = [" ".join(line.split()[:12]) for line in lines]
    some = [*zip(short, lines, strict=True)][:300]
    rows = {
        "classes.json": [{"sentence": text, "label": number % 2} for number, text in enumerate(lines[:400])],
        "sft/train.json": [{"text": text} for text in lines[:400]],
        "grpo/train.json": [{"prompt": text} for text in short[:200]],
        "dpo/train.json": [{"prompt": a, "chosen": b, "rejected": a} for a, b in some],
        **{
            f"stsb/{part}.json": [{"sentence1": a, "sentence2": b, "score": len(a) / len(b)} for a, b in some]
            for part in ("train", "validation", "test")
        },
        "alpaca.json": [{"instruction": a, "input": "", "output": b} for a, b in some],
    }
    for name, content in rows.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = json.dumps(content) if name == "alpaca.json" else "\n".join(map(json.dumps, content))
        (folder / name).write_text(text)
    for name in ("wikitext", "tokens", "nanochat/base_data_climbmix", "MNIST/raw"):
        (folder / name).mkdir(parents=True)
    for part in ("train", "val"):
        (folder / "tokens" / f"{part}.bin").write_bytes(random.randbytes(1 << 17))
    for number in range(2):
        table = pyarrow.table({"text": lines[number * 1000 : number * 1000 + 1000]})
        pyarrow.parquet.write_table(table, folder / "nanochat/base_data_climbmix" / f"shard_0000{number}.parquet")
    for part, count in {"train": 2048, "t10k": 512}.items():
        pictures, labels = (folder / "MNIST/raw" / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
        pictures.write_bytes(struct.pack(">4I", 2051, count, 28, 28) + random.randbytes(count * 784))
        labels.write_bytes(struct.pack(">2I", 2049, count) + bytes(number % 10 for number in range(count)))
    for part in ("train", "valid", "test"):
        (folder / "wikitext" / f"{part}.txt").write_text("\n".join(lines[:300]))
    special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "[CLS]", "[SEP]"]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(lines, trainer)
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    named |= {"mask_token": "<mask>", "cls_token": "[CLS]", "sep_token": "[SEP]", "model_max_length": 512}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, **named)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    for name, config in {"llama": transformers.LlamaConfig(**size), "bert": transformers.BertConfig(**size)}.items():
        kind = transformers.LlamaForCausalLM if name == "llama" else transformers.BertForMaskedLM
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    with contextlib.suppress(ImportError):
        from PIL import Image

        for part, kind, number in [(p, k, n) for p in ("train", "val") for k in ("a", "b") for n in range(32)]:
            path = folder / "pictures" / part / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((64, 64), 50 + number).convert("RGB").save(path)
    (folder / "complete").touch()


def conclude(rows: list[dict], _) -> dict:
    ends = [row["status"] for row in rows]
    return {"programs": len(ends)} | {end: ends.count(end) for end in sorted({*CODES, *ends})}


def line(row: dict) -> str:
    return f"{row['status']}, {row.get('steps', 0)} steps; {row.get('message', '')} {row.get('line', '')}"


def page() -> str:
    """Return the table of rehearsed programs in results/programs.json, for docs/rehearsal.md."""
    record = read_record(RESULTS / MEASUREMENT.record)
    rows = []
    for each in record["rows"]:
        source = re.split("[@=]", each["source"].partition(":")[2])[0]
        program = f"{each['name']} ({source} {each['version']})"
        memory = " / ".join(f"{size / MIB:,.0f}" for size in each.get("peaks", ())) or "none"
        answers = f"{sum(each.get('answers', {}).values()):,}"
        reason = f": {each['message'].partition(' (')[0][:90]}" if "message" in each else ""
        rows.append([program, each["status"] + reason, str(each.get("steps", 0)), memory, answers])
    head = ["program", "its end", "optimizer updates", "MiB allocated / reserved", "assumed answers"]
    ends = Counter(each["status"] for each in record["rows"])
    about = f"{ends['finished']} of {len(rows)} programs finished ({versions(record)}, {record['date'][:10]})."
    return f"{about}\n\n{table(head, rows)}"


MEASUREMENT = Measurement(
    __doc__,
    "programs.json",
    cases,
    measure,
    conclude,
    {"card": "a100", "plain": False},
    name_of=lambda number, row: row["name"],
    line=line,
)

if __name__ == "__main__":
    sys.exit(MEASUREMENT.main())
