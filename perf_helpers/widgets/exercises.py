"""Questions, exercises and challenges: a learner's answer, the feedback on it, and the progress so far.

No answer of a learner stops Run All. Nor does a failed measurement: an answer that needs the measurement is neither
right nor wrong. An author's mistake stops Run All, e.g. a check that raises an exception for the answer None, or
a question whose right answer is not among its options.
"""

import html
import math
import re
import string
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from perf_helpers import plots
from perf_helpers.course import learner_log
from perf_helpers.lab import Lab
from perf_helpers.widgets.frame import ROW, place
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.records import Run
from trainmem.texts import bytes_text
from trainmem.unknown import Missing, NeedsValues, RunFailed, Unknown, is_measured

# True while `prove` runs: it judges the author's answers, which the journal must not keep. This is a context variable
# because a check gets its lab from a closure, not from `prove`. It is reset when the proof ends, even by an error.
_is_author: ContextVar[bool] = ContextVar("is_author", default=False)
_SIGNS = {  # {status: (sign, colour of the theme)}; the sign and the words say the same as the colour
    "not attempted": ("○", "var(--jp-border-color1, #8a8a8a)"),
    "wrong": ("✗", "var(--jp-error-color1, #d9534f)"),
    "right": ("✓", "var(--jp-success-color1, #388e3c)"),
    "not measured": ("–", "var(--jp-border-color1, #8a8a8a)"),
    "no guess": ("○", "var(--jp-border-color1, #8a8a8a)"),
    "guess": ("●", "var(--jp-brand-color1, #1976d2)"),
}


@dataclass(frozen=True, slots=True)
class Feedback:
    """The feedback on an answer or a guess: a status, e.g. "right", a text and a picture; it displays itself."""

    status: str  # of an exercise "not attempted", "wrong", "right" or "not measured"; of a guess "no guess" or "guess"
    text: str  # words between backticks are code
    picture: str = ""  # HTML to show below the text
    has_failed: bool = False  # the answer's run ended with an error

    def __repr__(self) -> str:
        return f"{_SIGNS[self.status][0]} {self.status}: {self.text}"

    def _repr_html_(self) -> str:
        sign, colour = _SIGNS[self.status]
        style = f"border-left:4px solid {colour};padding:0.3em 0.8em;overflow-wrap:anywhere"
        text = f": {prose_html(self.text)}" if self.text else ""
        return f"<div style='{style}'><b>{sign} {self.status}</b>{text}{self.picture}</div>"


def not_attempted(text: str = "replace None by your answer and run the cell again") -> Feedback:
    return Feedback("not attempted", text)


def wrong(reason: str) -> Feedback:
    return Feedback("wrong", reason)


def right(text: str) -> Feedback:
    return Feedback("right", text)


def not_measured(reason: str) -> Feedback:
    """Return feedback on an answer that cannot be judged, because of `reason`; the journal does not keep the answer."""
    return Feedback("not measured", reason)


def run_failed(run: Run) -> Feedback:
    """Return the feedback on an answer whose run failed; the text of the feedback is the failure.

    The status is "not measured" if the run timed out or was killed (a busy or full machine may be why), else "wrong".
    """
    if run.status in ("timed out", "killed"):
        return not_measured(run.failure)
    return Feedback("wrong", run.failure, has_failed=True)


