"""Quick questions: a few options, each with a button that shows its explanation."""

import string
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from perf_helpers.course import journal
from perf_helpers.widgets.feedback import Feedback, prose_html
from perf_helpers.widgets.frame import ROW, WHOLE_WIDTH, guarded, place

if TYPE_CHECKING:
    from perf_helpers.lab.lab import Lab


def question(lab: "Lab", key: str, text: str, options: Mapping[str, str], right: str) -> None:
    """Ask a quick question: each option has a button that shows its explanation. The choice is kept in the journal.

    Without a front end: a list, the explanations folded. In all texts, words between backticks are code.

    Args:
        key: names the question within the lesson.
        options: for each option its explanation, the wrong ones included.
        right: the option that is right.

    Raises:
        ValueError: fewer than two options, one without an explanation, or `right` is none of them.
    """
    if len(options) < 2 or not all(option.strip() and why.strip() for option, why in options.items()):
        raise ValueError(f"options={options!r}: give at least two, each with its explanation")
    if right not in options:
        raise ValueError(f"right={right!r}: it must be one of the options, {', '.join(map(repr, options))}")
    answers = {option: Feedback("right" if option == right else "wrong", why) for option, why in options.items()}
    chosen = journal.choice(journal.of(lab).read(), lab.lesson, key)
    if chosen is None:
        journal.keep(lab, "question", key, choice=None, right=None)  # asked: the progress panel counts it

    def keep(option: str) -> None:
        journal.keep(lab, "question", key, choice=option, right=option == right)

    _choose(("question", lab.lesson, key), text, answers, chosen if chosen in options else None, keep)


def _choose(
    where: tuple[str, ...],
    text: str,
    answers: Mapping[str, Feedback],
    chosen: str | None,
    keep: Callable[[str], None],
) -> None:
    """Options with a button each that shows its answer; without a front end, a list with the answers folded.

    Buttons rather than radio buttons, where moving by the arrow keys chooses.

    Args:
        answers: for each option what is shown when it is chosen.
        chosen: the option chosen last time, or None.
        keep: called with each option that is chosen.
    """
    import ipywidgets

    letters = dict(zip(string.ascii_lowercase, answers, strict=False))
    head = f"<div style='line-height:1.4'><b>Question</b>: {prose_html(text)}</div>"
    lines = "".join(f"<div>{letter}) {prose_html(option)}</div>" for letter, option in letters.items())
    answer, output = ipywidgets.HTML(), ipywidgets.Output()
    buttons = {
        option: ipywidgets.Button(description=letter, tooltip=option, layout={"width": "4em"})
        for letter, option in letters.items()
    }

    def show(option: str) -> None:
        line = f"Your choice: {buttons[option].description}) {prose_html(option)}"
        answer.value = f"<div style='line-height:1.4'>{line}{answers[option]._repr_html_()}</div>"

    def choose_it(option: str) -> Callable[..., None]:
        def choose(_):
            show(option)
            keep(option)

        return guarded(choose, output)

    for option, button in buttons.items():
        button.on_click(choose_it(option))
    if chosen is not None:
        show(chosen)
    row = ipywidgets.HBox(list(buttons.values()), layout=ROW)
    shown_options = ipywidgets.HTML(f"<div style='line-height:1.6'>{lines}</div>")
    box = ipywidgets.VBox([ipywidgets.HTML(head), shown_options, row, answer, output], layout=WHOLE_WIDTH)
    folded = "".join(
        f"<li>{prose_html(option)}<details><summary style='cursor:pointer'>is it?</summary>"
        f"{feedback._repr_html_()}</details></li>"
        for option, feedback in answers.items()
    )
    plain = "\n".join([f"Question: {text}", *(f"{letter}) {option}" for letter, option in letters.items())])
    place(where, box, f"{head}<ol type='a'>{folded}</ol>", plain)
