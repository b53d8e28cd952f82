"""Lesson 23's clinic must also name faults that are not among its examples, and planted wrong measurements must change
a verdict.
"""

import ast
import contextlib
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted import verdict
from torch.utils._python_dispatch import TorchDispatchMode

from perf_helpers.course.ledger import Verdict
from perf_helpers.lab.lab import Lab
from trainmem.records import Ratio

HOLDS, REFUTED = Verdict.HOLDS, Verdict.REFUTED
SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "23_troubleshooting.py"
pytestmark = pytest.mark.filterwarnings("ignore:(Full backward hook is firing|For backward hooks)")
K_PROJ = "model.layers.0.self_attn.k_proj"


@pytest.fixture
def lesson():
    """Yield the lesson's functions and classes, with the constants that they need, on one thread."""
    kinds, constants = (
        (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef),
        {"SIZES", "CONFIG", "WIDE", "lengths", "uneven"},
    )
    body = ast.parse(SOURCE.read_text("utf-8")).body
    taken = [
        node for node in body if isinstance(node, kinds) or constants & {getattr(t, "id", "") for t in targets(node)}
    ]
    scope = {"__name__": "planted"}
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    made = {name: scope[name] for name in scope if name.isidentifier() and not name.startswith("__")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the lesson: all tensors are small
    yield SimpleNamespace(scope=scope, **made)
    torch.set_num_threads(threads)


def targets(node):
    return node.targets if isinstance(node, ast.Assign) else []


def diagnosed(lesson, room=None, **options):
    return lesson.diagnose(lesson.examine(partial(lesson.script, **options), room))


def halved(lesson, **options):
    return diagnosed(lesson, half=True, optim=lesson.sgd, **options)


class TestFaultsOfOtherPlaces:
    def test_an_overflow_is_named_by_its_own_module(self, lesson):
        fault, evidence = halved(lesson, build=partial(lesson.filled, where=K_PROJ, value=3e4))
        assert fault == "overflow" and evidence.endswith(f"step 1, at {K_PROJ}")

    def test_an_overflow_between_modules_is_that_of_the_module_around(self, lesson):
        def squared(x):
            return torch.nn.functional.silu(x) + 300  # twice that is finite, their product is not

        def build(model):
            mlp = model.model.layers[1].mlp
            mlp.act_fn = torch.nn.Module()
            mlp.act_fn.forward = squared
            mlp.up_proj.register_forward_hook(lambda _, __, result: result * 0 + 300)

        fault, evidence = halved(lesson, build=build)
        assert fault == "overflow" and evidence.endswith("at model.layers.1.mlp")

    def test_a_nan_of_backward_is_named_by_its_own_layer(self, lesson):
        fault, evidence = diagnosed(lesson, build=partial(lesson.with_module, layer=0, made=lesson.Root))
        assert fault == "NaN made in backward" and "layers.0." in evidence

    def test_labels_of_which_only_the_first_is_left_are_masked(self, lesson):
        def data():
            for batch in lesson.texts():
                batch["labels"][:, 1:] = -100
                yield batch

        assert diagnosed(lesson, data=data)[0] == "labels masked"

    def test_one_batch_without_labels_among_others_is_found_and_not_where_another_fault_came_first(self, lesson):
        def data():
            for number, batch in enumerate(lesson.texts()):
                batch["labels"][:, :] = -100 if number == 2 else batch["labels"]
                yield batch

        assert diagnosed(lesson, data=data) == ("labels masked", "no label counts in 1 of 6 batches")
        root = partial(lesson.with_module, layer=0, made=lesson.Root)
        assert diagnosed(lesson, data=data, build=root)[0] == "NaN made in backward"

    def test_a_fault_that_begins_late_is_reported_with_its_step(self, lesson):
        class Late(lesson.Root):
            calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x) if self.calls > 2 else x

        fault, evidence = diagnosed(lesson, build=partial(lesson.with_module, layer=0, made=Late))
        assert fault == "NaN made in backward" and "of step 3, " in evidence

    def test_one_weight_that_is_frozen_or_left_out_is_found(self, lesson):
        def freeze(model):
            model.model.norm.weight.requires_grad_(False)

        def partly(model):
            return torch.optim.SGD([*model.parameters()][:-1], lr=0.1)

        assert diagnosed(lesson, build=freeze) == ("frozen", "1 of 21 weights, e.g. model.norm.weight")
        assert diagnosed(lesson, optim=partly) == ("not in the optimizer", "1 of 21 weights, e.g. lm_head.weight")

    @pytest.mark.parametrize("share", [0.9, 2.0])
    def test_evaluation_runs_out_of_room_by_what_is_kept_or_by_its_batch(self, lesson, share):
        small = partial(lesson.texts, rows=1, length=8)
        peak = max(lesson.examine(partial(lesson.script, data=small), 1e12)["peaks"].values())
        tests = [*lesson.texts(400)] if share > 1 else [*lesson.texts(2, rows=64)]
        fault, _ = diagnosed(lesson, 2 * peak, data=small, tests=tests)
        assert fault == ("kept in evaluation" if share > 1 else "too large a batch")

    def test_what_it_does_not_know_it_does_not_name(self, lesson):
        def shrinking(watch):
            lesson.script(watch)
            raise KeyError("a column")

        assert lesson.diagnose(lesson.examine(shrinking)) == ("not known", "KeyError: 'a column'")

    @pytest.mark.nightly
    def test_another_rank_that_is_late_and_another_shape_are_found(self, lesson, tmp_path):
        lesson.scope["lab"] = Lab("cpu", out=tmp_path, timeout=60)
        late = lesson.examine_ranks(partial(lesson.ranks, saves=(0, 1)), "late")
        assert lesson.diagnose(late) == ("a rank is late", "1 calls of rank 0; it is in save_checkpoint")
        grown = lesson.examine_ranks(partial(lesson.ranks, grows=(0, 2)), "grown")
        assert lesson.diagnose(grown) == ("unequal shapes", "call 3: shapes 5 and 4")


