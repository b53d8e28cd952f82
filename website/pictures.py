"""README's pictures: a lesson and the calculator as the built site has them, and the report of the newest recorded run.

python website/site_pages.py --pictures     the site, and then notebooks/pictures/{lesson,calculator,report}.png

Each is what a window shows in headless Chromium, in 256 colours at most, which keep text sharp.
"""

import base64
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from claim_history import RESULTS
from playwright.sync_api import Locator, Page, sync_playwright
from recorded_lessons import smaller

from perf_helpers.course.report import report
from perf_helpers.course.results import course_runs

FOLDER = RESULTS.parent / "notebooks" / "pictures"
WINDOW, SCALE = {"width": 960, "height": 528}, 1.5  # in pixels of CSS; of the picture to each of them
HOST = "http://pictures.invalid/"  # whose files are a folder's
CHOICE = "model=llama-3.2-1b&method=lora&precision=bf16-weights&checkpointing=on&batch=4&length=2048&card=4090"


def lesson(page: Page) -> Locator:
    """A question, guessed."""
    page.goto(f"{HOST}notebooks/01_anatomy_of_memory.html")
    guess = page.locator("form.guess input[type=number]")
    guess.fill("100")
    guess.press("Enter")
    return page.locator("section", has=guess).last


def calculator(page: Page) -> Locator:
    """A choice, answered."""
    page.goto(f"{HOST}calculator.html#{CHOICE}")
    page.locator("#calculator-answer[data-done=all]").wait_for()
    return page.locator("#calculator")


def counted(page: Page) -> Locator:
    """The report's verdicts, counted."""
    page.goto(f"{HOST}index.html")
    return page.locator("body")


def make(site: Path, to: Path = FOLDER) -> None:
    """Write the pictures, of a site that is built."""
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        newest = max(course_runs(RESULTS), key=lambda run: run["date"])
        shutil.copyfile(newest["file"], Path(made, "results.json"))
        report(made)  # without its lessons' pages, which are out of sight
        chosen = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chosen, args=["--no-sandbox", "--disable-gpu"])
        for go, folder, name in (lesson, site, "lesson"), (calculator, site, "calculator"), (counted, made, "report"):
            page = browser.new_page(viewport=WINDOW, device_scale_factor=SCALE)
            files = Path(folder)
            page.route("**", lambda route, _, at=files: route.fulfill(path=at / urlsplit(route.request.url).path[1:]))
            place = go(page)
            page.add_style_tag(content=".bd-header { position: static !important; }")
            place.evaluate("each => scrollTo(0, scrollY + each.getBoundingClientRect().top - 16)")
            png = smaller(base64.b64encode(page.screenshot()).decode())
            (to / f"{name}.png").write_bytes(base64.b64decode(png))
        browser.close()
