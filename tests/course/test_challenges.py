"""The challenges of lessons 19 to 25 reject further wrong answers, besides the one that the lesson itself tests."""

import ast
import copy
import re
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jupytext
import lesson_22
import pytest
import torch

from perf_helpers import exercises, plots

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
MADE = (ast.Assign, ast.FunctionDef, ast.ClassDef)


def tagged(number, tag):
    return [index for index, cell in enumerate(cells(number)) if tag in cell.metadata.get("tags", [])]


def cells(number):
    return jupytext.read(next(SOURCES.glob(f"{number}_*.py"))).cells


def challenge(number, scope):
    """Run a lesson's last exercise up to its solution, and return the names in its scope as attributes.

    `number`: the lesson's number, e.g. "22"; `scope`: {name: value} that the cells need.
    """
    chosen = cells(number)[tagged(number, "exercise")[-1] : tagged(number, "solution")[-1] + 1]
    scope |= {"exercises": exercises, "plots": plots, "torch": torch}
    for cell in chosen:
        tree = ast.parse(cell.source if cell.cell_type == "code" else "")
        is_solution = "solution" in cell.metadata.get("tags", [])
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef if is_solution else MADE)]
        exec(compile(tree, number, "exec"), scope)
    return SimpleNamespace(**{name: value for name, value in scope.items() if name.isidentifier()})


def in_this_process(work, *_, **__):
    return SimpleNamespace(ok=True, value=work(None))


LAB = SimpleNamespace(run=in_this_process, machine=SimpleNamespace(rehearsed=False))


def is_wrong(feedback, words):
    return feedback.status == "wrong" and re.search(words, feedback.text)


# ---- 19


@pytest.fixture
def in_half():
    """Return lesson 19's challenge with a tiny model, and with given times in place of measured ones."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from trainmem.records import Ratio

    seconds = {}

    def in_turns(works, turns):
        seconds["dtype"] = works[1].args[0].dtype
        return [[(each, each)] * 3 for each in (1.0, seconds.get("answer", 1.0), 1.0)]

    scope = dict(LlamaConfig=LlamaConfig, LlamaForCausalLM=LlamaForCausalLM, Trainer=Trainer, Ratio=Ratio, CPU=1)
    scope |= dict(TrainingArguments=TrainingArguments, PrinterCallback=PrinterCallback, in_turns=in_turns, turns=3)
    scope |= dict(tempfile=tempfile, Path=Path, partial=partial, lab=LAB, copy=copy)
    scope["SIZES"] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    scope["SIZES"] |= dict(vocab_size=256)
    scope["QUIET"] = dict(report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1)
    made = challenge("19", scope)
    made.seconds = seconds
    return made


@pytest.mark.nightly
def test_19_an_fp16_checkpoint_is_trained_in_fp32_and_given_back_in_fp16(in_half):
    assert in_half.check(in_half.through_fp32).status == "right"
    assert in_half.seconds["dtype"] == torch.float32, "timed in the type that it was trained in, not returned in"
    in_half.seconds["answer"] = 2.0
    assert is_wrong(in_half.check(in_half.through_fp32), "Too slow")


@pytest.mark.nightly
def test_19_another_checkpoint_or_another_type_is_refused(in_half):
    def converting(folder, train):
        model = in_half.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.save_pretrained(folder)
        return in_half.through_fp32(folder, train)

    def whole(folder, train):
        return in_half.through_fp32(folder, train).float()

    assert is_wrong(in_half.check(converting), "files in `folder` were changed")
    assert is_wrong(in_half.check(whole), "wants fp16 back")
    assert is_wrong(in_half.check(in_half.as_it_is), "In which type are the weights")


# ---- 20


def test_20_batches_are_counted_and_their_memory_is_measured():
    lengths = [10] * 60 + [100] * 4
    answers = list(range(64))

    def serve(plan, side="left"):
        return answers if side == "left" else answers[::-1]

    def peak(plan):
        return 1000 * max(len(numbers) * max(lengths[number] for number in numbers) for numbers in plan(lengths))

    scope = dict(lengths=lengths, alone=answers, serve=serve, peak=peak, large=6_400_000, lab=None)
    check = challenge("20", scope).check
    by_tokens = [range(30), range(30, 60), range(60, 64)]
    assert check(dict(plan=lambda _: by_tokens)).status == "right"
    assert is_wrong(check(dict(plan=lambda _: [[number] for number in range(64)])), "64 batches, more than")
    assert is_wrong(check(dict(plan=lambda _: by_tokens, side="right")), "64 of 64 answers differ")
    mixed = [range(30), range(30, 64)]
    assert is_wrong(check(dict(plan=lambda _: mixed)), "largest batch has 3400 tokens")


# ---- 21


@pytest.fixture
def in_files(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "small")
    rows = [{"input_ids": torch.arange(64).roll(shift)[:16]} for shift in range(64)]
    scope = dict(load=LlamaForCausalLM.from_pretrained, sentences=lambda: rows, home=tmp_path, missing=None, lab=LAB)
    return challenge("21", scope | dict(partial=partial, tempfile=tempfile, Path=Path))


def test_21_weights_in_files_are_trained_and_found_in_them(in_files):
    assert in_files.check(in_files.shared).status == "right"


def test_21_a_private_mapping_a_frozen_weight_and_another_checkpoint_are_refused(in_files):
    def frozen(source, files):
        model = in_files.shared(source, files)
        model.lm_head.weight.requires_grad_(False)
        return model

    def in_the_checkpoint(source, files):
        model = in_files.shared(source, files)
        model.save_pretrained(source)
        (source / "mine.bin").write_bytes(b"1")
        return model

    def saved_once(source, files):
        model = in_files.load(source)
        torch.save(model.state_dict(), files / "model.bin")
        return model

    assert is_wrong(in_files.check(lambda source, files: in_files.load(source)), "the files hold 0 of them")
    assert is_wrong(in_files.check(saved_once), "the files hold 0 of them")
    assert is_wrong(in_files.check(frozen), "Does the optimizer have")
    assert is_wrong(in_files.check(in_the_checkpoint), "The checkpoint has changed")


# ---- 22


@pytest.fixture
def choosing(tmp_path):
    """Return lesson 22's challenge with a formula for the loss instead of trainings: after one epoch the best learning
    rate is ten times as high as after four.
    """
    scope = lesson_22.functions(tmp_path).scope
    scope["train"] = lambda seed, learning_rate, num_train_epochs=4: (learning_rate, num_train_epochs)

    def score(model, data=None):
        rate, epochs = model
        best = -2 if epochs > 2 else -1
        return (torch.tensor(rate).log10().item() - best) ** 2

    scope["score"] = score
    return challenge("22", scope)


def test_22_who_chooses_better_is_right_and_who_trains_longer_is_not(choosing):
    valley = choosing.score

    def known(run, rates):
        return min(rates, key=lambda rate: valley((rate, 4)))

    def long(run, rates):
        return min(rates, key=lambda rate: run(rate, 4, 0))

    assert choosing.check(known).status == "right"
    assert is_wrong(choosing.check(long), "64 epochs at most")
    assert is_wrong(choosing.check(choosing.by_halving), "Which candidates")


# ---- 23


@pytest.fixture
def clinic():
    """Yield lesson 23's functions on one thread of torch; they have one example training, which has no fault."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    body = ast.parse(next(SOURCES.glob("23_*.py")).read_text("utf-8")).body
    wanted = {"SIZES", "CONFIG"}
    taken = [node for node in body if isinstance(node, kinds) or wanted & set(names(node))]
    scope = {"__name__": "planted"}
    exec(compile(ast.Module(taken, []), "23", "exec"), scope)
    scope["numbers"] = {"2": ("healthy", partial(scope["script"], data=partial(scope["masked"], 8)))}
    scope["learning"] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(**{name: value for name, value in scope.items() if name.isidentifier()})
    torch.set_num_threads(threads)


