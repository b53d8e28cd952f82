"""Bad arguments, generated: one message that names the argument and what is allowed, and nothing begun or written."""

import contextlib
import io
import os
import random
import re
import sys
from pathlib import Path

import pytest

from perf_helpers import cards, cli
from perf_helpers.compare import step_times
from perf_helpers.course import course as lesson_course
from perf_helpers.lab import arguments, forkserver, processes
from perf_helpers.rehearsal import build
from perf_helpers.sweep import dask_workers

ROOT = Path(__file__).resolve().parents[1]
# What a message says of what is allowed: by an instruction, or by the names that there are.
ALLOWED = re.compile(
    r"\b(give|choose|name|write|say|keep|leave|did you mean|install|at least|should be|run the course again|missing|"
    r"requires an argument|it takes a value|holds for both|there are|are one recipe|no such option)\b",
    re.IGNORECASE,
)
COMMANDS = {
    "measure": ["--model", "bert-tiny", "--seq-len", "16"],
    "estimate": ["--model", "bert-tiny", "--device", "cuda"],
    "explain": ["--model", "bert-tiny", "--then", "--bf16"],
    "rehearse": ["--model", "bert-tiny", "--card", "t4"],
    "advise": ["--model", "bert-tiny", "--effective-batch", "4", "--memory", "1GB"],
    "sweep": ["plan.toml"],
    "compare": ["old.json", "new.json"],
    "history": ["."],
    "course": [],
    "doctor": [],
}
WITH_ARGUMENTS = ("measure", "estimate", "explain", "rehearse")
WHOLE = ("many", "1.5", "nan", "inf", "-1", "0", "1e9", "[1]", "", "True", "9" * 30, "0x10", "½")
# {option: its bad values} and the commands that have it.
OPTIONS = {
    "--seq-len": (WHOLE, ("measure", "estimate", "explain", "advise", "rehearse")),
    "--dataset-size": (WHOLE, ("measure", "estimate", "explain", "rehearse")),
    "--processes": (WHOLE, ("measure", "estimate", "explain", "advise", "rehearse")),
    "--steps": (WHOLE, ("measure",)),
    "--effective-batch": (WHOLE, ("advise",)),
    "--workers": (WHOLE, ("sweep",)),
    "--timeout": (("many", "nan", "-1", "0", ""), ("course",)),
    "--wait": (("many", "nan", "-1", ""), ("sweep",)),
    "--device": (("tpu", "CUDA", "0", "", "cuda:0"), ("estimate", "explain", "advise")),
    "--card": (("1000", "", "card", "nan", "x" * 500), ("estimate", "explain", "advise", "rehearse")),
    "--compute-capability": (
        ("9", "9.0.0", "a.b", "-1.0", "99.0", "", ".", "9,0"),
        ("estimate", "explain", "advise", "rehearse"),
    ),
    "--memory": (("16Gb", "-1GB", "nanGB", "GB", "inf", "16 G B", "", "1", "9" * 400 + "GB", "1e9"), ("advise",)),
    "--device-memory": (("16Gb", "-1GB", "GB", "", "1", "9" * 400 + "GB"), ("rehearse",)),
    "--context": (("450MB/s", "-1MiB", "many", ""), ("advise",)),
    "--torch": (("2.99", "many", "2", "", "-1", "nan", "3.0.0+cu130"), ("estimate",)),
    "--allocator-settings": (
        ("many", "max_split_size_mb", "max_split_size_mb:1", "max_split_size_mb:nan", "backend:cudaMallocAsync"),
        ("estimate",),
    ),
    "--snapshot": ((".", "no/such/folder/file", "x" * 300), ("estimate",)),
    "--lengths": (("no.txt", ".", "junk.txt", "binary.txt", "empty.txt", "negative.txt"), ("estimate",)),
    "--pad-to-multiple-of": (WHOLE, ("estimate",)),
    "--architecture": (("BertForMaskedLMM", "print", "os.system", "Bert ForMaskedLM"), ()),
    "--must": (("optim", "optim=x", "bf16=maybe", "seed=-1", "per_device_train_batch_size=0"), ("advise",)),
    "--avoid": (("chekpointing", "", "x" * 300), ("advise",)),
    "--profile": (("tpu", "", "AUTO", "cpu "), ("course",)),
    "--fail-on": (("memori", "speed;memory", "all"), ("course", "compare")),
    "--baseline": (("no.json", ".", "junk.txt", "binary.txt"), ("course",)),
    "--function": (("no.py:f", "junk.txt", "plan.toml:", "."), ("rehearse",)),
}
ALSO_CALLED = {"--device-memory": "memory", "--context": "context_memory", "--torch": "torch_version"}
FILES = {
    "junk.txt": b"3 words",
    "binary.txt": b"\xff\xfe\x00",
    "empty.txt": b"",
    "negative.txt": b"4 -1",
    "bad.json": b"{",
    "list.json": b"[1]",
    "deep.json": b"[" * 100_000,
    "nan.json": b'{"model_type": "bert", "hidden_size": NaN}',
    "plan.toml": b"[task]\nmodel = 'bert-tiny'\n[grid]\noptim = ['sgd']\n",
    "old.json": b"{}",
    "new.json": b"[]",
}


# Where what is asked for begins: processes, a lesson, a cluster, the download and build of a rehearsal.
BEGINNINGS = [(processes, "CleanProcess"), (lesson_course, "run_lesson"), (dask_workers, "_own_cluster")]
BEGINNINGS += [(build, "set_up"), (step_times, "tonight")]