def prose_html(text: str) -> str:
    """Return plain text as HTML; words between backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


# ---- what a learner answers


def question(lab: Lab, key: str, text: str, options: Mapping[str, str], right: str) -> None:
    """Ask a quick question: each option has a button that shows its explanation. The journal keeps the choice.

    Without a front end, show a list with folded explanations. In all texts, words between backticks are code.

    Args:
        key: names the question within the lesson.
        text: the question.
        options: {option: its explanation}; wrong options need one too.
        right: the right option.

    Raises:
        ValueError: there are fewer than two options, one has no explanation, or `right` is not an option.
    """
    import ipywidgets

    if len(options) < 2 or not all(option.strip() and reason.strip() for option, reason in options.items()):
        raise ValueError(f"options={options!r}: give at least two, each with its explanation")
    if right not in options:
        raise ValueError(f"right={right!r} is not an option: choose from {', '.join(map(repr, options))}")
    answers = {option: Feedback("right" if option == right else "wrong", reason) for option, reason in options.items()}
    chosen = learner_log.choice(learner_log.of(lab).read(), lab.lesson, key)
    if chosen is None:
        learner_log.keep(lab, "question", key, choice=None, right=None)  # so that `progress` counts an open question

    letters = dict(zip(answers, string.ascii_lowercase, strict=False))
    head = f"<div style='line-height:1.4'><b>Question</b>: {prose_html(text)}</div>"
    lines = "".join(f"<div>{letter}) {prose_html(option)}</div>" for option, letter in letters.items())
    shown = ipywidgets.HTML(f"{head}<div style='line-height:1.6'>{lines}</div>")
    answer, output, buttons = ipywidgets.HTML(), ipywidgets.Output(), []

    def show(option: str) -> None:
        line = f"Your choice: {letters[option]}) {prose_html(option)}"
        answer.value = f"<div role='status' style='line-height:1.4'>{line}{answers[option]._repr_html_()}</div>"

    def choose(option: str, _) -> None:
        show(option)
        learner_log.keep(lab, "question", key, choice=option, right=option == right)

    for option, letter in letters.items():  # not radio buttons: there, moving by the arrow keys already chooses
        buttons.append(ipywidgets.Button(description=letter, tooltip=option, layout={"width": "4em"}))
        buttons[-1].on_click(output.capture()(partial(choose, option)))
    if chosen in answers:
        show(chosen)
    folded = "".join(
        f"<li>{prose_html(option)}<details><summary style='cursor:pointer'>is it?</summary>"
        f"{feedback._repr_html_()}</details></li>"
        for option, feedback in answers.items()
    )
    plain = "\n".join([f"Question: {text}", *(f"{letter}) {option}" for option, letter in letters.items())])
    parts, static = [shown, ipywidgets.HBox(buttons, layout=ROW), answer, output], f"{head}<ol type='a'>{folded}</ol>"
    place(("question", lab.lesson, key), parts, static, plain)


def prove(check: Callable[[Any], Feedback], *, solution: Any, mistake: Any) -> Feedback:
    """Prove that a lesson's check accepts its solution and rejects a plausible mistake; return the feedback to show.

    The feedback has the solution's result, folded. The learner's journal keeps no entry of the proof. If the check
    needs a value that is unknown on this machine, the feedback is "not measured", and nothing is proved.

    Args:
        check: takes an answer (None: not attempted) and returns its feedback.
        solution: an answer that the check must call right.
        mistake: an answer that runs, and that the check must call wrong.

    Raises:
        RuntimeError: the check does not call the solution "right", the mistake "wrong", and None "not attempted"; or
            the mistake's run failed, so that the check has judged nothing.
    """
    token, unproved = _is_author.set(True), None
    try:
        for answer, expected in ((None, "not attempted"), (mistake, "wrong"), (solution, "right")):
            feedback = _judgement(check, answer)
            is_unknown = feedback.status == "not measured" and answer is not None
            if (feedback.status != expected and not is_unknown) or feedback.has_failed:
                raise RuntimeError(f"this check calls {answer!r} {feedback.status}, not {expected}: {feedback.text}")
            unproved = feedback if is_unknown else unproved
        folded = f"<details><summary>What the solution gives</summary>{feedback._repr_html_()}</details>"
        return unproved or Feedback("right", "", folded)
    finally:
        _is_author.reset(token)


def check(lab: Lab, key: str, judge: Callable[[Any], Feedback], answer: Any) -> Feedback:
    """Judge the learner's answer, keep the outcome in the journal, and return the feedback.

    Args:
        key: names the exercise within the lesson.
        judge: takes the answer (None: not attempted) and returns its feedback. If it raises on an answer, the answer is
            wrong and the feedback has the error. If it raises on None, the author made a mistake: the error is raised.
        answer: the learner's answer; None: not attempted.

    Raises:
        TypeError: `judge` did not return a Feedback.
    """
    try:
        feedback = _judgement(judge, answer)
    except Exception as error:
        if answer is None:
            raise
        feedback = wrong(f"your answer raises {type(error).__name__}: {error}")
    if not isinstance(feedback, Feedback):
        raise TypeError(f"the check of {key!r} returned {feedback!r}: return not_attempted(), wrong(...) or right(...)")
    _keep(lab, "exercise", key, status=feedback.status)
    return feedback


def _judgement(judge: Callable[[Any], Feedback], answer: Any) -> Feedback:
    """Return `judge`'s feedback on an answer; "not measured" if `judge` needs an unknown value or a failed run."""
    try:
        return judge(answer)
    except (NeedsValues, RunFailed) as reason:
        return not_measured(str(reason))


