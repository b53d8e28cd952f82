"""A learner's view: every lesson, and every kind of widget, in JupyterLab in a real browser.

Nothing is measured here. Three lessons run at the smallest sizes; the others are opened as test_lessons.py executed
them, with the state of their widgets. Screenshots are written to build/screenshots.
"""

import shutil
from pathlib import Path

import browser
import nbformat
import pytest

from perf_helpers.course import course, lesson_process
from trainmem.core.task import TINY

ROOT = Path(__file__).resolve().parents[1]
SCREENSHOTS = ROOT / "build" / "screenshots"
# By test_lessons.py: under strict, or at the smallest sizes.
EXECUTED = next((path for name in ("lessons", "smallest") if (path := ROOT / "build" / name).exists()), ROOT)
RUN = ("00", "04", "14")  # those that between them have each kind of widget
LESSONS = [path.stem for path in course.find_lessons()]
SOURCE = (Path(__file__).parent / "studio.py").read_text(encoding="utf-8")
STUDIO = [cell.strip() for cell in SOURCE.split("# %%\n")[1:]]
(_, PREDICT, TRAIN, REVEALED, ANSWER, CHALLENGE, MEMORY, TIMELINE, RECIPES, MONITOR, QUESTION, *_, THREADS) = range(
    len(STUDIO)
)

together = pytest.mark.xdist_group("studio")  # one notebook for all that share it
pytestmark = [
    pytest.mark.skipif(
        not browser.chromium(), reason="no Chromium: apt-get install chromium, or name one in $CHROMIUM"
    ),
    pytest.mark.timeout(900),
    pytest.mark.browser,
]


def at_smallest_sizes(notebook):
    """Return the notebook with its parameters set to the profile for tests, as a course run sets them."""
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = parameters.source.replace('profile = "auto"', f'profile = "{TINY.name}"')
    return notebook


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        nbformat.write(at_smallest_sizes(nbformat.read(path, as_version=4)), folder / path.name)
    for path in EXECUTED.glob("*.ipynb"):
        shutil.copy(path, folder / f"executed {path.name}")
    started = browser.Server(folder, home)
    yield started
    started.close()


@pytest.fixture
def page(chromium, server):
    opened = chromium.new_page(viewport={"width": 1100, "height": 900})
    yield opened
    opened.close()
    server.end_kernels()


def screenshot(notebook, name, cell=None):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    place = notebook.page if cell is None else notebook.cell(cell)
    place.screenshot(path=SCREENSHOTS / f"{name}.png")


