"""perf-helpers from a shell: one JSON object and nothing else, correct exit codes, and one line per mistake."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import typer

from perf_helpers import cli
from trainmem import command_options
from trainmem.records import Memory

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--model", "bert-tiny", "--seq-len", "16", "--steps", "1"]


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "perf_helpers.cli", *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_measure_prints_one_json_object(tmp_path):
    done = run("measure", *TINY, "--per_device_train_batch_size", "4", "--bf16", "False", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "ok"
    assert result["arguments"] == {"per_device_train_batch_size": 4, "bf16": False}
    assert sum(result["breakdown"].values()) == result["peak_bytes"] > 0
    assert {"forward", "backward", "step"} == result["phases"].keys()
    assert result["samples_per_second"] == pytest.approx(4 / result["step_seconds"])
    assert result["reserved_bytes"] is None and result["peak_kind"] == "counted" and result["peak_operation"]
    assert result["machine"]["cpu_cores"] and result["versions"]["torch"]


@pytest.mark.nightly
def test_measure_takes_a_configuration_file_and_flags_without_values(tmp_path):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    words = ["--seq-len", "16", "--steps", "1", "--gradient_checkpointing", "--optim=sgd", "--memory-only", "--json"]
    for model in (tmp_path, tmp_path / "config.json"):
        done = run("measure", "--model", str(model), *words)
        result = json.loads(done.stdout)
        assert (done.returncode, result["status"]) == (0, "ok"), done.stderr
        assert result["arguments"] == {"gradient_checkpointing": True, "optim": "sgd"}
        assert result["step_seconds"] is None


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--model", "bert-tiny", "--gradient_acumulation_steps", "4"], "gradient_accumulation_steps"),
        pytest.param(["--model", "bert-tony"], "bert-tiny", marks=pytest.mark.nightly),
        pytest.param(["--model", "bert-tiny", "--seq_len", "100000"], "512 tokens", marks=pytest.mark.nightly),
        (["--model", "bert-tiny", "--per_device_train_batch_size", "0"], "at least 1"),
        pytest.param(["--model", "no/config.json"], "cannot be read", marks=pytest.mark.nightly),
        (["--model", "bert-tiny", "--optim", "adamx"], "Did you mean 'adamw_torch'"),
        (["--model", "bert-tiny", "--per_device_train_batch_size", "1e9"], "'1e9': give a whole number"),
        (["--model", "bert-tiny", "--per_device_train_batch_size=many"], "'many': give a whole number"),
        (["--model", "bert-tiny", "--learning_rate", "fast"], "learning_rate='fast': give a number"),
        (["--model", "bert-tiny", "--bf16", "maybe"], "bf16='maybe': give True or False"),
        (["--model", "bert-tiny", "--save_strategy"], "--save_strategy VALUE"),
        (["--model", "bert-tiny", "--save_strategy", "epocs"], "Did you mean 'epoch'"),
        (["--model", "bert-tiny", "--gradient_checkpointing_kwargs", "{use}"], "Give a JSON object"),
        (["--model", "bert-tiny", "--attn_implementation", "flash"], "Did you mean 'flash_attention"),
        (["--model", "bert-tiny", "--steps", "0"], "steps=0: give a whole number of at least 1"),
        (["--model", "bert-tiny", "--seq-len", "long"], "valid integer"),
        (["--modl", "bert-tiny"], "--model"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, hint):
    done = run("measure", *words, "--json", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert hint in json.loads(done.stdout)["message"]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["course", "--profile", "tpu"], "profile='tpu': choose one of auto, cpu, t4, gpu"),
        (["course", "--timeout", "-3"], "'--timeout'"),
        (["cours"], "Did you mean 'course'"),
        (["sweep", "no.toml"], "no.toml: cannot be read (No such file or directory)"),
        (["advise", "--model", "bert-tiny", "--memory", "1GB", "--effective-batch", "2", "--must", "optim=x"], "optim"),
        (["explain", "--model", "bert-tiny", "--bf16"], "--then --bf16"),
        (["explain", "--model", "bert-tiny", "--bf16", "--then"], "--then --bf16"),
        (["explain", "--model", "bert-tiny", "--then", "--bf16", "--card", "t4"], "give it before --then"),
        (["explain", "--model", "bert-tiny", "--bf16", "--then", "--bf16"], "give b an argument"),
        (["compare", "a", "b", "--fail-on", "memory,sped"], "Did you mean 'speed'"),
        (["estimate", "--model", "bert-tiny", "--lengths", "x", "--inference"], "--inference"),
        (["estimate", "--model", "bert-tiny", "--pad-to-multiple-of", "8"], "add --lengths"),
        (["rehearse", "--card", "t4"], "--model"),
        (["rehearse", "--function", "no.py:main", "--card", "t4"], "file.py:function"),
        (["explain", "--model", "bert-tiny", "--then", "--optim", "adamx"], "Did you mean 'adamw_torch'"),
        (["explain", "--model", "bert-tony", "--then", "--bf16"], "Did you mean 'bert-tiny'"),
        (["explain", "--model", "bert-tiny", "--card", "t5", "--then", "--bf16"], "t5"),
    ],
)
def test_a_mistake_elsewhere_is_one_line_too(words, hint):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *(("", "give the number of tokens"), ("3 words", "'words' (entry 2)"), ("-1", "'-1'"), ("0", "'0'")),
        *(("nan", "'nan'"), ("9" * 5000, "is not a valid length"), ("600", "positions for 512 tokens")),
    ],
)
def test_a_bad_file_of_lengths_is_one_line_and_exit_code_2(text, hint, tmp_path, monkeypatch, capsys):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    monkeypatch.setattr(cli, "_STARTS_SUBPROCESSES", ())
    monkeypatch.setattr(sys, "argv", ["perf-helpers", "estimate", "--model", "bert-tiny", "--lengths", str(file)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "") and hint in printed.err and len(printed.err.splitlines()) == 1


@pytest.mark.nightly
def test_a_file_of_lengths_gives_its_worst_batch(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("9 30 7\n12 5 4")
    words = ["estimate", "--model", "bert-tiny", "--device", "cpu", "--per_device_train_batch_size", "2", "--seed", "3"]
    words += ["--lengths", str(file), "--pad-to-multiple-of", "8"]
    text, printed = run(*words), run(*words, "--json")
    assert text.returncode == printed.returncode == 0, text.stderr
    assert "4 to 30 tokens" in text.stdout and "2 x 32 tokens" in text.stdout
    worst = json.loads(printed.stdout)
    assert worst["shapes"][worst["step"]] == [[2, 32]] and 1 in worst["order"][:2] and worst["peak_bytes"] > 0
    assert run(*words, "--seq-len", "9").returncode == 2


@pytest.mark.nightly
def test_a_name_that_is_unknown_is_not_tried_again_and_again():
    """No server answers at the Hub's address in this test, so the command must fail after the first attempt."""
    done = run("measure", "--model", "bert-lrage", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="")
    assert done.returncode == 2 and "Did you mean 'bert-large-uncased'" in done.stderr
    assert "Retry" not in done.stderr


