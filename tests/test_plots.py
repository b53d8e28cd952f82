"""Pictures have labels with units and no small text; guesses, exercises and widgets behave without a front end."""

import matplotlib
import pytest

from perf_helpers import exercises, plots, widgets
from perf_helpers.lab.runs import CATEGORIES, Comparison, Memory, Ratio, Run, Timing
from perf_helpers.unknown import Unknown

SERIES = {"phase": ["forward", "backward", "step"]} | {category: [10**6, 3 * 10**6, 10**6] for category in CATEGORIES}
MEMORY = Memory(24 * 10**6, "counted", "backward", breakdown=dict.fromkeys(CATEGORIES, 3 * 10**6), timeline=SERIES)
RUN = Run("vanilla", "ok", memory=MEMORY, timing=Timing(0.5, 0.1, 2, 1, 8.0))
COMPARISON = Comparison(RUN, RUN, 1.0, Ratio(1.2, 0.9, 1.5, (1.1, 1.2, 1.3)))
FAILED = Comparison(RUN, RUN, Unknown("gone"), Ratio.unknown("gone"))
PICTURES = {
    "memory": lambda: plots.memory([RUN, RUN]),
    "timeline": lambda: plots.timeline(RUN),
    "speed": lambda: plots.speed([COMPARISON]),
    "speed that was not measured": lambda: plots.speed([FAILED, COMPARISON]),
    "tradeoff": lambda: plots.tradeoff([RUN]),
    "lines": lambda: plots.lines([1, 2], {"a": [1, 2], "b": [2, Unknown()]}, "batch", "memory (MB)"),
    "losses": lambda: plots.losses({"adam": [[1.0, 0.5], [1.1, 0.6]], "unknown": [[Unknown()] * 2]}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_labelled_and_readable(name):
    axes = PICTURES[name]()
    assert axes.get_xlabel() and (axes.get_ylabel() or axes.get_yticklabels())
    axes.figure.canvas.draw()
    texts = [text for text in axes.figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert texts and min(text.get_fontsize() for text in texts) >= 9


def test_the_colours_of_all_categories_differ():
    assert plots.PALETTE.keys() == {*CATEGORIES, "context"}
    assert len(set(plots.PALETTE.values())) == len(plots.PALETTE)


def test_a_figure_is_shown_with_its_words():
    figure = plots.memory([RUN], title="Peak <memory>").figure
    assert plots.words(figure).startswith("Peak <memory>; counted memory at the peak (MB); weights, weight copies")
    assert "vanilla" in plots.words(figure) and "24.0 MB" in plots.words(figure)
    assert 'alt="Peak &lt;memory&gt;; counted' in plots.figure_html(figure)


def test_in_a_kernel_every_figure_has_its_words(tmp_path):
    import nbclient
    import nbformat

    cells = [
        f"from perf_helpers import Lab\nlab = Lab('cpu', out={str(tmp_path)!r})",
        "import matplotlib.pyplot as plt\n_ = plt.figure().subplots().set_title('a curve', loc='left')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    (output,) = notebook.cells[1].outputs
    assert 'alt="a curve"' in output.data["text/html"] and "image/png" in output.data


@pytest.mark.parametrize("draw", [plots.memory, plots.tradeoff])
def test_a_picture_of_nothing_says_what_to_do(draw):
    with pytest.raises(ValueError, match="measured"):
        draw([Run("x", "killed")])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "not measured"),
        (Unknown(), "not measured"),
        (0, "0 B"),
        (1536, "1.5 kB"),
        (198_395_296, "198.4 MB"),
        (14_949_000_000, "14.95 GB"),
    ],
)
def test_bytes_are_shown_in_a_persons_unit(size, text):
    assert plots.bytes_text(size) == text


def test_a_comparison_shows_a_table_and_a_picture_with_its_text():
    shown = COMPARISON._repr_html_()
    assert "<table" in shown and "data:image/png" in shown and "vanilla 24.0 MB" in shown
    assert "<img" not in Comparison(Run("x", "killed"), RUN, None, None)._repr_html_()


def test_a_table_shows_unknown_as_not_measured():
    shown = plots.table([Run("x", "killed", "gone")])
    assert "not measured" in repr(shown) and "<td" in shown._repr_html_()


def test_what_is_unknown_is_shown_as_not_measured_and_never_as_a_number():
    timed = Run("timed", "ok", memory=MEMORY, timing=Timing(*[Unknown()] * 5))
    (row,) = plots.table([timed]).rows
    assert row[4:] == ["not measured", "not measured"] and plots.Table(["x"], [[Unknown()]]).rows == [["not measured"]]
    assert plots.comparison(FAILED).rows[-1] == ["ratio", "", "not measured", "", "", "not measured"]
    assert "not measured" in FAILED._repr_html_() and "nan" not in FAILED._repr_html_().split("<img")[0]
    assert "not measured" in plots.words(plots.speed([FAILED]).figure)
    with pytest.raises(ValueError, match="measured"):
        plots.tradeoff([timed])
    with pytest.raises(ValueError, match=r"lab\.compare"):
        plots.speed([])


def test_a_guess_is_scored_and_none_is_no_guess():
    assert exercises.score(None, 100, "MB").status == "no guess"
    assert "50% off" in exercises.score(150, 100, "MB").text
    with pytest.raises(ValueError, match="number"):
        exercises.score("a lot", 100, "MB")


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    return exercises.right("yes") if answer == 4 else exercises.wrong("because it is 4")


def test_a_check_is_held_against_its_solution_and_a_mistake():
    assert exercises.prove(check, solution=4, mistake=5).status == "right"
    with pytest.raises(RuntimeError, match="wrong"):
        exercises.prove(check, solution=5, mistake=4)
    with pytest.raises(RuntimeError, match="not attempted"):
        exercises.prove(lambda answer: exercises.right("always"), solution=4, mistake=5)


def test_a_control_draws_anew_and_an_error_in_it_is_not_swallowed(capsys):
    drawn = []

    def draw(batch):
        if batch == 3:
            raise ZeroDivisionError("the third is broken")
        drawn.append(batch)

    box = widgets.explore(draw, batch=[1, 2, 3])
    assert drawn == [1]
    slider, _ = box.children
    slider.value = 2
    assert drawn == [1, 2]
    with pytest.raises(ZeroDivisionError):
        slider.value = 3
    with pytest.raises(ValueError, match="no values"):
        widgets.explore(draw, batch=[])
