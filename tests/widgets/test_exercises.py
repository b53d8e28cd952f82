"""Feedback on a learner's answers: right, wrong and by how much; and errors for an author's mistakes."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from perf_helpers import Lab, exercises, learner_log
from trainmem.core.task import Task
from trainmem.records import Comparison, Memory, Ratio, Run, Store
from trainmem.unknown import Unknown

LESSON = "14_all_together"
VANILLA = {"per_device_train_batch_size": 4}
SMALL = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
TASK = Task("bert-tiny", seq_len=32)


class FakeLab:
    """A lab whose runs have the peak that `peaks` gives for their micro-batch, and whose comparisons all return the
    speed ratio `ratio`.

    `folder`: folder for the file of runs.
    """

    def __init__(self, folder, ratio=None):
        self.lesson, self.store = LESSON, Store(folder / "runs.jsonl")
        self.peaks, self.runs, self.ratio = {1: 50_000_000, 2: 70_000_000, 4: 100_000_000}, [], ratio
        self.kind, self.status = "counted", "ok"

    def train(self, name, *, task, measure, processes, **arguments):
        memory = Memory(self.peaks[arguments["per_device_train_batch_size"]], self.kind)
        message = "" if self.status == "ok" else "the process was ended"
        what = {"arguments": arguments, "task": task.to_dict(), "memory": memory, "processes": processes}
        self.runs.append(Run(name, self.status, message, **what))
        return self.runs[-1]

    def compare(self, baseline, other):
        return Comparison(baseline, other, None, self.ratio)


@pytest.fixture
def lab(tmp_path):
    return FakeLab(tmp_path)


@pytest.fixture
def vanilla(lab):
    return lab.train("vanilla", task=TASK, measure=("memory",), processes=1, **VANILLA)


def kept(lab, kind):
    return [entry.content for entry in learner_log.of(lab).read() if entry.kind == kind]


def judge(answer):
    if answer is None:
        return exercises.not_attempted()
    return exercises.right("yes") if 12 / answer == 3 else exercises.wrong("because it is 4")


# ---- feedback


def test_a_mistake_whose_run_fails_proves_nothing():
    failed = exercises.run_failed(SimpleNamespace(status="failed", failure="AttributeError: ..."))
    assert failed.status == "wrong"
    judge = {None: exercises.not_attempted(), 4: exercises.right("ok"), 5: failed}.get
    with pytest.raises(RuntimeError, match="AttributeError"):
        exercises.prove(judge, solution=4, mistake=5)


def test_feedback_shows_code_and_escapes_the_rest():
    shown = exercises.wrong("`optim` < 3 & <script>")._repr_html_()
    assert "<code>optim</code> &lt; 3 &amp; &lt;script&gt;" in shown


def test_feedback_takes_its_colours_from_the_theme():
    for status in ("not attempted", "wrong", "right", "not measured", "no guess", "guess"):
        shown = exercises.Feedback(status, "x")._repr_html_()
        assert "var(--jp-" in shown and "background" not in shown and f" {status}</b>" in shown


# ---- check


def test_a_check_keeps_each_outcome(lab):
    statuses = [exercises.check(lab, "cut", judge, answer).status for answer in (None, 3, 4)]
    assert statuses == ["not attempted", "wrong", "right"]
    assert [content["status"] for content in kept(lab, "exercise")] == statuses


def test_an_answer_that_raises_is_wrong_and_says_what_it_raised(lab):
    feedback = exercises.check(lab, "cut", judge, 0)
    assert feedback.status == "wrong" and "ZeroDivisionError: division by zero" in feedback.text
    assert kept(lab, "exercise") == [{"status": "wrong"}]


def test_a_broken_check_is_loud(lab):
    def broken(answer):
        raise KeyError("no such run")

    with pytest.raises(KeyError):
        exercises.check(lab, "cut", broken, None)
    with pytest.raises(KeyError):
        exercises.prove(broken, solution=4, mistake=3)
    with pytest.raises(TypeError, match="'cut' returned True"):
        exercises.check(lab, "cut", lambda answer: True, 4)
    assert kept(lab, "exercise") == []


def test_a_solution_is_not_kept_as_the_learners_answer(lab):
    def checked(answer):
        return exercises.check(lab, "cut", judge, answer)

    assert exercises.prove(checked, solution=4, mistake=3).status == "right"
    with pytest.raises(RuntimeError):
        exercises.prove(checked, solution=3, mistake=4)
    assert kept(lab, "exercise") == []
    checked(4)
    assert kept(lab, "exercise") == [{"status": "right"}]


def test_a_check_is_held_against_its_solution_and_a_mistake():
    assert exercises.prove(judge, solution=4, mistake=5).status == "right"
    with pytest.raises(RuntimeError, match="wrong"):
        exercises.prove(judge, solution=5, mistake=4)
    with pytest.raises(RuntimeError, match="not attempted"):
        exercises.prove(lambda answer: exercises.right("always"), solution=4, mistake=5)


@pytest.mark.parametrize("unknown", [4, 5])
def test_nothing_is_proved_while_the_solution_or_the_mistake_is_not_measured(unknown):
    judge = {None: exercises.not_attempted(), 4: exercises.right("ok"), 5: exercises.wrong("no")}
    judge[unknown] = exercises.not_measured("it needs a GPU")
    assert exercises.prove(judge.get, solution=4, mistake=5).status == "not measured"


# ---- hints


class Folds(HTMLParser):
    """Find out how deeply each text of the HTML `shown` is folded: `texts` is {text: number of folds that contain it}.

    The summary of a fold counts as outside of the fold.
    """

    def __init__(self, shown):
        super().__init__()
        self.depth, self.texts = 0, {}
        self.feed(shown)

    def handle_starttag(self, tag, attrs):
        self.depth += tag == "details"
        assert (tag, attrs) != ("details", [("open", None)])

    def handle_endtag(self, tag):
        self.depth -= tag == "details"

    def handle_data(self, data):
        self.texts[data] = self.depth


def test_each_hint_is_folded_into_the_one_before():
    folds = Folds(exercises.hint("look at the `peak`", "a < b", "the answer")._repr_html_())
    assert folds.depth == 0
    wanted = {"Hint 1 of 3": 1, "look at the ": 1, "peak": 1, "Hint 2 of 3": 2, "a < b": 2, "Hint 3 of 3": 3}
    assert folds.texts == wanted | {"the answer": 3}


def test_the_feedback_on_a_solution_is_folded_in_pages_and_left_out_in_a_terminal():
    shown = exercises.prove(judge, solution=4, mistake=5)
    assert "right</b><details>" in shown._repr_html_(), "no colon before nothing"
    assert "yes" not in repr(shown) and Folds(shown._repr_html_()).texts[": yes"] == 1


@pytest.mark.parametrize("steps", [(), ("look", " ")])
def test_an_empty_hint_is_refused(steps):
    with pytest.raises(ValueError, match="empty"):
        exercises.hint(*steps)


# ---- what is not known


def needs_a_value(answer):
    return exercises.not_attempted() if answer is None else exercises.right("x") if Unknown("gone") > 1 else None


def test_an_answer_held_against_the_unknown_is_neither_right_nor_wrong_and_not_kept(lab):
    assert exercises.check(lab, "unknown", needs_a_value, 4) == exercises.not_measured("gone")
    assert kept(lab, "exercise") == []


def test_a_proof_against_the_unknown_stops_no_lesson_but_one_that_can_be_made_does():
    assert exercises.prove(needs_a_value, solution=4, mistake=5).status == "not measured"
    with pytest.raises(RuntimeError, match="not attempted"):
        exercises.prove(lambda answer: exercises.not_measured("always"), solution=4, mistake=5)
    half = {None: exercises.not_attempted(), 4: exercises.not_measured("gone"), 5: exercises.right("it is not")}
    with pytest.raises(RuntimeError, match="calls 5 right"):
        exercises.prove(half.get, solution=4, mistake=5)


# ---- challenge


def attempt(lab, vanilla, answer, **target):
    return exercises.challenge(lab, "small", answer, baseline=vanilla, **(target or {"limit_bytes": 60_000_000}))


def test_a_recipe_under_the_limit_is_right_and_kept(lab, vanilla):
    feedback = attempt(lab, vanilla, SMALL)
    assert feedback.status == "right" and "50.0 MB" in feedback.text and "60.0 MB" in feedback.text
    assert kept(lab, "exercise") == [{"status": "right"}]
    assert kept(lab, "board") == [{"peak_bytes": 50_000_000, "arguments": SMALL}]


def test_a_recipe_over_the_limit_is_wrong_by_how_much_and_is_not_kept(lab, vanilla):
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    feedback = attempt(lab, vanilla, half)
    assert feedback.status == "wrong" and "70.0 MB, 10.0 MB (16.7%) over the limit of 60.0 MB" in feedback.text
    assert kept(lab, "board") == [] and "No recipe" in repr(exercises.board(lab, "small"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1, 4], "dict of training arguments"),
        ({1: 4}, "dict of training arguments"),
        (SMALL | {"gradient_checkpoint": True}, "Did you mean"),
        (SMALL | {"per_device_train_batch_size": 0}, "at least 1"),
        (SMALL | {"gradient_accumulation_steps": 2}, "effective batch must stay 4, but"),
        ({"gradient_accumulation_steps": 4}, "makes it 32"),
        (SMALL | {"max_steps": 1}, "leave it out"),
        (SMALL | {"gradient_checkpointing": True, "activation_checkpointing": True}, "keep one"),
    ],
)
def test_a_recipe_that_cannot_count_is_wrong_because_and_is_not_run(lab, vanilla, answer, words):
    feedback = attempt(lab, vanilla, answer)
    assert feedback.status == "wrong" and words in feedback.text
    assert lab.runs == [vanilla]


def test_no_answer_states_the_target(lab, vanilla):
    feedback = attempt(lab, vanilla, None, limit_bytes=60_000_000, at_least_speed=0.8)
    assert feedback.status == "not attempted"
    assert "60.0 MB" in feedback.text and "0.8 x the speed of vanilla" in feedback.text


@pytest.mark.parametrize(
    ("ratio", "status", "words"),
    [
        (Ratio(0.5, 0.4, 0.6), "wrong", "too slow by 38%"),
        (Ratio(0.7, 0.5, 0.9), "right", "within the noise"),
        (Ratio(1.2, 0.9, 1.5), "right", "1.20 (0.90 to 1.50)"),
        (
            Ratio.unknown("speed not measured: timed out"),
            "not measured",
            "the limit 60.0 MB; speed not measured: timed out",
        ),
    ],
)
def test_speed_is_held_against_the_target_with_its_interval(lab, vanilla, ratio, status, words):
    lab.ratio = ratio
    feedback = attempt(lab, vanilla, SMALL, limit_bytes=60_000_000, at_least_speed=0.8)
    assert feedback.status == status and words in feedback.text
    assert len(kept(lab, "board")) == (status == "right")
    assert ("noise" in feedback.text) == (words == "within the noise")
    assert len(kept(lab, "exercise")) == (status != "not measured")


def test_a_target_that_is_unknown_judges_no_recipe(lab, vanilla):
    target = {"at_least_speed": 0.9 * Ratio.unknown("timed out").value}
    assert attempt(lab, vanilla, None, **target) == exercises.not_attempted("the target is unknown: timed out")
    assert attempt(lab, vanilla, SMALL, **target).status == "not measured"
    exercises.prove(lambda answer: attempt(lab, vanilla, answer, **target), solution=SMALL, mistake=VANILLA)
    assert [content["status"] for content in kept(lab, "exercise")] == ["not attempted"]


def test_a_recipe_that_fails_or_trains_elsewhere_is_wrong(lab, vanilla):
    lab.kind = "allocated"
    assert "another device" in attempt(lab, vanilla, SMALL).text
    lab.status = "out of memory"
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert "ran out of memory: the process was ended" in attempt(lab, vanilla, half).text


def test_a_recipe_is_run_once(lab, vanilla):
    for _ in range(2):
        attempt(lab, vanilla, SMALL)
    assert [run.arguments for run in lab.runs] == [VANILLA, SMALL]
    attempt(lab, lab.train("long", task=Task("bert-tiny", seq_len=64), measure=(), processes=1, **VANILLA), SMALL)
    assert len(lab.runs) == 4  # for another task it is


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"limit_bytes": None}, "no target"),
        ({"limit_bytes": 0}, "limit_bytes=0"),
        ({"at_least_speed": float("nan")}, "at_least_speed=nan"),
    ],
)
def test_a_challenge_that_makes_no_sense_is_refused(lab, vanilla, target, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        attempt(lab, vanilla, None, **target)
    with pytest.raises(ValueError, match=r"baseline=.*memory measured"):
        attempt(lab, Run("gone", "killed", "by hand"), None)


def test_a_challenges_solution_is_not_in_the_learners_journal(lab, vanilla):
    exercises.prove(lambda answer: attempt(lab, vanilla, answer), solution=SMALL, mistake=VANILLA)
    assert learner_log.of(lab).read() == []


def test_recipes_that_met_the_target_are_listed_once_from_the_smallest_peak(lab, vanilla):
    for answer in (VANILLA, SMALL, VANILLA):
        attempt(lab, vanilla, answer, limit_bytes=10**9)
    learner_log.keep(lab, "board", "another", peak_bytes=1, arguments={})
    small = "per_device_train_batch_size=1, gradient_accumulation_steps=4"
    rows = [["50.0 MB", small], ["100.0 MB", "per_device_train_batch_size=4"]]
    assert exercises.board(lab, "small").rows == rows


def test_a_recipe_is_trained_in_a_fresh_process(tmp_path):
    lab = Lab("cpu", out=tmp_path, lesson=LESSON)
    vanilla = lab.train("vanilla", task=TASK, measure=("memory",), **VANILLA)
    limit = 0.9 * vanilla.peak_bytes

    def challenge(answer):
        return exercises.challenge(lab, "small", answer, baseline=vanilla, limit_bytes=limit)

    heavy, light = VANILLA | {"attn_implementation": "eager"}, SMALL | {"optim": "adafactor"}
    refused = challenge(VANILLA | {"lr_scheduler_type": "steep"})
    assert refused.status == "wrong" and "steep" in refused.text
    assert exercises.prove(challenge, solution=light, mistake=heavy).status == "right"
    assert not exercises.board(lab, "small").rows
    assert challenge(light).status == "right" and len(exercises.board(lab, "small").rows) == 1
