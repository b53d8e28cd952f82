"""Pictures have labels with units and no small text, and neither pictures nor tables show an unknown value
as a number.
"""

import matplotlib
import pytest

from perf_helpers import plots
from trainmem.records import CATEGORIES, Comparison, Memory, Ratio, Run, Timing
from trainmem.unknown import Unknown

SERIES = {"phase": ["forward", "backward", "step"], "operation": ["mm", "", "add"], "module": ["layer.1", "", ""]}
SERIES |= {category: [10**6, 3 * 10**6, 10**6] for category in CATEGORIES}
MEMORY = Memory(24 * 10**6, "counted", "backward", breakdown=dict.fromkeys(CATEGORIES, 3 * 10**6), timeline=SERIES)
RUN = Run("vanilla", "ok", memory=MEMORY, timing=Timing(0.5, 0.1, 2, 1, 8.0))
COMPARISON = Comparison(RUN, RUN, 1.0, Ratio(1.2, 0.9, 1.5, (1.1, 1.2, 1.3)))
FAILED = Comparison(RUN, RUN, Unknown("gone"), Ratio.unknown("gone"))
PICTURES = {
    "memory": lambda: plots.memory([RUN, RUN]),
    "timeline": lambda: plots.timeline(RUN),
    "speed": lambda: plots.speed([COMPARISON]),
    "speed that was not measured": lambda: plots.speed([FAILED, COMPARISON]),
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
    assert plots.words(figure).startswith("Peak <memory>; counted memory at the peak (MB); weights, frozen weights")
    assert "vanilla" in plots.words(figure) and "24.0 MB" in plots.words(figure)
    assert 'alt="Peak &lt;memory&gt;; counted' in plots.image_html(figure)


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
    assert 'alt="a curve"' in output.data["text/html"] and "image/png" not in output.data  # one copy


def test_a_picture_of_nothing_says_what_to_do():
    timed = Run("x", "ok")
    with pytest.raises(ValueError, match="measured"):
        plots.memory([timed])
    with pytest.raises(ValueError, match="measure="):
        plots.timeline(timed)


def test_a_comparison_shows_a_table_and_a_picture_with_its_text():
    shown = COMPARISON._repr_html_()
    assert "<table" in shown and "data:image/png" in shown and "vanilla 24.0 MB" in shown
    assert "<img" not in Comparison(Run("x", "killed"), RUN, Unknown(), Ratio.unknown("gone"))._repr_html_()


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
    with pytest.raises(ValueError, match=r"lab\.compare"):
        plots.speed([])


def test_a_series_without_a_measurement_is_distinguished_from_one_that_cannot_be_seen():
    def labels(axes):
        return [text.get_text() for text in axes.get_legend().get_texts()]

    series = {"known": [1, None], "part": [Unknown(), 2.0], "none": [None, Unknown()]}
    axes = plots.lines([1, 2], series, "batch", "memory (MB)")
    assert labels(axes) == ["known", "part", "none (not measured)"]
    assert [sum(value == value for value in line.get_ydata().astype(float)) for line in axes.lines] == [1, 1, 0]
    unknown = plots.losses({"known": [[1.0, 0.5]], "none": [[Unknown()] * 2]})
    assert labels(unknown) == ["known", "none (not measured)"]


def test_numbers_in_a_table_are_written_as_everywhere():
    (row,) = plots.Table("abcde", [[4004.4, 1 / 3, 123456789, None, "text"]]).rows
    assert row == ["4,004", "0.3333", "123456789", "not measured", "text"]


def test_a_timeline_says_where_it_is_and_what_is_live():
    steps = plots.Timeline(SERIES)
    assert (len(steps), steps.peak, steps.highest_bytes) == (3, 1, 3 * 10**6 * len(CATEGORIES))
    assert steps.phase_ranges() == [("forward", 0, 1), ("backward", 1, 2), ("step", 2, 3)]
    assert steps.text(0).startswith("12.0 MB in forward, mm of layer.1: weights 1.0 MB, frozen weights 1.0 MB")
    assert [steps.where_text(i) for i in (1, 2)] == ["backward", "step, add"]
    assert steps.where(0) == {"phase": "forward", "operation": "mm", "module": "layer.1"}
    assert steps.shown(10**10) == [] and steps.shown() == list(CATEGORIES)


def test_a_timeline_of_before_there_was_a_category_is_drawn_without_it():
    steps = plots.Timeline({name: values for name, values in SERIES.items() if name != "key_value_cache"})
    assert "key_value_cache" not in steps.shown() and "key_value_cache" not in steps.parts(0)
