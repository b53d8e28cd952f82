"""What a learner has done so far, as a table: `widgets.progress`."""

from collections.abc import Sequence
from pathlib import Path

from perf_helpers import plots
from perf_helpers.course import learner_log
from perf_helpers.lab import Lab


def progress(lab: Lab, lessons: Sequence[str] | None = None) -> plots.Table:
    """What the learner has done so far, one row a lesson, from the journal on this machine. A static table.

    Args:
        lessons: their names; None: those of the notebooks in the working folder, and any other that the journal knows.
    """
    known = learner_log.progress(learner_log.of(lab).read())
    if lessons is None:
        here = {path.stem for path in Path.cwd().glob("[0-9][0-9]_*.ipynb")}
        lessons = sorted(here | {name for name in known if name})
    rows = [[name.replace("_", " "), *_cells(known.get(name))] for name in lessons]
    return plots.Table(["lesson", "state", "claims decided", "guesses", "exercises right", "questions"], rows)


def _cells(lesson: learner_log.Progress | None) -> list[str]:
    """All cells of a lesson's row but its name; None: the journal knows nothing of it."""
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