def _keep(lab: Lab, kind: str, key: str, **content) -> None:
    """Pass an outcome to `learner_log.keep`, unless its status is "not measured" or `prove` is testing a check."""
    if not _is_author.get() and content.get("status") != "not measured":
        learner_log.keep(lab, kind, key, **content)


class Hints:
    """Show hints to an exercise: a click on a hint opens it, with the next one folded inside; no kernel is needed.

    Args:
        steps: the hints as text; the last is close to the solution.

    Raises:
        ValueError: there is no hint, or an empty one.
    """

    def __init__(self, *steps: str):
        if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
            raise ValueError(f"hints={steps!r}: give at least one text, none of them empty")
        self.steps = steps

    def __repr__(self) -> str:
        return "\n".join(f"hint {number}: {step}" for number, step in enumerate(self.steps, start=1))

    def _repr_html_(self) -> str:
        shown, count = "", len(self.steps)
        for number in range(count, 0, -1):
            summary = f"Hint {number} of {count}" if count > 1 else "Hint"
            shown = (
                "<details style='margin:0.2em 0 0.2em 1em'>"
                f"<summary style='cursor:pointer'>{summary}</summary>"
                f"<div>{prose_html(self.steps[number - 1])}</div>{shown}</details>"
            )
        return shown


hint = Hints  # as it is called in a lesson


def challenge(
    lab: Lab,
    key: str,
    answer: Mapping[str, Any] | None,
    *,
    baseline: Run,
    limit_bytes: float | None = None,
    at_least_speed: float | None = None,
) -> Feedback:
    """Train with the learner's own recipe in a fresh subprocess, compare the result with a target, and return feedback.

    The journal keeps a recipe that meets the target. A recipe that has run before without failing is not run again. If
    `limit_bytes` or `at_least_speed` is an `Unknown` or a `Missing`, e.g. because the run that it is calculated from
    failed, no recipe is judged.

    Args:
        key: names the challenge within the lesson.
        answer: the recipe, a dict of training arguments (as for `lab.train`); None: not attempted.
        baseline: a run of `lab.train` in this lab; recipes train the same task and must have the same effective batch.
        limit_bytes: the largest peak that is allowed; None: any.
        at_least_speed: least samples per second, as a share of the baseline's, measured by `lab.compare`; None: any. A
            recipe fails only if even the upper end of its measured interval is lower, so noise cannot be the cause.

    Raises:
        ValueError: both targets are None, a target is not above 0, or the peak of the baseline was not measured.
    """
    targets = {"limit_bytes": limit_bytes, "at_least_speed": at_least_speed}
    if limit_bytes is None and at_least_speed is None:
        raise ValueError(f"challenge {key!r} has no target: give limit_bytes, at_least_speed or both")
    for name, value in targets.items():
        if is_measured(value) and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r}: give a number above 0")
    if not is_measured(baseline.peak_bytes):
        raise ValueError(f"baseline={baseline!r}: give a run with its memory measured")
    unknown = [value.why for value in targets.values() if isinstance(value, Unknown | Missing)]
    if unknown:
        feedback = (not_attempted if answer is None else not_measured)(f"the target is unknown: {unknown[0]}")
    elif answer is None:
        target = [f"a peak of at most {bytes_text(limit_bytes)}"] if limit_bytes else []
        target += [f"at least {at_least_speed:g} x the speed of {baseline.name}"] if at_least_speed else []
        feedback = not_attempted(f"the target is {' and '.join(target)}; replace None by a dict of training arguments")
    elif problem := _recipe_problem(answer, baseline):
        feedback = wrong(problem)
    else:
        recipe = Arguments(answer).current
        feedback = _measured_feedback(lab, key, recipe, baseline, limit_bytes, at_least_speed)
    _keep(lab, "exercise", key, status=feedback.status)
    return feedback


def _recipe_problem(answer: Any, baseline: Run) -> str | None:
    """Return why `answer`, a dict of training arguments, is refused before any run; None if nothing is wrong."""
    if not isinstance(answer, Mapping) or not all(isinstance(name, str) for name in answer):
        return f"{answer!r} is not a dict of training arguments: give e.g. {{'per_device_train_batch_size': 1}}"
    try:
        arguments = Arguments.of(answer)
        batch = arguments.samples_per_step(baseline.processes)
    except ValueError as error:
        return str(error)
    for name in ("max_steps", "num_train_epochs"):
        if name in arguments.current:
            return f"`{name}` changes how long to train, which must be equal for all recipes: leave it out"
    needed = Arguments(baseline.arguments).samples_per_step(baseline.processes)
    if batch != needed:
        return f"the effective batch must stay {needed}, but the answer makes it {batch}"
    return None


