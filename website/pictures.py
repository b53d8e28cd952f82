"""Make README's pictures: a lesson and the calculator from the built site, and the report of the newest recorded run.

python website/site_pages.py --pictures     the site, and then notebooks/pictures/{lesson,calculator,report}.png

Each is a screenshot of headless Chromium, reduced to 256 colours if that makes the file smaller; text stays sharp.
"""

import base64
import io
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import PIL.Image
from claim_history import RESULTS
from playwright.sync_api import Locator, Page, sync_playwright
from recorded_lessons import smaller

from perf_helpers.course.report import report
from perf_helpers.course.results import course_runs

FOLDER = RESULTS.parent / "notebooks" / "pictures"
WIDTH, SCALE = 960, 1.5  # CSS pixels; pixels of the picture per CSS pixel
HOST = "http://pictures.invalid/"  # requests to this host are answered with files of a folder
CHOICE = "model=llama-3.2-1b&method=lora&precision=bf16-weights&checkpointing=on&batch=4&length=2048&card=4090"
# Hide the site's bars, which take room, and its sticky header, which would cover the picture.
PLAIN = ".bd-header, .bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article { display: none !important; }"


def lesson(page: Page) -> bytes:
    """Return a PNG of two screenshots: a guess before it is committed, and below it the revealed measurement.

    `page`: a browser page for the site.
    """
    page.goto(f"{HOST}notebooks/01_anatomy_of_memory.html")
    page.add_style_tag(content=PLAIN)
    guess = page.locator("form.guess").first
    guess.locator("input[type=number]").fill("100")
    section = page.locator("section", has=guess).last
    top, field = section.bounding_box()["y"], guess.bounding_box()
    before = seen(page, section, round(field["y"] + field["height"] - top) + 32)
    guess.locator("button").click()
    return stacked(before, seen(page, page.locator("details.reveal").first, 312))


def calculator(page: Page) -> bytes:
    """Return a PNG of the calculator with its answer for the settings in `CHOICE`.

    `page`: a browser page for the site.
    """
    page.goto(f"{HOST}calculator.html#{CHOICE}")
    page.add_style_tag(content=PLAIN)
    page.locator("#calculator-answer[data-done=all]").wait_for()
    return seen(page, page.locator("#calculator"), 698)


def counted(page: Page) -> bytes:
    """Return a PNG of the verdict counts in a course run's report; `page`: a browser page for the report's folder."""
    page.goto(f"{HOST}index.html")
    return seen(page, page.locator("body"), 478)


def seen(page: Page, place: Locator, height: int) -> bytes:
    """Return a PNG of a browser page whose window begins at the element `place` and is `height` pixels high."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    place.evaluate("each => scrollTo(0, scrollY + each.getBoundingClientRect().top - 16)")
    return page.screenshot()


def stacked(*pictures: bytes) -> bytes:
    """Return one PNG of PNGs of equal width, joined one below the other."""
    images = [PIL.Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    whole, top = PIL.Image.new("RGB", (images[0].width, sum(image.height for image in images))), 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    whole.save(made := io.BytesIO(), "PNG")
    return made.getvalue()


def make(site: Path, to: Path = FOLDER) -> None:
    """Write the pictures of the built site in the folder `site` into the folder `to`."""
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        newest = max(course_runs(RESULTS), key=lambda run: run["date"])
        shutil.copyfile(newest["file"], Path(made, "results.json"))
        report(made)  # the lessons' pages are missing, but the picture does not show them
        chosen = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chosen, args=["--no-sandbox", "--disable-gpu"])
        for take, folder, name in (lesson, site, "lesson"), (calculator, site, "calculator"), (counted, made, "report"):
            page = browser.new_page(viewport={"width": WIDTH, "height": 528}, device_scale_factor=SCALE)
            files = Path(folder)
            page.route("**", lambda route, _, at=files: route.fulfill(path=at / urlsplit(route.request.url).path[1:]))
            png = smaller(base64.b64encode(take(page)).decode())
            (to / f"{name}.png").write_bytes(base64.b64decode(png))
        browser.close()
