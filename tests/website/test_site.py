"""The site (website/): how recorded lessons and the repository's pages become pages, and the built site as readers see
it.
"""

import base64
import importlib
import io
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import browser
import nbformat
import PIL.Image
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "website"))
claim_history, lesson_pages, pictures, recorded_lessons, site_pages = map(
    importlib.import_module, ("claim_history", "lesson_pages", "pictures", "recorded_lessons", "site_pages")
)
PICTURES = ("report", "lesson", "calculator")

WIDGET = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
NO_GUESS = "<div><b>○ no guess</b>: measured 3.1 MB; next time, put a number first. The estimate was 3 MB</div>"
CARD = '<div role="group" aria-label="weights-cost: holds" style="x">\n<strong>✓ holds</strong>\n</div>\n'


def picture(size=40):
    """Return a PNG with many colours, `size` pixels wide and high, as base64."""
    image = PIL.Image.effect_mandelbrot((size, size), (-2, -2, 2, 2), 50).convert("RGB")
    image.save(made := io.BytesIO(), "PNG", compress_level=0)
    return base64.b64encode(made.getvalue()).decode()


def executed():
    """Return a small executed lesson as a notebook."""
    shown = f'<img alt="a plot" src="data:image/png;base64,{picture()}">'
    outputs = [
        new_output("display_data", {"text/html": NO_GUESS, **WIDGET}),
        new_output("display_data", {"text/html": shown, "image/png": picture()}),
        new_output("display_data", dict(WIDGET)),
        new_output("display_data", {"text/html": CARD}),
    ]
    cells = [
        new_markdown_cell("# A lesson\n\nIt costs $n^2$, and \\$5; see [the next](05_b.ipynb)."),
        new_code_cell("out = ''", metadata={"tags": ["parameters"]}),
        new_code_cell(f"out = '{ROOT}/build'", metadata={"tags": ["injected-parameters"]}),
        new_code_cell("import torch", metadata={"tags": ["setup"]}),
        new_code_cell("prove()", metadata={"tags": ["solution"], "jupyter": {"source_hidden": True}, "papermill": {}}),
        new_code_cell("%%sealed question:\ncHJvdmU=", metadata={"jupyter": {"source_hidden": True}}),
        new_code_cell("show()", outputs=outputs, execution_count=7),
    ]
    return new_notebook(cells=cells, metadata={"widgets": {"state": {}}, "papermill": {}})


def test_an_executed_lesson_is_kept_without_what_a_page_does_not_need():
    kept = recorded_lessons.kept(executed())
    assert not kept.metadata and [cell.source for cell in kept.cells][2] == "import torch"
    solution, _, shown = kept.cells[-3:]
    assert solution.metadata == {"tags": ["solution"], "jupyter": {"source_hidden": True}}
    assert [list(output.data) for output in shown.outputs] == [["text/html"]] * 3
    (found,) = re.findall(r"base64,([^\"]+)", shown.outputs[1].data["text/html"])
    assert len(found) < len(picture()) / 2
    nbformat.validate(kept)


def test_a_picture_that_does_not_become_smaller_stays_as_it_is():
    small = recorded_lessons.smaller(picture(4))
    assert recorded_lessons.smaller(small) == small


def test_a_recorded_lesson_becomes_a_page(tmp_path):
    elsewhere = {"weights-cost": "<p>elsewhere</p>"}
    page = lesson_pages.page(recorded_lessons.kept(executed()), "*head*", elsewhere, tmp_path / "pictures")
    first, parameters, setup, solution, question, shown = page.cells
    assert first.source.startswith("# A lesson\n\n*head*\n\nIt costs <math") and "\\$5" in first.source
    assert "remove-cell" in parameters.metadata.tags
    assert all("hide-input" in cell.metadata.tags for cell in (setup, solution)) and not shown.metadata.tags
    assert question.metadata.tags == ["remove-input"]
    html = [output.data["text/html"] for output in shown.outputs]
    (file,) = (tmp_path / "pictures").iterdir()
    assert html[0] == "<div>Measured 3.1 MB. The estimate was 3 MB</div>", "the page's reader may have guessed"
    assert html[1] == f'<img alt="a plot" src="pictures/{file.name}">'
    assert html[2] == f"{CARD}<p>elsewhere</p>"