def _measured_feedback(
    lab: Lab, key: str, recipe: dict[str, Any], baseline: Run, limit_bytes: float | None, at_least_speed: float | None
) -> Feedback:
    """Return the feedback on a run of `recipe` (training arguments); the journal keeps a recipe that meets the targets.

    `limit_bytes`, `at_least_speed`: as in `challenge`.
    """
    name, same = f"your {key}", replace(baseline, arguments=recipe).experiment
    before = (run for run in lab.runs if run.ok and run.memory and run.name == name and run.experiment == same)
    again = {"task": Task.from_dict(baseline.task), "processes": baseline.processes, "measure": ("memory",)}
    try:
        run = next(before, None) or lab.train(name, **again, **recipe)
    except ValueError as error:  # the library refuses a value
        return wrong(str(error))
    if not run.ok:
        return run_failed(run)
    if run.memory.kind != baseline.memory.kind:
        return wrong(f"it was measured on another device than {baseline.name}: train where the baseline trained")
    text = f"the peak is {bytes_text(run.peak_bytes)}"
    if limit_bytes is not None:
        if run.peak_bytes > limit_bytes:
            over = f"{bytes_text(run.peak_bytes - limit_bytes)} ({run.peak_bytes / limit_bytes - 1:.1%})"
            return wrong(f"{text}, {over} over the limit of {bytes_text(limit_bytes)}")
        text += f", the limit {bytes_text(limit_bytes)}"
    if at_least_speed is not None:
        ratio = lab.compare(baseline, run).speed_ratio
        if not ratio.known:
            return not_measured(f"{text}; {ratio.value.why}")
        text += f"; {ratio} x the speed of {baseline.name}, where {at_least_speed:g} x is wanted"
        if ratio.high < at_least_speed:
            return wrong(f"{text}: too slow by {1 - ratio.value / at_least_speed:.0%}")
        if ratio.low < at_least_speed:
            text += " (it may be less: within the noise)"
    _keep(lab, "board", key, peak_bytes=run.peak_bytes, arguments=recipe)
    return right(text)


def board(lab: Lab, key: str) -> plots.Table:
    """Return a table of the learner's recipes that met the target of the challenge `key`, the smallest peak first."""
    peaks = {}
    for entry in learner_log.of(lab).read():
        if entry.about == ("board", lab.lesson, key):
            recipe = ", ".join(f"{name}={value!r}" for name, value in entry.content["arguments"].items())
            peaks[recipe] = entry.content["peak_bytes"]
    rows = [[bytes_text(peaks[recipe]), recipe] for recipe in sorted(peaks, key=peaks.get)]
    return plots.Table(["peak memory", "recipe"], rows, "" if rows else "No recipe has met the target yet.")


# ---- progress


def progress(lab: Lab) -> plots.Table:
    """Return a table of the learner's progress, with a row per lesson in the working folder or in the journal."""
    known = learner_log.progress(learner_log.of(lab).read())
    present = {path.stem for path in Path.cwd().glob("[0-9][0-9]_*.ipynb")}
    lessons = sorted(present | {name for name in known if name})
    rows = [[name.replace("_", " "), *_cells(known.get(name))] for name in lessons]
    return plots.Table(["lesson", "state", "claims decided", "guesses", "exercises right", "questions"], rows)


def _cells(lesson: learner_log.Progress | None) -> list[str]:
    """Return the cells after the name in a lesson's row of the progress table; `lesson` is None if it is not begun."""
    if lesson is None:
        return ["not begun", "", "", "", ""]
    decided = sum(verdict != "not testable here" for verdict in lesson.claims.values())
    errors = [error for error in lesson.errors.values() if error is not None]
    off = f" (off by {', '.join(f'{error:.0%}' for error in errors)})" if errors else ""
    right = sum(status == "right" for status in lesson.exercises.values())
    answered = [first for first in lesson.questions.values() if first is not None]
    at_once = f" ({sum(answered)} right at once)" if answered else ""
    return [
        f"✓ finished {lesson.finished[:10]}" if lesson.finished else "begun",
        f"{decided} of {len(lesson.claims)}" if lesson.finished else "",
        f"{len(errors)} of {len(lesson.errors)}{off}" if lesson.errors else "",
        f"{right} of {len(lesson.exercises)}" if lesson.exercises else "",
        f"{len(answered)} of {len(lesson.questions)}{at_once}" if lesson.questions else "",
    ]
