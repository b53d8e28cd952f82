"""Generate bad arguments: each gives one message that names the argument and the allowed values, and nothing is started
or written.
"""

import contextlib
import io
import os
import random
import re
import sys
from pathlib import Path

import pytest

from perf_helpers import Lab, cli
from perf_helpers.compare import step_times
from perf_helpers.course import course as lesson_course
from perf_helpers.sweep import Plan, dask_workers
from trainmem import cards
from trainmem.advise import advise, parallelism
from trainmem.core import arguments
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import estimate, explanation
from trainmem.measure import forkserver, processes
from trainmem.records import Run
from trainmem.rehearsal import build, rehearse

ROOT = Path(__file__).resolve().parents[1]
# What a message says of what is allowed: by an instruction, or by the names that there are.
ALLOWED = re.compile(
    r"\b(give|choose|name|write|add|use|set|keep|leave|change|did you mean|install|at least|should be|missing|"
    r"run the course again|requires an argument|no such option)\b",
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
BEGINNINGS += [(build, "set_up"), (step_times, "measure_here")]


class Started(BaseException):
    """Raised if a fresh subprocess would start, i.e. if a bad argument was not refused."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Yield a function that runs a command, in a folder with bad files: it returns (exit code, standard output,
    standard error).

    Afterwards, check that nothing was written.
    """
    folder, home = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("home")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "model").mkdir()

    def begin(*_, **__):
        raise Started

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
        patch.setattr(cli, "_STARTS_SUBPROCESSES", ())
        patch.setattr(forkserver.SERVER, "start", lambda: None)
        for where, what in BEGINNINGS:
            patch.setattr(where, what, begin)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        yield run
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert after == before and not [*home.iterdir()], "something was written"


def edited(draw, name):
    """Return a name with one random letter (not the first) left out, doubled, replaced by q, or swapped with the next
    one.

    `draw`: the random generator.
    """
    place = draw.randrange(1, len(name) - 1)
    a, b, rest = name[place], name[place + 1], name[place + 2 :]
    return name[:place] + draw.choice([b, a + a + b, "q" + b, b + a]) + rest


def plain(text):
    return re.sub(r"[-_ ]+", "_", text.lower())


def typed_values():
    """Return {training argument: texts that its type does not accept}."""
    kinds = {bool: ("maybe", "2", "nan"), int: ("many", "1.5", "nan", "[1]"), float: ("many", "nan", "inf", "-1", "[]")}
    declared = {name: kind for name, kind in arguments._declared().__annotations__.items() if name != "local_rank"}
    of_own = {"load_in_4bit": ("maybe", "nan"), "max_new_tokens": ("many", "0"), "num_beams": ("nan", "-1")}
    json_texts = ("{", "{'r': 8}", "no.json", ".", "[1]", "list.json", "bad.json", "deep.json", "binary.txt")
    of_own |= {"peft": json_texts, "quantization_config": json_texts, "dtype": ("float", "int8", "")}
    return {name: kinds[kind] for name, kind in declared.items() if kind in kinds} | of_own


def placed(words, *more):
    """Return the words of a command with the words `more` added: before --then if the command has it, or at the end."""
    place = words.index("--then") if "--then" in words else len(words)
    return [*words[:place], *more, *words[place:]]


def cases(draw):
    """Yield bad command lines without end, as (words, names): the error message must contain one of the names.

    `draw`: the random generator.
    """
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
            if (bad := edited(draw, name)) != name:
                yield [command, bad], [name]
        elif kind == 5 and command in ("compare", "history", "sweep"):
            name = draw.choice(["no.json", "junk.txt", "binary.txt", "empty.txt", "model"])
            yield [command, name, *["old.json"] * (command == "compare")], [name]
        elif own := [option for option, (_, where) in OPTIONS.items() if command in where]:
            value = draw.choice(OPTIONS[name := draw.choice(own)][0])
            yield placed(words, f"{name}={value}"), (name[2:], ALSO_CALLED.get(name, ""), re.split("[:=]", value)[0])


