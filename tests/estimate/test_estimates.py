"""The estimate's answers, refusals and stored answers. Its exactness is tested in test_estimate_exact.py."""

import importlib.metadata
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from perf_helpers import cli
from perf_helpers.lab.lab import Lab
from trainmem.advise import advise
from trainmem.cards import CARDS, DEFAULT_CAPABILITY
from trainmem.core import hardware
from trainmem.core.outcomes import Invalid, Outcome
from trainmem.core.task import Task
from trainmem.estimate import allocator_settings, estimate, estimates_so_far, fresh_process
from trainmem.estimate.memory_estimate import MemoryEstimate
from trainmem.measure import processes
from trainmem.records import CATEGORIES, Memory

TINY = Task("bert-tiny", seq_len=24, config={"hidden_size": 32, "intermediate_size": 64, "vocab_size": 200})


def predicted(**options):
    return estimate(TINY, **{"device": "cpu", "per_device_train_batch_size": 2} | options)


def test_an_estimate_says_what_a_run_would_and_how_it_was_made():
    found = predicted(name="mine")
    assert found.name == "mine" and found.memory.kind == "estimated"
    assert (
        sum(found.memory.breakdown.values())
        == found.peak_bytes
        == max(sum(column) for column in zip(*(found.memory.timeline[c] for c in CATEGORIES), strict=True))
    )
    assert found.memory.parameters == TINY.parameters()
    assert set(found.memory.phases) == {"forward", "backward", "step"}
    assert found.seconds > 0
    assert found.own_bytes < 2**30
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optm": "sgd"}, "Did you mean 'optim'"),
        ({"optim": "adamw_torch_fsued"}, "Did you mean 'adamw_torch_fused'"),
        ({"per_device_train_batch_size": 0}, "at least 1"),
        ({"device": "gpu"}, "choose 'cpu' or 'cuda'"),
        ({"torch_compile": True}, "torch_compile.*lab.train"),
        ({"device": "cuda", "torch_compile_backend": "aot_eager"}, "leave torch_compile out"),
    ],
)
def test_a_mistake_is_named_before_anything_is_traced(options, message, monkeypatch):
    monkeypatch.setattr(processes, "call", lambda *_, **__: pytest.fail("something was followed"))
    with pytest.raises(ValueError, match=message):
        predicted(**options)


@pytest.mark.parametrize(("samples", "options"), [(3, {}), (7, {"processes": 2})])
def test_a_training_without_a_step_is_refused(samples, options, tmp_path):
    task = TINY.replace(dataset_size=samples)
    given = {"per_device_train_batch_size": 4, "dataloader_drop_last": True} | options
    for ask in (
        estimate,
        lambda task, device, **given: Lab("cpu", out=tmp_path).train("t", task=task, measure="memory", **given),
    ):
        with pytest.raises(ValueError, match=f"^no step can run: dataset_size={samples} .*leave out dataloader_drop"):
            ask(task, device="cpu", **given)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({"device": "cuda", "compute_capability": (8, 0), "bf16": True}, ("flash",)),
        ({"device": "cuda", "compute_capability": (7, 5), "fp16": True}, ("memory-efficient",)),
        ({"device": "cuda", "compute_capability": (8, 0), "attn_implementation": "eager"}, ()),
        ({"device": "cpu"}, ()),  # its fused kernel takes no dropout
    ],
)
def test_the_kernel_that_attention_takes_is_reported(options, kernels):
    assert estimate(TINY, **options).attention == kernels


def test_what_cannot_be_traced_is_refused_by_name():
    def lost(task):
        raise RuntimeError("no such kernel")

    with pytest.raises(ValueError, match=r"bert-tiny .*no such kernel.*measure"):
        estimate(TINY, device="cpu", function=lost)


def test_the_engines_own_refusal_is_not_taken_for_a_failure_of_the_trace():
    with pytest.raises(ValueError, match=r"^cannot generate data for BertForNextSentencePrediction"):
        estimate(TINY.replace(architecture="BertForNextSentencePrediction"), device="cpu")


def test_what_depends_on_values_is_refused_with_its_operation():
    def chosen(task):
        return torch.nn.Linear(4, 4)(torch.ones(3, 4)).nonzero()

    with pytest.raises(ValueError, match=r"aten\.nonzero\.default in .* depends on .*measure"):
        estimate(TINY, device="cpu", function=chosen)