def test_readme_shows_its_pictures_and_each_is_small():
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = dict(re.findall(r'<img src="notebooks/pictures/(\w+)\.png" width="\d+"\s+alt="([^"]{60,})">', readme))
    assert tuple(shown) == PICTURES
    for name in PICTURES:
        with PIL.Image.open(path := pictures.FOLDER / f"{name}.png") as image:
            assert image.mode == "P" and image.width >= 1280 and path.stat().st_size < 200_000


def test_links_lead_somewhere_from_the_site(tmp_path):
    text = (
        "[a](../README.md#start) [b](coverage.md) [c](../environment.yml) [d](https://x.org/y) [e](#here) "
        '<img src="../notebooks/pictures/guess.png"> [f](../notebooks/00_start_here.ipynb) [g](../absent.txt) '
        "[h](../website/class.md)"
    )
    with_none = site_pages.Sources(tmp_path / "a", None).linked(text, Path("docs"))
    reported = text.replace("../README.md", "../index.md").replace("[c](../environment.yml)", "c")
    assert with_none == reported.replace("../website/class.md", "../class.md")
    assert (tmp_path / "a/notebooks/pictures/guess.png").exists()
    with_one = site_pages.Sources(tmp_path / "b", "me/course").linked(text, Path("docs"))
    assert "[c](https://github.com/me/course/blob/main/environment.yml)" in with_one


def test_links_to_the_repository_lead_there_if_it_is_known_and_are_texts_otherwise(tmp_path):
    text = "[Colab](https://colab.research.google.com/github/OWNER/perf-helpers/blob/main/a.ipynb) [b](https://x.org/y)"
    unknown = site_pages.Sources(tmp_path / "a", None).linked(text, Path())
    assert unknown == "Colab [b](https://x.org/y)"
    known = site_pages.Sources(tmp_path / "b", "me/course").linked(text, Path())
    assert known == text.replace("OWNER/perf-helpers", "me/course")


def test_the_front_page_has_a_question_a_picture_two_doors_three_findings_and_then_the_scoreboard(tmp_path):
    site_pages.Sources(tmp_path, "me/course").readme()
    text = (tmp_path / "index.md").read_text("utf-8")
    assert re.match(r"# [^\n]+\?\n", text)
    order = (
        "pictures/lesson.png",
        'href="lessons.html"',
        'href="calculator.html"',
        "## Three findings",
        "## Scoreboard",
    )
    places = [text.index(each) for each in order]
    assert places == sorted(places) and text[places[3] : places[4]].count("\n- **") == 3
    assert "](notebooks/00_start_here.ipynb)" in (tmp_path / "lessons.md").read_text("utf-8")


def test_a_lesson_is_opened_elsewhere_only_where_the_repository_is_known(tmp_path):
    colab = "(https://colab.research.google.com/github/me/course/blob/main/notebooks/05_x.ipynb)"
    assert colab in site_pages.Sources(tmp_path / "a", "me/course").launch("05_x.ipynb")
    assert "https" not in site_pages.Sources(tmp_path / "b", None).launch("05_x.ipynb")


def test_a_claims_history_has_every_record_and_calls_a_rehearsal_so():
    history = claim_history.History.read()
    entries = history.before["eighteen-bytes"]
    assert [entry.date for entry in entries] == sorted(entry.date for entry in entries)
    assert {entry.machine for entry in entries} >= {"Intel Xeon, 2 cores", "T4 16 GiB, rehearsed"}
    assert any(entry.machine.endswith("library matrix") and "torch 2.11" in entry.libraries for entry in entries)
    newest = dict(history.now["eighteen-bytes"])
    assert set(newest) <= set(history.machines) and len(newest) > 2


# ---- the whole site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Yield the built site's folder, and its address."""
    folder = tmp_path_factory.mktemp("site")
    site_pages.SOURCE, site_pages.SITE = folder / "source", folder / "html"
    assert site_pages.main(["--repository", "me/course"]) == 0
    with browser.served(folder / "html") as address:
        yield folder / "html", address