class Begun(BaseException):
    """A clean process would have begun: the bad argument went through."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs words as a shell would, in a folder of bad files: (exit code, standard output, standard error)."""
    folder, home = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("home")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "model").mkdir()

    def begin(*_, **__):
        raise Begun

    def run(*words):
        out, errors = io.StringIO(), io.StringIO()
        patch.setattr(sys, "argv", ["perf-helpers", *words])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, out.getvalue(), errors.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PERF_HELPERS_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(cli, "_WITH_CLEAN_PROCESSES", ())
        patch.setattr(forkserver.SERVER, "start", lambda: None)
        for where, what in BEGINNINGS:
            patch.setattr(where, what, begin)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        yield run
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert after == before and not [*home.iterdir()], "something was written"


def edited(draw, name):
    """A name with one letter left out, doubled, changed or swapped with the next."""
    place = draw.randrange(1, len(name) - 1)
    a, b, rest = name[place], name[place + 1], name[place + 2 :]
    return name[:place] + draw.choice([b, a + a + b, "q" + b, b + a]) + rest


def plain(text):
    return re.sub(r"[-_ ]+", "_", text.lower())


def typed_values():
    """{training argument: values that its type does not take, as they are typed}."""
    kinds = {bool: ("maybe", "2", "nan"), int: ("many", "1.5", "nan", "[1]"), float: ("many", "nan", "inf", "-1", "[]")}
    declared = {name: kind for name, kind in arguments._declared().__annotations__.items() if name != "local_rank"}
    of_own = {"load_in_4bit": ("maybe", "nan"), "max_new_tokens": ("many", "0"), "num_beams": ("nan", "-1")}
    json_texts = ("{", "{'r': 8}", "no.json", ".", "[1]", "list.json", "bad.json", "deep.json", "binary.txt")
    of_own |= {"peft": json_texts, "quantization_config": json_texts, "dtype": ("float", "int8", "")}
    return {name: kinds[kind] for name, kind in declared.items() if kind in kinds} | of_own


def placed(words, *more):
    """The command's words with more of them, for both recipes of `explain`."""
    place = words.index("--then") if "--then" in words else len(words)
    return [*words[:place], *more, *words[place:]]


def cases(draw):
    """(words, names of which the message has to have one) without end."""
    typed, names = typed_values(), sorted(arguments.known())
    while True:
        command = draw.choice([*COMMANDS])
        words, kind = [command, *COMMANDS[command]], draw.randrange(7)
        if kind == 0 and command in WITH_ARGUMENTS:
            name = draw.choice([*typed])
            yield placed(words, f"--{name}={draw.choice(typed[name])}"), [name]
        elif kind == 1 and command in WITH_ARGUMENTS:
            name = draw.choice([name for name in names if len(name) > 5])
            if (bad := edited(draw, name)) not in names:
                yield placed(words, f"--{bad}", "1"), [name]
        elif kind == 2 and command != "doctor":
            name = draw.choice([option for option, (_, where) in OPTIONS.items() if command in where] or ["--json"])
            if len(name) > 7 and (bad := edited(draw, name[2:])) != name[2:]:
                yield placed(words, f"--{bad}", "1"), [name[2:]]
        elif kind == 3 and command in WITH_ARGUMENTS and command != "measure":
            bad = edited(draw, name := draw.choice(["titan-rtx", "2080-super", "h100-nvl", "4060-laptop"]))
            if bad[:4] == name[:4] and cards._plain(bad) != cards._plain(name):  # another number is another card
                yield placed(words, "--card", bad), [name]
        elif kind == 4 and command == "course":
            name = draw.choice(["gradient_accumulation", "mixed_precision", "dataloader"])
            yield [command, edited(draw, name)], [name]
        elif kind == 5 and command in ("compare", "history", "sweep"):
            name = draw.choice(["no.json", "junk.txt", "binary.txt", "empty.txt", "model"])
            yield [command, name, *["old.json"] * (command == "compare")], [name]
        elif own := [option for option, (_, where) in OPTIONS.items() if command in where]:
            value = draw.choice(OPTIONS[name := draw.choice(own)][0])
            yield placed(words, f"{name}={value}"), (name[2:], ALSO_CALLED.get(name, ""), re.split("[:=]", value)[0])


def wrong(shell, words, names):
    """What is wrong with the answer to bad words; empty where nothing is."""
    try:
        code, out, errors = shell(*words)
    except Begun:
        return "it went through"
    except BaseException as error:
        return f"a traceback: {type(error).__name__}: {error}"
    told = plain(errors)
    problems = {
        f"exit code {code}": code != 2,
        f"printed {out[:80]!r}": out,
        f"{len(errors.splitlines())} lines": len(errors.splitlines()) != 1,
        "too long": len(errors) > 1500,
        "no name of ours": not errors.startswith("perf-helpers: "),
        f"{names} is not named": not any(name and plain(name) in told for name in names),
        "not said what is allowed": not ALLOWED.search(errors),
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    return f"{', '.join(found)}: {errors[:300]}" if found else ""


def test_generated_arguments_are_refused_in_one_line_that_helps(shell):
    draw, seen, found = random.Random(int(os.environ.get("BAD_INPUT_SEED", 0))), set(), []
    for words, names in cases(draw):
        if tuple(words) in seen:
            continue
        seen.add(tuple(words))
        if problem := wrong(shell, words, names):
            found.append(f"{' '.join(words)[:150]} -> {problem}")
        if len(seen) == int(os.environ.get("BAD_INPUT_CASES", 250)):
            break
    assert not found, "\n".join([f"{len(found)} of {len(seen)}", *found])