def wrong(shell, words, names):
    """Run a command with bad arguments; return the problems with the command's answer as text; empty if there are none.

    Args:
        shell: what the fixture `shell` yields.
        words: the command line.
        names: the message must contain one of them.
    """
    try:
        code, out, errors = shell(*words)
    except Started:
        return "it went through"
    except BaseException as error:
        return f"a traceback: {type(error).__name__}: {error}"
    reported = plain(errors)
    problems = {
        f"exit code {code}": code != 2,
        f"printed {out[:80]!r}": out,
        f"{len(errors.splitlines())} lines": len(errors.splitlines()) != 1,
        "too long": len(errors) > 1500,
        "no name of ours": not errors.startswith("perf-helpers: "),
        f"{names} is not named": not any(name and plain(name) in reported for name in names),
        "not said what is allowed": not ALLOWED.search(errors),
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    return f"{', '.join(found)}: {errors[:300]}" if found else ""


@pytest.mark.nightly
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


@pytest.mark.parametrize(
    ("words", "hint"),
    [  # what the generator found
        (["sweep", "plan.toml", "--wait=nan"], "wait=nan: give"),
        (["sweep", "plan.toml", f"--workers={10**20}"], "give a whole number from 1 to 1,024"),
        (["sweep", "binary.txt"], "binary.txt: not TOML"),
        (
            ["rehearse", "--model=bert-tiny", "--card=t4", "--processes=17"],
            "processes=17: give a whole number from 1 to 16",
        ),
        (["rehearse", "--function=plan.toml:", "--card=t4"], "file.py:function"),
        (
            ["explain", "--model=bert-tiny", "--compute-capability=99.0", "--then", "--bf16"],
            "give one from 7.0 to 12.x",
        ),
        (["estimate", "--model=bert-tiny", "--pad-to-multiple-of=8"], "add --lengths"),
        (["measure", "--model=bert-tiny", "--proceses", "2"], "Did you mean 'processes'"),
        (["measure", "--model=bert-tiny", "--dataset_size", "2"], "Did you mean 'dataset-size'"),
        (["measure", "--model=bert-tiny", "--adam_beta1", "1.5"], "adam_beta1=1.5: give a number"),
        (["measure", "--model=bert-tiny", "--seed", "-1"], "seed=-1: give a whole number of at least 0"),
        (
            ["measure", "--model=bert-tiny", "--processes", "100000"],
            "processes=100000: give a whole number from 1 to 256",
        ),
        (["measure", "--model=bert-tiny", "--lr_scheduler_type", "linaer"], "Did you mean 'linear'"),
        (["measure", "--model=bert-tiny", "--peft", "deep.json"], "nested brackets"),
        (["estimate", "--model=bert-tiny", "--device", ""], "choose 'cpu' or 'cuda'"),
        (["advise", "--model=bert-tiny", "--effective-batch=4", "--memory", "9" * 30 + "GB"], "too large"),
    ],
)
def test_what_the_generator_found_is_refused(shell, words, hint):
    code, out, errors = shell(*words)
    assert (code, out, len(errors.splitlines())) == (2, "", 1) and hint in errors, errors


JUNK = [
    True,
    "many",
    float("nan"),
    float("inf"),
    -1,
    0,
    1.5,
    [1],
    {"a": 1},
    object(),
    b"x",
    None,
    "",
    10**400,
    10**5000,
]
TINY = Task("bert-tiny", 16)
SIZES = {"audio_seconds": (6, 11), "image_size": (5, 11), "objective": (12,)}  # of data other than texts
# Each function with what it needs, and what of the junk an argument takes: by its place in JUNK.
CALLS = {
    "Task": (
        Task,
        {},
        {"model": (1, 12), "architecture": (1, 11, 12), "config": (8,), "seed": (5,), "lengths": (7,)} | SIZES,
    ),
    "Lab": (Lab, {"profile": "tiny"}, {"strict": (0,), "lesson": (1, 12), "executor": (11,)}),
    "train": (
        "train",
        {"name": "x", "task": TINY},
        {"name": (1, 12), "optimizer": (11,), "task": (11,), "steps": (11,)},
    ),
    "infer": ("infer", {"name": "x", "task": TINY}, {"name": (1, 12), "task": (11,)}),
    "run": ("run", {"function": print, "task": TINY}, {"name": (1, 11, 12), "task": (11,), "use_cpu": (0,)}),
    "estimate": (estimate, {"task": TINY, "device": "cuda"}, {"name": (1, 12), "training": (0,), "task": (1, 12)}),
    "explain": (explanation.explain, {"task": TINY, "a": {}, "b": {"bf16": True}}, {}),
    "advise": (
        advise,
        {"task": TINY, "effective_batch": 4, "memory": "1GB"},
        {"avoid": (), "runs": (7, 11), "published": (11,)},
    ),
    "parallelism": (parallelism, {"task": TINY, "cards": 2, "card": "t4"}, {"slow_link": (0,)}),
    "rehearse": (rehearse, {"what": TINY, "on": "t4"}, {"inference": (0,), "what": (), "task": (11,)}),
    "card": (cards.card, {"name": "t4"}, {}),
}
FREE = {"timeout": (3, 6, 11), "margin": (5,), "device_memory": (5, 11)}
FREE |= {
    "snapshot": (1, 11),
    "machine": (11,),
    "context_memory": (5, 6, 11),
    "must": (11,),
    "allocator_settings": (12,),
    "out": (1, 12),
    "packed": (0,),
}
NONE = (
    "card",
    "device",
    "compute_capability",
    "torch_version",
    "optimizer",
    "function",
    "seq_len",
    "dataset_size",
    "memory",
)
NONE += ("card_bytes", "samples_per_step", "pad_to_multiple_of", "on", "largest")


@pytest.mark.parametrize("what", CALLS)
def test_a_value_of_another_kind_is_refused_by_name(shell, what):
    function, needed, taken = CALLS[what]
    function = getattr(Lab("tiny"), function) if isinstance(function, str) else function
    known = {*(Lab.__init__ if function is Lab else function).__annotations__} - {"return", "profile", "where"}
    found, number, others = [], 0, ("memory=", "function", "card", "unknown training argument 'a'")
    for name in sorted(known):
        for place, value in enumerate(JUNK):
            if place in taken.get(name, FREE.get(name, (11,) if name in NONE else ())):
                continue
            number += 1
            try:
                function(**needed | {name: value})
            except ValueError as error:
                text = str(error)
                reported = name in text or name.removesuffix("s") in text or any(word in text for word in others)
                if not reported or not ALLOWED.search(text) or len(text) > 900 or len(text.splitlines()) > 1:
                    found.append(f"{name}, {place}: {text[:200]}")
            except BaseException as error:
                found.append(f"{name}, {place}: {type(error).__name__} {str(error)[:100]}")
            else:
                found.append(f"{name}, {place}: taken")
    assert not found and number > 10, "\n".join(found)


def test_every_training_argument_knows_its_kind():
    """Values that do not match the type of a training argument of transformers are refused. The test leaves out the
    arguments that accept any value.
    """
    found, free = {}, {"parallelism_config", "trackio_static_space_id", "local_rank"}
    for name in sorted(arguments.known() - free):
        for value in (object(), b"x", float("nan"), 10**400, 10**5000):
            try:
                Arguments.of({name: value})
            except ValueError as error:
                if name not in str(error) or len(str(error)) > 2500:
                    found[name] = str(error)
            else:
                found[name] = f"{type(value)} was taken"
    assert not found


def test_a_misspelt_argument_of_the_lab_s_own_is_answered_with_it(shell):
    lab = Lab("tiny")
    for call, name in (
        (lab.train, "proceses"),
        (lab.infer, "mesure"),
        (lambda *_, **given: estimate(TINY, **given), "crad"),
    ):
        with pytest.raises(ValueError, match=r"Did you mean '(processes|measure|card)'"):
            call("x", **{name: 1})


def test_what_papermill_sets_in_a_lesson_is_looked_at_before_anything_runs(shell, tmp_path):
    (tmp_path / "file").write_text("x")
    bad = {"profile": "tpu", "strict": "yes", "out": tmp_path / "file", "timeout": 0, "lesson": 5}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=rf"^{name}=.*(give|choose)"):
            Lab(**{"profile": "tiny"} | {name: value})
    with pytest.raises(ValueError, match=r"^a run to compare='vanilla': give a Run"):
        Lab("tiny").compare("vanilla")
    with pytest.raises(ValueError, match=r"'x'.*lab\.train or lab\.run"):
        Lab("tiny").compare(Run("x", "ok"))
    with pytest.raises(ValueError, match=r"^timeout=nan: give a number"):
        lesson_course.run_course(["00"], out=tmp_path / "out", timeout_per_lesson=float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match=r"Did you mean 'steps'"):
        Plan.of({"task": {"model": "bert-tiny"}, "stesp": 3})