def faults(notebook):
    """Return the faults of an executed notebook as text: errors in cells and in widgets, and the source of cells that
    never ran.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    errors = [output.evalue for cell in cells for output in cell.outputs if output.output_type == "error"]
    never = [cell.source for cell in cells if cell.execution_count is None]
    return errors + lesson_process.widget_errors(notebook) + never


# The beginnings of outputs with a widget that is wider than their cell, and of widgets whose parts are wider than they.
OVERFLOWING = """() => [...document.querySelectorAll('.jp-OutputArea-output:has(.jupyter-widgets)')]
    .filter(output => output.scrollWidth > output.clientWidth + 2).map(output => output.innerText.slice(0, 80))"""
TOO_WIDE = """() => [...document.querySelectorAll('.jp-OutputArea-output .jupyter-widgets')]
    .filter(part => part.scrollWidth > part.clientWidth + 2).map(part => part.innerText.slice(0, 80))"""


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson[:2] in RUN])
def test_a_lesson_runs_from_top_to_bottom(server, page, lesson):
    notebook, earlier = browser.Notebook(server, page, f"{lesson}.ipynb"), len(server.runs.read())
    notebook.run_all()
    executed = notebook.saved()
    folded = [number for number, cell in enumerate(executed.cells) if "solution" in cell.metadata.get("tags", [])]
    assert folded and not any(notebook.cell(number).locator(".cm-content").is_visible() for number in folded)
    assert not any(fold.is_visible() for fold in page.locator("details > div", has_text="right").all()), "its answer"
    assert faults(executed) == []
    assert {run.profile for run in server.runs.read()[earlier:]} == {TINY.name}, "it ran at the smallest sizes"
    assert executed.metadata.widgets[lesson_process.WIDGETS]["state"], "the state of its widgets was kept"
    assert page.evaluate(OVERFLOWING) == [], "wider than the cell"
    screenshot(notebook, lesson)


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson[:2] not in RUN])
def test_an_executed_lesson_shows_its_widgets_within_their_cells(server, page, lesson):
    assert (EXECUTED / f"{lesson}.ipynb").exists(), "tests/test_lessons.py executes it"
    assert faults(nbformat.read(EXECUTED / f"{lesson}.ipynb", as_version=4)) == []
    notebook = browser.Notebook(server, page, f"executed {lesson}.ipynb")
    notebook.trust()
    page.locator(".jp-OutputArea-output .jupyter-widgets").first.wait_for(timeout=30_000)
    assert page.evaluate(OVERFLOWING) == [], "wider than the cell"
    screenshot(notebook, lesson)


@pytest.fixture(scope="module")
def studio(chromium, server):
    """Yield a notebook with one widget of each kind, run once."""
    cells = [nbformat.v4.new_code_cell(source) for source in STUDIO]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), server.folder / "studio.ipynb")
    page = chromium.new_page(viewport={"width": 1100, "height": 1400})
    notebook = browser.Notebook(server, page, "studio.ipynb")
    for cell in range(len(STUDIO)):
        if cell not in (REVEALED, CHALLENGE):  # after which a guess would not count, and an answer would be the second
            notebook.run(cell)
    yield notebook
    page.close()


@together
def test_a_guess_is_scored(studio):
    field = studio.outputs(PREDICT).locator("input[type=number]")
    field.fill("12")
    field.press("Tab")
    studio.outputs(PREDICT).get_by_role("button", name="commit").click()
    studio.outputs(PREDICT).get_by_text("Your guess: 12 MB. It is kept.").wait_for()
    studio.run(REVEALED)
    studio.outputs(REVEALED).get_by_text("your guess was 12 MB, measured").wait_for()
    assert "your guess 12 MB" in studio.outputs(REVEALED).locator("img").get_attribute("alt")
    screenshot(studio, "guess", REVEALED)


@together
def test_a_challenge_is_answered_wrongly_then_rightly(studio):
    for answer, expected in (
        ("None", "not attempted: the target is a peak of at most"),
        ('{"per_device_train_batch_size": 4, "optim": "adamw_torch"}', "wrong: the peak is"),
        ('{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "optim": "sgd"}', "right: the peak is"),
    ):
        studio.type(ANSWER, f"answer = {answer}")
        studio.run(ANSWER)
        studio.run(CHALLENGE)
        assert expected in studio.outputs(CHALLENGE).inner_text().replace("\xa0", " ")
    screenshot(studio, "challenge", CHALLENGE)


FOCUSED = "() => document.activeElement.matches('{}')"


def press_tab_until(page, selector):
    """Press Tab until an element has the focus; `selector` is its CSS selector on the browser page `page`."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED.format(selector)):
            return
    raise AssertionError(f"Tab does not reach {selector}")


@together
def test_a_guess_and_a_question_are_answered_by_keyboard_alone(studio):
    page = studio.page
    studio.run(PREDICT)
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    press_tab_until(page, "input[type=number]")
    page.keyboard.press("Control+A")
    page.keyboard.type("17")
    press_tab_until(page, 'button[title="keep this guess"]')
    page.keyboard.press("Space")
    studio.outputs(PREDICT).get_by_role("status").get_by_text("Your guess: 17 MB").wait_for()
    studio.run(QUESTION)
    press_tab_until(page, 'button[title="weights"]')
    page.keyboard.press("Enter")
    studio.outputs(QUESTION).get_by_role("status").get_by_text("They stay as they are.").wait_for()


# From the key to the picture that has changed, in milliseconds.
MOVE = """([cell, slider, key]) => new Promise(done => {
    const output = document.querySelectorAll('.jp-Notebook .jp-Cell')[cell].querySelector('.jp-Cell-outputArea');
    const start = performance.now();
    const watcher = new MutationObserver(changes => {
        if (changes.some(change => change.target.closest && change.target.closest('[role=img], .widget-html'))) {
            watcher.disconnect();
            done(performance.now() - start);
        }
    });
    watcher.observe(output, {subtree: true, childList: true});
    output.querySelectorAll('.noUi-handle')[slider].dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    setTimeout(() => done(null), 10000);
})"""