@pytest.mark.nightly
def test_an_experiment_that_fails_is_exit_code_1():
    done = run("measure", "--model", "mixtral-8x7b", "--memory-only", "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["status"] == "refused" and result["peak_bytes"] is None


@pytest.mark.nightly
def test_two_recipes_are_explained_what_follows_then_is_the_second():
    words = [
        "explain",
        "--model",
        "bert-tiny",
        "--seq-len",
        "16",
        "--device",
        "cpu",
        "--per_device_train_batch_size",
        "2",
    ]
    done = run(*words, "--then", "--optim", "sgd", "--per_device_train_batch_size=4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["a"]["arguments"] == {"per_device_train_batch_size": 2}
    assert found["b"]["arguments"] == {"per_device_train_batch_size": 4, "optim": "sgd"}
    difference = found["b"]["peak_bytes"] - found["a"]["peak_bytes"]
    assert sum(prices["bytes"] for prices in found["switches"].values()) == found["difference_bytes"] == difference
    assert [*found["switches"]] == ["per_device_train_batch_size", "optim"] and found["versions"]["torch"]


def test_doctor_prints_the_same_as_text_and_as_json():
    text, printed = run("doctor"), run("doctor", "--json")
    assert text.returncode == printed.returncode == 0
    report = json.loads(printed.stdout)
    assert report["machine"]["name"] in text.stdout
    # The two runs are a second apart, and what is free changes in between: the words have to agree, not the figures.
    findings = [re.sub(r"[\d.]+", "#", finding["text"]) for finding in report["findings"]]
    assert findings and all(finding in re.sub(r"[\d.]+", "#", text.stdout) for finding in findings)


@pytest.mark.parametrize(("words", "is_offered"), [(["--may", "QLoRA"], True), (["--may=lora"], True), ([], False)])
def test_a_server_that_is_to_have_peft_is_offered_it_before_it_starts(words, is_offered, monkeypatch):
    """If the command's options need peft, the fork server must have peft before it starts. A server without peft would
    have to be replaced by one that imports all libraries again, which takes seconds.
    """
    calls = []
    monkeypatch.setattr(cli.optional_packages, "offer", calls.append)
    monkeypatch.setattr(cli.SERVER, "start", lambda **options: calls.append(options))
    monkeypatch.setattr(sys, "argv", ["perf-helpers", "advise", "--model", "no such model", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert calls == ["peft"] * is_offered + [{"with_bitsandbytes": True}]


COMMANDS = typer.main.get_command(cli.app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_each_value_and_gives_an_example(name):
    """Each help text starts with a noun or verb, and a value has an example, a list of choices or a default."""
    for option in COMMANDS[name].params:
        text, label = option.help or "", f"{name} {option.opts[0]}: {option.help}"
        assert re.fullmatch(r"(?!(As|Of|On|With|What|A|An|Your) )[A-Zt][^\n]+\.", text), label
        assert getattr(option, "is_flag", False) or "e.g. " in text or ": " in text or option.default, label
    summary, _, details = COMMANDS[name].help.partition("\n\n")
    assert "\n" not in summary and re.match(r"[A-Z]\w+ ", summary), summary
    assert not re.search(r"[a-z,]\n[a-z]", details), "typer keeps line ends: one sentence per line"


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.hardware, "describe", interrupted)
    monkeypatch.setattr(sys, "argv", ["perf-helpers", "doctor"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert (caught.value.code, capsys.readouterr().err) == (130, "perf-helpers: interrupted\n")


@pytest.mark.parametrize("words", [["course", "00"], ["history", "results", "--out", "."], ["report", "."]])
def test_what_cannot_be_written_is_one_line_and_exit_code_2(words, disk, tmp_path, monkeypatch, capsys):
    recorded = max((ROOT / "results").glob("*/*.json"))
    (disk("16m") / "results.json").write_bytes(recorded.read_bytes())
    folder = str(disk("16m", "remount", "ro"))
    paths = [str(ROOT / "results") if word == "results" else word for word in words]
    places = {"course": ["--out", f"{folder}/out"], "history": [f"--out={folder}/page.html"], "report": [folder]}
    words = [word for word in paths if word not in ("--out", ".")] + places[words[0]]
    monkeypatch.setattr(sys, "argv", ["perf-helpers", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    error = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and "Read-only file system" in error[-1] and folder in error[-1], error


CUT_OFF = """
ip link set lo up
mount -t tmpfs -o ro tmpfs "$HOME"
exec "$@"
"""


@pytest.mark.nightly
def test_without_network_or_home_and_from_a_folder_with_any_name_it_trains(tmp_path):
    """`measure` must train without a network, with a read-only home, in a folder whose name has a space and an accent.

    The training has two ranks, and CUDA_VISIBLE_DEVICES names GPUs that do not exist.
    """
    if os.geteuid() or subprocess.run(["unshare", "--mount", "--net", "ip", "link"], capture_output=True).returncode:
        pytest.skip("namespaces of one's own are root's")
    here, home, temporary = (tmp_path / name for name in ("où suis-je", "mein Zuhause", "für kurze Zeit"))
    for folder in (here, home, temporary):
        folder.mkdir()
    environment = {name: os.environ[name] for name in os.environ.keys() - {"PERF_HELPERS_HOME", "XDG_CACHE_HOME"}}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": "GPU-0,0,abc"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [
        sys.executable,
        "-m",
        "perf_helpers.cli",
        "measure",
        *TINY,
        "--memory-only",
        "--processes",
        "2",
        "--json",
    ]
    shell = ["unshare", "--mount", "--net", "sh", "-ec", CUT_OFF, "sh", *command]
    done = subprocess.run(shell, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "ok" and result["peak_bytes"] > 0
    assert f"{home}/.cache/perf_helpers/runs.jsonl" in done.stderr and "Read-only file system" in done.stderr
    assert not [*here.iterdir()] and not [*temporary.glob("perf_helpers*")]


@pytest.mark.nightly
def test_an_experiment_that_is_killed_is_exit_code_1_and_says_so(tmp_path):
    command = [sys.executable, "-m", "perf_helpers.cli", "measure", *TINY, "--steps", "100000", "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    while process.poll() is None:  # two meters may be on beside each other
        with contextlib.suppress(psutil.Error):
            for server in psutil.Process(process.pid).children():
                for fork in server.children():
                    fork.kill()
        time.sleep(0.05)
    result = json.loads(process.communicate()[0])
    assert (process.returncode, result["status"]) == (1, "killed") and "SIGKILL" in result["message"]
    assert not [*tmp_path.glob("perf_helpers*")]


def test_a_course_of_unknown_lessons_names_the_nearest():
    done = run("course", "05_gradient_acumulation")
    assert done.returncode == 2 and "05_gradient_accumulation" in done.stderr


def test_compare_and_report_read_a_recorded_run(tmp_path):
    recorded = sorted((ROOT / "results").glob("*/*.json"))
    assert recorded
    done = run("compare", str(recorded[-1]), str(recorded[-1]))
    assert done.returncode == 0 and "nothing changed" in done.stdout
    (tmp_path / "results.json").write_bytes(recorded[-1].read_bytes())
    assert run("report", str(tmp_path)).returncode == 0
    assert (tmp_path / "index.html").exists() and (tmp_path / "junit.xml").exists()
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    assert run("compare", str(damaged), str(recorded[-1])).returncode == 2


def test_what_is_reserved_is_a_total_in_the_same_column_as_the_categories():
    memory = Memory(3 * 2**30, "estimated", reserved_bytes=2**32, breakdown={"weights": 2**30, "activations": 2**31})
    lines = command_options.size_lines(memory, binary=True)
    assert len({len(line) for line in lines}) == 1
    assert [line.split() for line in lines[-2:]] == [
        ["total", "allocated", "3.00", "GiB"],
        ["total", "reserved", "4.00", "GiB"],
    ]
    assert command_options.size_lines(Memory(3, "counted")) == command_options.size_lines(None) == []


@pytest.mark.nightly
def test_the_command_of_the_readme_prints_the_sizes_that_are_pasted_below_it():
    """Only sizes are compared, not sentences, so that the wording may improve."""
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    versions = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in ("torch", "transformers")]
    if not all(f"\n{each}\n" in pinned for each in versions):
        pytest.skip(f"the README's answer is that of constraints.txt, not of {', '.join(versions)}")
    readme = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"```\n\$ \.venv/bin/perf-helpers (estimate .*?[^\\])\n(.*?)```", readme, re.DOTALL)
    command, pasted = found.groups()
    done = run(*shlex.split(command.replace("\\\n", " ")))
    *shown, about_more = pasted.splitlines()
    printed = done.stdout.splitlines()
    sizes = [re.findall(r"[\d.]+ [KMG]iB", "\n".join(lines)) for lines in (shown, printed[: len(shown)])]
    assert sizes[0] == sizes[1] and len(sizes[0]) > 8
    assert len(printed) == len(shown) + int(re.search(r"and (\d+) lines", about_more)[1])