def names(node):
    return [getattr(target, "id", "") for target in node.targets] if isinstance(node, ast.Assign) else []


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:(Full backward hook is firing|For backward hooks)")
def test_23_a_fault_must_harm_be_unknown_to_the_tool_and_be_found_by_the_rule_alone(clinic):
    found = dict(plant=dict(data=clinic.of_others), reading=clinic.compare_labels, rule=clinic.labels_of_others)
    assert clinic.check(found).status == "right"
    assert is_wrong(clinic.check(found | dict(plant={})), "do any harm")
    assert is_wrong(clinic.check(found | dict(plant=dict(optim=clinic.warmed_up))), "already: learning rate 0")
    assert is_wrong(clinic.check(found | dict(rule=lambda seen: "")), "does not find it")
    assert is_wrong(clinic.check(found | dict(rule=lambda seen: "always")), "2 healthy patients are called sick")


# ---- 24


def test_24_both_numbers_are_tested_on_both_sides():
    from typing import NamedTuple

    class Offer(NamedTuple):
        tflops: float
        gibibytes: int
        price_an_hour: float

    offers = {"small": Offer(60, 8, 0.20), "middle": Offer(125, 24, 1.00), "large": Offer(989, 80, 3.00)}
    scope = dict(offers=offers, samples=5_000_000, estimated=1, flops=1)
    scope |= dict(hours=lambda offer: 20.5 * 125 / offer.tflops, fits=lambda offer: offer.gibibytes > 8)
    check = challenge("24", scope).check
    right = dict(samples=5_000_000 * 2 / 20.5, price=7.0)
    assert check(right).status == "right"
    for factor, words in ((0.9, "still"), (1.1, "no longer"), (4, "no longer")):
        assert is_wrong(check(right | {"samples": factor * right["samples"]}), words)
    for price, words in ((7.912, "already"), (3.0, "not yet")):
        assert is_wrong(check(right | {"price": price}), words)
    scope["flops"] = None
    assert check(right).status == "not measured"


# ---- 25


def test_25_a_length_is_right_only_if_nine_tenths_of_it_are_too_short():
    def counted(name, rank, task, **_):
        return dict(zip(("activations", "frozen_weights"), (task, 200.0), strict=True))

    task = SimpleNamespace(replace=lambda seq_len: float(seq_len))
    scope = dict(counted=counted, task=task, part=lambda run, kind, phase: run[kind], no_peft=None)
    scope |= dict(over=lambda one, other: one / other, runs=[SimpleNamespace(peak_bytes=1)])
    check = challenge("25", scope).check
    statuses = [check(tokens).status for tokens in (150, 200, 201, 215, 230)]
    assert statuses == ["wrong", "wrong", "right", "right", "wrong"]
