"""Quick questions: a few options, each with a button that shows its explanation."""

import string
from collections.abc import Mapping
from functools import partial

from perf_helpers.course import journal
from perf_helpers.lab import Lab
from perf_helpers.widgets.feedback import Feedback, prose_html
from perf_helpers.widgets.frame import ROW, guarded, place


def question(lab: Lab, key: str, text: str, options: Mapping[str, str], right: str) -> None:
    """Ask a quick question: each option has a button that shows its explanation. The choice is kept in the journal.

    Without a front end: a list, the explanations folded. In all texts, words between backticks are code.

    Args:
        key: names the question within the lesson.
        options: for each option its explanation, the wrong ones included.
        right: the option that is right.

    Raises:
        ValueError: fewer than two options, one without an explanation, or `right` is none of them.
    """
    import ipywidgets

    if len(options) < 2 or not all(option.strip() and why.strip() for option, why in options.items()):
        raise ValueError(f"options={options!r}: give at least two, each with its explanation")
    if right not in options:
        raise ValueError(f"right={right!r}: it must be one of the options, {', '.join(map(repr, options))}")
    answers = {option: Feedback("right" if option == right else "wrong", why) for option, why in options.items()}
    chosen = journal.choice(journal.of(lab).read(), lab.lesson, key)
    if chosen is None:
        journal.keep(lab, "question", key, choice=None, right=None)  # asked: the progress panel counts it

    letters = dict(zip(string.ascii_lowercase, answers, strict=False))
    head = f"<div style='line-height:1.4'><b>Question</b>: {prose_html(text)}</div>"
    lines = "".join(f"<div>{letter}) {prose_html(option)}</div>" for letter, option in letters.items())
    answer, output = ipywidgets.HTML(), ipywidgets.Output()
    # Buttons rather than radio buttons, where moving by the arrow keys chooses.
    buttons = {
        option: ipywidgets.Button(description=letter, tooltip=option, layout={"width": "4em"})
        for letter, option in letters.items()
    }

    def show(option: str) -> None:
        line = f"Your choice: {buttons[option].description}) {prose_html(option)}"
        answer.value = f"<div style='line-height:1.4'>{line}{answers[option]._repr_html_()}</div>"

    def choose(option: str, _) -> None:
        show(option)
        journal.keep(lab, "question", key, choice=option, right=option == right)

    for option, button in buttons.items():
        button.on_click(guarded(partial(choose, option), output))
    if chosen in answers:
        show(chosen)
    row = ipywidgets.HBox(list(buttons.values()), layout=ROW)
    shown_options = ipywidgets.HTML(f"<div style='line-height:1.6'>{lines}</div>")
    parts = [ipywidgets.HTML(head), shown_options, row, answer, output]
    folded = "".join(
        f"<li>{prose_html(option)}<details><summary style='cursor:pointer'>is it?</summary>"
        f"{feedback._repr_html_()}</details></li>"
        for option, feedback in answers.items()
    )
    plain = "\n".join([f"Question: {text}", *(f"{letter}) {option}" for letter, option in letters.items())])
    place(("question", lab.lesson, key), parts, f"{head}<ol type='a'>{folded}</ol>", plain)