def pages(folder):
    found = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.html")}
    found = {name: BeautifulSoup(text, "html.parser") for name, text in found.items() if "_static" not in name}
    assert len(found) > 250
    return found


@pytest.mark.nightly
def test_every_link_of_the_site_leads_somewhere_and_nothing_is_fetched_from_elsewhere(site):
    folder, _ = site
    made, broken = pages(folder), []
    ids = {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in made.items()}
    for name, page in made.items():
        assert (folder / name).stat().st_size < 1_500_000, name
        for tag in page.find_all(["a", "img", "script", "link", "iframe", "source"]):
            link = tag.get("href") or tag.get("src")
            if not link or link.startswith(("data:", "mailto:")):
                continue
            parts = urlsplit(urljoin(f"/{name}", link)) if not urlsplit(link).scheme else urlsplit(link)
            if parts.scheme:
                if tag.name != "a":
                    broken.append(f"{name}: {tag.name} from {link}")
                continue
            target = unquote(parts.path).lstrip("/")
            if not (folder / target).is_file():
                broken.append(f"{name}: {link}")
            elif parts.fragment and target in ids and unquote(parts.fragment) not in ids[target]:
                broken.append(f"{name}: {link}, no such place")
    assert broken == []


@pytest.mark.nightly
@pytest.mark.skipif(not browser.chromium(), reason="no Chromium: apt-get install chromium, or name one in $CHROMIUM")
class TestInABrowser:
    @pytest.fixture
    def page(self, chromium, site):
        opened = chromium.new_page(viewport={"width": 1280, "height": 900})
        faults = []
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.on("request", lambda request: request.url.startswith(site[1]) or faults.append(request.url))
        yield opened
        opened.close()
        assert faults == []  # no error, and nothing from elsewhere

    def test_a_guess_is_kept_and_held_against_what_was_measured(self, page, site):
        page.goto(site[1] + "notebooks/01_anatomy_of_memory.html")
        form = page.locator("form.guess").first
        reveal = page.locator("details.reveal").first
        assert not reveal.evaluate("each => each.open")
        form.locator("input[type=number]").fill("100")
        form.locator("input[type=number]").press("Enter")
        measured = float(reveal.locator("[data-revealed]").get_attribute("data-measured"))
        off = f"{100 * abs(100 - measured) / measured:.4g}"
        assert f"{off} % off" in reveal.inner_text() and reveal.evaluate("each => each.open")
        page.reload()
        assert "Your guess: 100" in form.inner_text() and form.locator("button").is_disabled()

    def test_claims_are_found_by_words_and_by_verdict(self, page, site):
        page.goto(site[1] + "claims.html")
        page.fill("input[name=words]", "eighteen-bytes")
        assert page.locator("#claims tbody tr:visible").count() == 1
        page.fill("input[name=words]", "")
        page.select_option("select[name=verdict]", "refuted")
        shown = page.locator("#claims tbody tr:visible")
        assert 10 < shown.count() < page.locator("#claims tbody tr").count()
        assert all("refuted" in text for text in shown.all_inner_texts())

    def test_readmes_pictures_are_made_again_in_the_same_size(self, site, tmp_path):
        with ThreadPoolExecutor(1) as apart:  # from the thread that has a browser open
            apart.submit(pictures.make, site[0], tmp_path).result()
        for path in (tmp_path / f"{name}.png" for name in PICTURES):
            sizes = [PIL.Image.open(each).size for each in (path, pictures.FOLDER / path.name)]
            assert sizes[0] == sizes[1] and path.stat().st_size < 200_000

    def test_the_search_finds_a_lesson(self, page, site):
        page.goto(site[1] + "search.html?q=Adafactor")
        page.wait_for_selector("#search-results a[href*='08_adafactor']")

    @pytest.mark.parametrize("theme", ["light", "dark"])
    @pytest.mark.parametrize("width", [360, 1280])
    @pytest.mark.parametrize(
        "name", ["index", "lessons", "claims", "claims/eighteen-bytes", "notebooks/05_gradient_accumulation"]
    )
    def test_a_page_is_accessible_and_no_wider_than_the_window(self, page, site, name, width, theme):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=theme)
        page.goto(f"{site[1]}{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.violations(page) == []