class TestVerdicts:
    def ward(self, lesson):
        sick = {
            "NaN made in backward": dict(build=partial(lesson.with_module, layer=1, made=lesson.Root)),
            "learning rate 0": dict(optim=lesson.warmed_up),
            "healthy": {},
        }
        found = {name: diagnosed(lesson, **options) for name, options in sick.items()}
        return lesson.named_rightly({name: [name, name, *answer] for name, answer in found.items()})

    def test_a_tool_that_looks_only_at_the_end_of_the_chain_does_not_name_the_cause(self, lesson):
        assert verdict("troubleshooting", self.ward(lesson)) is HOLDS
        lesson.scope["note"] = lambda seen, phase, place: seen.update(
            {"first break": (phase, place, 0)}
        )  # the last one
        assert verdict("troubleshooting", self.ward(lesson)) is REFUTED

    def test_a_tool_that_calls_the_healthy_sick_is_refuted_however_much_it_finds(self, lesson):
        rules = lesson.chain_rules
        lesson.scope["chain_rules"] = lambda seen: iter([*rules(seen), ("learning rate 0", "to be safe")])
        assert verdict("troubleshooting", self.ward(lesson)) is REFUTED

    @pytest.mark.parametrize(("turned", "expected"), [(False, HOLDS), (True, REFUTED)])
    def test_the_first_frame_in_place_of_the_last_names_another_module(self, lesson, turned, expected):
        if turned:
            findall = lambda *given: re.findall(*given)[::-1]  # noqa: E731
            lesson.scope["re"] = SimpleNamespace(findall=findall)
        build = partial(lesson.filled, where=K_PROJ, value=3e4)
        reported = lesson.detector(partial(lesson.script, half=True, optim=lesson.sgd, build=build))
        assert verdict("debug-overflow", float(reported == (K_PROJ, 0))) is expected

    @pytest.mark.parametrize(("replaced", "expected"), [(False, REFUTED), (True, HOLDS)])
    def test_a_detector_that_looked_for_zeros_would_find_underflow(self, lesson, replaced, expected):
        class Zeros(lesson.DebugUnderflowOverflow):
            def analyse_variable(self, var, ctx):
                super().analyse_variable(var, ctx)
                if torch.is_tensor(var) and var.requires_grad and not var.is_leaf:
                    var.register_hook(self.look)
                if torch.is_tensor(var) and not var.any() and var.numel() > 1:
                    self.look(var)

            def look(self, tensor):
                if (tensor == 0).float().mean() > 0.9:
                    print(" " * 18 + "somewhere Linear\nDetected underflow")
                    raise ValueError("underflow")

        if replaced:
            lesson.scope["DebugUnderflowOverflow"] = Zeros
        tiny = partial(lesson.filled, where="model.layers.0.mlp.up_proj", value=1e-6)
        sick = [dict(scale=1e-5), dict(build=tiny)]
        reported = [lesson.detector(partial(lesson.script, half=True, optim=lesson.sgd, **one)) for one in sick]
        assert verdict("debug-underflow", sum(one is not None for one in reported) / 2) is expected

    @pytest.mark.parametrize(("opens", "expected"), [(False, REFUTED), (True, HOLDS)])
    def test_a_detector_that_opens_dicts_finds_the_nan_loss_in_both_ways(self, lesson, opens, expected):
        if opens:
            lesson.scope["DebugUnderflowOverflow"] = lesson.Opening
        options = dict(watch=lesson.Opening) if opens else dict(debug="underflow_overflow")
        reported = [
            lesson.detector(partial(lesson.script, data=lesson.masked)) is not None,
            lesson.logged(2, **options)[2],
        ]
        assert verdict("debug-nan-loss", sum(reported) / 2) is expected

    @pytest.mark.parametrize(("filters", "expected"), [(True, REFUTED), (False, HOLDS)])
    def test_without_its_filter_the_log_shows_every_nan(self, lesson, filters, expected):
        lines, nan, _ = lesson.logged(3, logging_nan_inf_filter=filters)
        assert nan == len(lines) == 3
        assert verdict("nan-is-logged", sum(line != line for line in lines) / nan) is expected

    def test_to_have_spoken_at_all_is_not_to_have_named_the_place(self, lesson):
        reported = lesson.detector(partial(lesson.script, build=partial(lesson.with_module, layer=0, made=lesson.Root)))
        assert verdict("debug-backward", float(reported == ("model.layers.0.mlp.act_fn.1", 0))) is REFUTED
        assert verdict("debug-backward", float(reported is not None)) is HOLDS  # the wrong question

    @pytest.mark.parametrize(("is_on", "expected"), [(True, HOLDS), (False, REFUTED)])
    def test_anomaly_mode_that_is_off_names_nothing(self, lesson, monkeypatch, is_on, expected):
        if not is_on:
            monkeypatch.setattr(torch.autograd, "set_detect_anomaly", lambda _: contextlib.nullcontext())
        made = {lesson.Power: "PowBackward0", lesson.Share: "DivBackward0"}
        sick = {one: partial(lesson.script, build=partial(lesson.with_module, layer=0, made=one)) for one in made}
        reported = sum(lesson.anomaly(sick[one]) == name for one, name in made.items())
        assert verdict("anomaly-names-it", reported / 2) is expected

    @pytest.mark.parametrize(("keeps", "expected"), [(False, HOLDS), (True, REFUTED)])
    def test_a_loop_that_keeps_the_loaded_checkpoint_holds_the_weights_twice(self, lesson, keeps, expected):
        def train(folder, resume, _):
            model = lesson.LlamaForCausalLM(lesson.CONFIG)
            optimizer = lesson.adam(model)
            if resume:
                checkpoint = torch.load(f"{folder}/own.pt")
                model.load_state_dict(checkpoint["model"]), optimizer.load_state_dict(checkpoint["optimizer"])
                kept = checkpoint if keeps else None  # noqa: F841
                del checkpoint
            for batch in lesson.small():
                model(**batch).loss.backward()
                optimizer.step(), optimizer.zero_grad()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/own.pt")

        scratch, resumed = lesson.peaks_of(train)
        assert verdict("resume-peak", resumed / scratch) is expected

    @pytest.mark.parametrize("forgets", [False, True])
    def test_a_step_timed_without_its_detector_costs_nothing(self, lesson, forgets):
        class Operations(TorchDispatchMode):  # a clock of operations, so that no test reads a real one
            count = 0

            def __torch_dispatch__(self, operation, types, given=(), named=None):
                self.count += 1
                return operation(*given, **(named or {}))

        with Operations() as clock:
            ticks = SimpleNamespace(thread_time=lambda: float(clock.count), perf_counter=time.perf_counter)
            lesson.scope["time"] = ticks
            without = lesson.step_seconds(lambda *_: None)
            watch = None if forgets else lesson.DebugUnderflowOverflow
            watched = lesson.step_seconds(lambda model, _: watch(model) and None if watch else None)
        ratio = Ratio.of_pairs([watched / without] * 3, 1.05)
        reported = verdict("debug-cost", (ratio.low, ratio.high))
        assert (reported is HOLDS) is not forgets