@pytest.mark.nightly
def test_an_edited_configuration_is_another_model(tmp_path):
    file = tmp_path / "config.json"
    peaks = []
    for size in (32, 64):
        file.write_text(json.dumps({"model_type": "bert", "hidden_size": size, "num_attention_heads": 2}))
        peaks.append(estimate(Task(str(file), seq_len=8), device="cpu").peak_bytes)
    assert peaks[0] < peaks[1]


def test_a_loop_of_ones_own_is_traced_too():
    def loop(task):
        import torch

        model = task.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(**task.batch(2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run = Lab("cpu").run(loop, task=TINY, measure=("memory",))
    assert estimate(TINY, device="cpu", function=loop).memory.breakdown == run.memory.breakdown


LIBRARIES = {
    "cuDNN": lambda torch, rows: torch.nn.LSTM(8, 8)(rows)[0],
    "cuFFT": lambda torch, rows: torch.fft.rfft(torch.nn.Linear(8, 8)(rows)).abs(),
    "cuSOLVER": lambda torch, rows: torch.linalg.inv(torch.nn.Linear(8, 8)(rows)),
    "": lambda torch, rows: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())(rows).norm(),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_memory_of_a_library_that_is_not_known_is_an_assumption(name):
    compute = LIBRARIES[name]

    def loop(task):
        import torch

        compute(torch, torch.ones(8, 8)).sum().backward()

    found = [text.partition(":")[0] for text in estimate(TINY, card="a100", function=loop).assumptions]
    assert [each for each in found if each in LIBRARIES] == [name] * bool(name)


def test_sums_that_python_writes_in_a_backward_are_tensors_of_their_own():
    """Autograd adds gradients in place. If Python code adds them in the backward of a `Function` or in a hook, each sum
    is a new tensor, and the estimate must count it.
    """

    def loop(task):
        import torch

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor):
                return tensor * 2

            @staticmethod
            def backward(ctx, gradient):
                first, second = gradient * 2, gradient * 3
                return first + second + first

        weight = torch.nn.Parameter(torch.ones(10_000))
        optimizer = torch.optim.SGD([weight])
        for _ in range(2):
            (Twice.apply(torch.nn.Identity()(weight)) + Twice.apply(weight)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run = Lab("cpu").run(loop, task=TINY, measure=("memory",))
    found = estimate(TINY, device="cpu", function=loop)
    assert found.peak_bytes == run.peak_bytes and found.memory.breakdown == run.memory.breakdown


@pytest.mark.parametrize(("is_sent", "segments"), [(True, 64_000_000), (False, 96_000_000)])
def test_a_model_that_a_loop_sends_to_the_device_was_made_on_the_host(is_sent, segments):
    def loop(task):
        import torch

        model = torch.nn.Linear(4000, 4000, bias=False).to(torch.bfloat16)  # 64 MB, cast to 32
        model.to(torch.device("cpu")) if is_sent else None
        model(torch.ones(1, 4000).to(torch.bfloat16)).sum().backward()

    found = estimate(TINY, card="t4", function=loop).memory
    assert found.breakdown["weights"] == found.breakdown["gradients"] == 32_000_000
    assert segments < found.reserved_bytes < segments + 28_000_000, "with cuBLAS' workspaces, in segments of their own"


def test_a_write_into_zeros_that_a_model_makes_allocates_nothing():
    """A write of a fake tensor into a real one must allocate nothing.

    BigBird writes parts of its attention, which are fake, into a new tensor of zeros, which is real unless it is large.
    """

    def loop(task):
        import torch

        class Whole(torch.nn.Module):
            def forward(self, part):
                whole = torch.zeros(1000, 1000)
                whole[:2, : part.shape[1]] = part
                whole[2:4].scatter_(1, torch.zeros(2, 1, dtype=torch.int64), part)
                return whole.sum()

        with torch.no_grad():
            Whole()(task.build_model()(**task.batch(2)).logits)

    run = Lab("cpu").run(loop, task=TINY, measure=("memory",))
    assert estimate(TINY, device="cpu", function=loop).peak_bytes == run.peak_bytes


@pytest.mark.parametrize(
    "chosen",
    [
        lambda: "cuda:0",
        lambda: 0,
        lambda: "cuda" if torch.cuda.is_available() else "cpu",
        lambda: torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu",
    ],
)
def test_a_loop_may_choose_the_gpu_as_people_write_it(chosen):
    def peak(choose):
        def loop(task):
            device = choose()
            model = torch.nn.Sequential(torch.nn.Linear(512, 64), torch.nn.BatchNorm1d(64)).to(device)
            optimizer, end = torch.optim.AdamW(model.parameters()), torch.cuda.Event()
            for _ in range(2):
                labels = torch.randint(0, 64, (16,), device=device)
                torch.nn.functional.cross_entropy(model(torch.randn(16, 512).to(device)), labels).backward()
                optimizer.step()
                end.record()
                torch.cuda.synchronize()

        return estimate(TINY, card="t4", function=loop).peak_bytes

    assert peak(chosen) == peak(lambda: torch.device("cpu"))


def test_the_second_question_is_answered_from_what_is_known(monkeypatch):
    first = predicted()
    monkeypatch.setattr(processes, "call", lambda *_, **__: pytest.fail("it was followed again"))
    assert predicted(name="again").memory == first.memory


def test_an_estimate_is_listed_once_under_its_latest_name():
    for name in ("first", "second"):
        predicted(name=name, weight_decay=0.125)
    names = [found.name for found in estimates_so_far() if found.arguments.get("weight_decay") == 0.125]
    assert names == ["second"]


@pytest.mark.parametrize(
    "device, memory, context, expected",
    [
        ("cpu", {}, 7, 100),
        ("cuda", {}, 0, 100),
        ("cuda", {}, 7, 107),
        ("cuda", {"reserved_bytes": 120}, 7, 127),
        ("cuda", {"reserved_bytes": 90, "context_bytes": 5}, 7, 105),
    ],
)
def test_what_a_device_needs_is_what_is_reserved_and_the_context(device, memory, context, expected):
    found = MemoryEstimate("n", {}, {}, device, Memory(100, "estimated", **memory), (), "", 0.0, None)
    assert found.needed_bytes(context) == expected


class TestCommandLine:
    def run(self, *words):
        return CliRunner().invoke(cli.app, ["estimate", "--model", "bert-tiny", "--seq-len", "24", *words])

    def test_json_holds_what_was_promised(self):
        result = self.run("--device", "cpu", "--per_device_train_batch_size", "2", "--json")
        assert result.exit_code == 0
        content = json.loads(result.stdout)
        for name in ("peak_bytes", "breakdown", "phases", "assumptions", "seconds", "arguments", "versions"):
            assert name in content
        assert sum(content["breakdown"].values()) == content["peak_bytes"]

    def test_text_names_the_assumptions(self):
        result = self.run("--device", "cuda", "--compute-capability", "8.0", "--inference")
        assert result.exit_code == 0 and "- rounding: " in result.stdout and "optimizer states" not in result.stdout

    def test_a_card_has_a_capability_and_a_memory(self):
        listed = self.run("--card", "T4").stdout
        assert (
            "bert-tiny on T4: peak" in listed and "bert-tiny: fits the T4 16 GiB: " in listed and "margin of" in listed
        )
        words = ["estimate", "--model", "gpt2-large", "--card", "t4", "--per_device_train_batch_size", "2"]
        assert "gpt2-large: does not fit the T4 16 GiB: " in CliRunner().invoke(cli.app, words).stdout
        wrong = self.run("--card", "t5")
        assert isinstance(wrong.exception, ValueError) and "'t5'" in str(wrong.exception)

    def test_a_wrong_capability_is_explained(self):
        result = self.run("--device", "cuda", "--compute-capability", "ampere")
        assert isinstance(result.exception, ValueError) and "9.0" in str(result.exception)


@pytest.mark.nightly
def test_a_card_is_its_capability_and_its_memory_less_a_context():
    t4, options = CARDS["t4"], {"task": TINY, "per_device_train_batch_size": 2}
    answer = {"compute_capability": t4.capability, "device_memory": t4.memory_bytes - t4.context_bytes}
    assert estimate(**options, card="t4").memory == estimate(**options, device="cuda", **answer).memory
    assert estimate(**options, card="t4", device_memory=2**20).is_too_large


@pytest.mark.nightly
def test_under_an_untested_torch_the_newest_rules_answer_and_everybody_says_so(monkeypatch):
    """With a pretended torch 2.99, the estimate, its JSON and the advice name the rules that were used, and say that
    they are untested.
    """
    plain = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0a0+git" if name == "torch" else plain(name))
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git")
    allocator_settings._warn_of_untested.cache_clear()
    listed = allocator_settings.untested_text("2.99")
    assert "2.99" in listed and allocator_settings.newest() in listed
    options = {"device": "cuda", "compute_capability": (7, 5), "per_device_train_batch_size": 2}
    with pytest.warns(UserWarning, match=re.escape(listed)):
        untested = estimate(TINY, **options)
    known = estimate(TINY, **options, torch_version=allocator_settings.newest())
    assert untested.memory == known.memory
    assert [each.assumptions[-1].startswith(listed) for each in (untested, known)] == [True, False]
    rules = [(each["torch_rules"], each["untested_torch"]) for each in (untested.to_dict(), known.to_dict())]
    assert rules == [(allocator_settings.newest(), "2.99"), (allocator_settings.newest(), None)]
    advised = advise(TINY, card="t4", effective_batch=2)
    assert any(text.startswith(listed) for text in advised.assumptions) and listed in repr(advised)


def test_an_estimate_on_a_cpu_names_no_rules_of_cuda():
    assert predicted().torch_rules is None and predicted().untested_torch is None


@pytest.mark.nightly
def test_an_estimate_names_its_torch_release_and_takes_another(monkeypatch):
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name, plain=importlib.metadata.version: "2.13.0+cpu" if name == "torch" else plain(name),
    )
    options = {"device": "cuda", "compute_capability": (7, 5), "per_device_train_batch_size": 2}
    plain, same, older = (estimate(TINY, **options, torch_version=each) for each in (None, "2.13", "2.11.0"))
    assert plain.memory == same.memory
    assert [each.assumptions[-1].partition(":")[0] for each in (plain, older)] == ["torch 2.13", "torch 2.11"]
    assert "workspace of its own" in older.assumptions[-1]
    newer = estimate(TINY, **options, torch_version="2.15")
    assert "frees its workspace" in newer.assumptions[-1] != plain.assumptions[-1]
    assert older.peak_bytes - plain.peak_bytes == 2**20, "cuBLASLt's, of the one thread that adds biases"
    with pytest.raises(ValueError, match=r"torch_version='2.9': .*2.10"):
        estimate(TINY, **options, torch_version="2.9")
    with pytest.raises(ValueError, match=r"torch_version='2.11' .*device='cuda'"):
        predicted(torch_version="2.11")


def test_on_a_machine_with_a_gpu_its_own_capability_counts(monkeypatch):
    gpu = hardware.Gpu(0, name="NVIDIA A100", memory_bytes=80 * 2**30, capability=(8, 0))
    monkeypatch.setattr(hardware, "describe", lambda: hardware.Machine("NVIDIA A100", "cuda", gpus=(gpu,)))
    options = {"task": TINY, "per_device_train_batch_size": 2}
    default, explicit = (estimate(**options, **more) for more in ({}, {"device": "cuda", "compute_capability": (8, 0)}))
    assert default.device == "cuda" and default.memory == explicit.memory
    hopper = estimate(**options, compute_capability=(9, 0))
    assert hopper.peak_bytes > default.peak_bytes, "its workspace is larger"


def test_where_no_gpu_is_named_and_none_is_there_the_default_one_is_meant(monkeypatch):
    monkeypatch.setattr(hardware, "describe", lambda: hardware.Machine("a CPU", "cpu"))
    options = {"device": "cuda", "per_device_train_batch_size": 2}
    assert estimate(TINY, **options) == estimate(TINY, **options, compute_capability=DEFAULT_CAPABILITY)


# ---- failures of fresh subprocesses


@pytest.fixture
def calls(monkeypatch):
    """Let `processes.call` not call its function, but raise the first of the function's arguments, an exception."""

    def call(with_probe, function, arguments, timeout, on_percent):
        raise arguments[0]

    monkeypatch.setattr(processes, "call", call)


LATE = processes.Failed(Outcome("timed out", "no result within 1 s"))
KILLED = processes.Failed(Outcome("killed", "SIGKILL"))


@pytest.mark.parametrize(
    "failure, message",
    [
        (Invalid("no such model"), "^no such model$"),
        (LATE, r"\bm .*within 1 s.*timeout="),
        (KILLED, r"\bm .*SIGKILL.*measure"),
    ],
    ids=["invalid", "late", "killed"],
)
def test_a_failure_is_a_value_error_that_says_what_to_do(calls, failure, message):
    with pytest.raises(ValueError, match=message):
        fresh_process.ask(None, failure, model="m", timeout=1)


def test_what_the_trainer_refuses_is_told_in_its_own_words():
    with pytest.raises(ValueError, match=r"^`args\.metric_for_best_model` must be provided"):
        estimate(Task("bert-tiny", seq_len=8), device="cpu", save_strategy="best")