@together
def test_the_explorers_slider_moves_its_picture(studio):
    studio.run(MEMORY)
    output = studio.outputs(MEMORY)
    before = output.locator("[role=img]").get_attribute("aria-label")
    studio.page.evaluate(MOVE, [MEMORY, 0, "ArrowRight"])
    output.locator(f"[role=img]:not([aria-label='{before}'])").wait_for(timeout=120_000)
    # Between two visited positions, back to the first.
    moves = [studio.page.evaluate(MOVE, [MEMORY, 0, key]) for key in ["ArrowLeft", "ArrowRight"] * 4 + ["ArrowLeft"]]
    output.locator(f"[role=img][aria-label='{before}']").wait_for()
    assert min(moves) < 150, f"a move answers within 150 ms, as far as the machine's other work lets it: {moves}"
    screenshot(studio, "memory explorer", MEMORY)


@together
def test_the_timelines_line_is_moved(studio):
    studio.run(TIMELINE)
    output = studio.outputs(TIMELINE)
    before = output.locator("table").inner_text()
    assert studio.page.evaluate(MOVE, [TIMELINE, 0, "ArrowLeft"]) is not None
    for _ in range(20):
        studio.page.evaluate(MOVE, [TIMELINE, 0, "PageDown"])
    assert output.locator("table").inner_text() != before
    output.get_by_role("button", name="to the peak").click()
    studio.page.wait_for_function(
        "([cell, text]) => document.querySelectorAll('.jp-Notebook .jp-Cell')[cell].querySelector('table').innerText"
        " === text",
        arg=[TIMELINE, before],
    )
    screenshot(studio, "timeline explorer", TIMELINE)


@together
def test_a_recipe_is_selected_and_its_arguments_are_shown(studio):
    studio.run(RECIPES)
    output = studio.outputs(RECIPES)
    select = output.locator("select", has_text="half (counted)")
    select.select_option(label=select.locator("option", has_text="half (counted)").text_content())
    output.locator("pre", has_text="gradient_accumulation_steps=2").wait_for()
    screenshot(studio, "recipe explorer", RECIPES)


@together
def test_the_monitor_starts_and_stops(studio):
    studio.select(MONITOR)
    studio.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
    studio.outputs(MONITOR).locator("svg").first.wait_for(timeout=20_000)
    studio.wait_idle()
    studio.outputs(MONITOR).locator(".jp-RenderedHTMLCommon svg").first.wait_for(timeout=20_000)
    assert studio.outputs(MONITOR).locator(".widget-html-content").count() == 0, "the widget is gone, its picture stays"
    screenshot(studio, "monitor", MONITOR)


@together
def test_run_all_twice_leaves_nothing_twice(studio):
    counts = []
    for _ in range(2):
        studio.run_all()
        studio.page.wait_for_timeout(1000)
        counts.append(studio.page.locator(".jp-OutputArea-output .jupyter-widgets").count())
    assert counts[0] == counts[1] > 0
    executed = studio.saved()
    assert faults(executed) == []
    assert "threads: []" in executed.cells[THREADS].outputs[0].text
    assert len(executed.metadata.widgets[lesson_process.WIDGETS]["state"]) > 0


# Texts of less than 12 px, which are 9 pt.
TOO_SMALL = """() => [...document.querySelectorAll('.jp-OutputArea-output .jupyter-widgets *')]
    .filter(part => [...part.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
    .filter(part => part.checkVisibility() && parseFloat(getComputedStyle(part).fontSize) < 12)
    .map(part => part.textContent.slice(0, 40))"""


@together
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_every_widget_is_readable_at_half_the_width(studio, theme):
    studio.command("apputils:change-theme", theme=theme)
    studio.page.set_viewport_size({"width": 620, "height": 1400})
    studio.page.wait_for_timeout(1500)
    assert studio.page.evaluate(TOO_WIDE) == [], "wider than the cell"
    assert studio.page.evaluate(TOO_SMALL) == [], "text under 9 pt"
    for name, cell in {"memory": MEMORY, "timeline": TIMELINE, "recipes": RECIPES}.items():
        screenshot(studio, f"{name}, {theme}, half width", cell)
    studio.page.set_viewport_size({"width": 1100, "height": 1400})


# What is ipywidgets' own markup: it gives the description of a slider to no element, and noUiSlider's handle no name
# (leongersen/noUiSlider#1223). Where a number is asked for, a field beside the slider has one.
IPYWIDGETS_MARKUP = (("aria-input-field-name", "noUi-handle"),)


@together
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_what_the_widgets_show_keeps_the_standard(studio, theme):
    studio.command("apputils:change-theme", theme=theme)
    studio.page.wait_for_timeout(1500)
    assert studio.page.locator(".jp-Notebook .jp-Cell-outputArea").count() >= 10
    assert browser.violations(studio.page, ".jp-Notebook .jp-Cell-outputArea", IPYWIDGETS_MARKUP) == []