class TestFragments:
    """Decide the claim "oom-fragments" by the estimate: it holds with the lesson's allocator settings, and is refuted
    if these settings have no effect.
    """

    @pytest.fixture
    def rest(self, lesson):
        """Return a function that takes allocator settings and returns reserved bytes minus peak bytes of tensors.

        Both are estimates, which the lesson makes on a machine without a GPU.
        """
        lesson.scope["lab"] = SimpleNamespace(machine=SimpleNamespace(kind="cpu"))

        def rest(settings):
            memory = lesson.with_settings(settings)
            return memory.reserved_bytes - memory.peak_bytes

        return rest

    @pytest.mark.nightly
    def test_segments_that_grow_leave_less_and_a_switch_that_does_nothing_does_not(self, rest):
        plain, expandable = rest(""), rest("expandable_segments:True")
        assert verdict("oom-fragments", expandable / plain) is HOLDS
        ignored = rest("expandable_segments:False")
        assert verdict("oom-fragments", ignored / plain) is REFUTED

    @pytest.mark.nightly
    def test_where_all_lengths_are_equal_there_is_nothing_to_avoid(self, lesson, rest):
        fewer = rest("")
        lesson.scope["uneven"] = lesson.scope["uneven"].replace(lengths=[500] * 10)
        assert rest("") < fewer / 2
