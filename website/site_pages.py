"""Build the static site from the recorded results, the written pages, and the ledger of claims.

    python website/site_pages.py                              build/site/index.html
    python website/site_pages.py --repository owner/name      with links to the sources, to Colab and to Binder
    python website/site_pages.py --pictures                   also make README's pictures, with pictures.py

The front page begins with a question, a lesson's picture, three findings and the two ways to start; README's other
sections follow. Each lesson is shown as a recorded machine executed it. Each claim has a page of its own, with its
results in recorded runs, rehearsals and the library matrix. The other pages are the repository's Markdown files. Links
between pages become links of the site; links to other files lead to the repository if its address is known.
"""

import argparse
import functools
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import claim_history
import jinja2
import lesson_pages
import nbformat
from markupsafe import Markup
from sphinx.cmd.build import build_main

from perf_helpers.course.ledger import Verdict, load
from perf_helpers.course.results import measured_text

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
GUIDES = (
    "running",
    "findings",
    "estimate",
    "rehearsal",
    "sweeps",
    "nights",
    "gpu-suite",
    "scripts",
    "trust",
    "releases",
)
GUIDES += ("coverage", "words")

PAGES = [  # the repository's pages in the site's order; `readme` splits README
    *(f"docs/{name}.md" for name in GUIDES),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/upstream/*.md")),
    *("results/README.md", "notebooks/INSTRUCTOR.md", "notebooks/BIBLIOGRAPHY.md", "CONTRIBUTING.md", "CHANGELOG.md"),
]
PUBLISHED = ROOT / "results" / "published.json"
APPS = [path.name for path in sorted(HERE.glob("*.md"))]  # pages that compute in the browser
MOVED = ("Learn", "Lessons", "Read on")  # README's sections that move to pages of their own
UNPUBLISHED = "OWNER/perf-helpers"  # the repository's name in pyproject.toml until it is published
LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<to>[^)\"\s#:]+)(?P<anchor>#[^)\"\s]*)?(?=[)\"])")
NOWHERE = "nowhere:"  # marks a link without a target on the site; the link is removed, its text stays
FINDING = re.compile(r"(?ms)^- \*\*.+?(?=^- \*\*|^<!--|^$|\Z)")  # README's list before its first section
LESSON_PICTURE = re.compile(r'(?s)<img src="notebooks/pictures/lesson\.png".*?>')
QUESTION = re.compile(r"01_anatomy_of_memory\.ipynb\) \| ([^|]+?) \|")  # lesson 01's in README's table
LESSON = re.compile(r"(?m)^\| *(?P<part>[^|]*?) *\| \[(?P<title>[^\]]*)\]\((?P<name>notebooks/\w+)\.ipynb\)")
COLAB, BINDER = "https://colab.research.google.com/github", "https://mybinder.org/v2/gh"


class Sources:
    """The sources that Sphinx reads: `write` makes the front page, the lessons, the claims and the other pages.

    Args:
        folder: gets the pages; its old content is deleted.
        repository: owner/name on GitHub, or None.
    """

    def __init__(self, folder: Path, repository: str | None):
        self.folder, self.repository = folder, repository
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"), trim_blocks=True, lstrip_blocks=True, autoescape=True
        )
        self.templates.globals |= {"badge": lesson_pages.badge, "measured": measured_text, "verdicts": list(Verdict)}
        shutil.rmtree(folder, ignore_errors=True)

    def write(self) -> None:
        for name in PAGES:
            self.put(name, self.linked((ROOT / name).read_text("utf-8"), Path(name).parent))
        for name in APPS:
            self.put(name, self.app(name))
        self.readme()
        self.lessons()
        self.claims()

    @functools.cached_property
    def history(self) -> claim_history.History:
        return claim_history.History.read()

    def app(self, name: str) -> str:
        """Return a page that computes in the browser, with the recorded accuracy of its answers filled in.

        `name`: the page's file in website/.
        """
        published = json.loads(PUBLISHED.read_text("utf-8"))
        facts = {"published": published, "near": published["like_for_like"]["training"]}
        return self.templates.from_string((HERE / name).read_text("utf-8")).render(facts)

    def put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def linked(self, text: str, folder: Path) -> str:
        """Return a page's Markdown with links that work on the site.

        `text`: the Markdown; `folder`: the page's folder in the repository.
        """

        def link(found: re.Match) -> str:
            target = Path(os.path.normpath(ROOT / folder / found["to"]))
            name = os.path.relpath(target, ROOT)
            if name.startswith("..") or not target.exists() or name in PAGES or target.suffix == ".ipynb":
                return found[0]
            if name == "README.md" or (target.parent == HERE and target.name in APPS):
                own = "index.md" if name == "README.md" else target.name
                return found["before"] + os.path.relpath(own, folder) + (found["anchor"] or "")
            if target.suffix == ".png":
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, self.folder / name)
                return found[0]
            at = f"https://github.com/{self.repository}/blob/main/{name}" if self.repository else NOWHERE
            return f"{found['before']}{at}{found['anchor'] or ''}"

        text = re.sub(rf"\[([^\[\]]+)\]\({NOWHERE}[^)]*\)", r"\1", LINK.sub(link, text))
        if self.repository:
            return re.sub(r" \(The project has no public address yet:[^)]*\)", "", text).replace(
                UNPUBLISHED, self.repository
            )
        return re.sub(rf"\[([^\[\]]+)\]\(https://[^)]*{UNPUBLISHED}[^)]*\)", r"\1", text)

    def readme(self) -> None:
        """Write the front page, the list of lessons and the list of guides from README, without its badges."""
        text = re.sub(r"(?m)^\[!\[.*\n", "", (ROOT / "README.md").read_text("utf-8"))
        start, *parts = re.split(r"(?m)^## ", self.linked(text, Path()))
        sections = dict(part.split("\n", 1) for part in parts)
        learn, lessons, more = (sections.pop(title) for title in MOVED)
        by_part: dict[str, list[str]] = {}
        for found in LESSON.finditer(lessons):
            part = found["part"] or list(by_part)[-1]
            by_part.setdefault(part, []).append(f"{found['title']} <{found['name']}>")
        trees = "\n".join(toctree(names, part) for part, names in by_part.items())
        self.put("lessons.md", f"# The lessons\n{learn}{lessons}\n{trees}")
        self.put("guides.md", f"# Read on\n{more}\n{toctree(PAGES)}")
        count = sum(map(len, by_part.values()))
        front = self.front(start, QUESTION.search(lessons)[1], LESSON_PICTURE.search(learn)[0], count)
        body = "".join(f"## {title}\n{text}" for title, text in sections.items())
        self.put("index.md", f"{front}\n\n{body}\n{toctree(['lessons.md', 'claims.md', *APPS, 'guides.md'])}")

    def front(self, start: str, question: str, picture: str, lessons: int) -> str:
        """Return the top of the front page.

        Args:
            start: README up to its first section: title, introduction, and a list of three findings and one limitation.
            question: the title of the page.
            picture: the <img> of a lesson.
            lessons: how many lessons there are.
        """
        *findings, limit = FINDING.findall(start)
        about = re.sub(r"(?m)^<!-- .*? -->\n", "", FINDING.sub("", start)).partition("\n")[2]
        counts: dict[str, Counter] = {machine: Counter() for machine in self.history.machines}
        for machine, row in (each for rows in self.history.now.values() for each in rows):
            counts[machine][row["verdict"]] += 1
        texts = {"picture": picture, "findings": "".join(findings), "limits": limit.removeprefix("- "), "about": about}
        facts = {"question": question, "lessons": lessons, "scores": counts.items()}
        page = self.templates.get_template("index.md.j2")
        return page.render(facts | {name: Markup(text.strip()) for name, text in texts.items()})

    def lessons(self) -> None:
        """Write the lessons as the newest recorded run executed them, and their notebooks for download."""
        titles = re.findall(r"(?m)^## (.+)$", (ROOT / "notebooks" / "BIBLIOGRAPHY.md").read_text("utf-8"))
        places = {title[:2]: re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        (machine, folder), now = self.history.executed, self.history.now
        elsewhere = {id: lesson_pages.everywhere(rows, f"../claims/{id}.html") for id, rows in now.items()}
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
            notebook = nbformat.read(folder / path.name, as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "markdown":
                    cell.source = self.linked(cell.source, Path("notebooks"))
            sources = f"[Sources of this lesson](BIBLIOGRAPHY.md#{places[path.stem[:2]]})."
            head = f"*Recorded on {machine}.* {self.launch(path.name)} {sources}"
            made = lesson_pages.page(notebook, head, elsewhere, self.folder / "extra" / "notebooks" / "pictures")
            self.put(f"notebooks/{path.name}", nbformat.writes(made))
            self.put(f"clean/{path.name}", path.read_text("utf-8"))

    def launch(self, name: str) -> str:
        """Return Markdown links that open a lesson: on Colab, on Binder, or as a file.

        `name`: the file of the lesson's notebook. Without a repository there is only the file.
        """
        here = f"[as a notebook](path:../clean/{name}), for `make lab`"
        if self.repository is None:
            return f"Run it yourself: {here}."
        colab = f"{COLAB}/{self.repository}/blob/main/notebooks/{name}"
        binder = f"{BINDER}/{self.repository}/main?urlpath=lab/tree/notebooks/{name}"
        return f"Run it yourself: [on Colab]({colab}), [on Binder]({binder}), {here}."

    def claims(self) -> None:
        """Write a table of all claims, and a page for each claim."""
        titles = {path.stem[:2]: path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
        facts = {"claims": load().values(), "titles": titles, "history": self.history}
        self.put("claims.md", self.templates.get_template("claims.md.j2").render(facts))
        page = self.templates.get_template("claim.md.j2")
        for claim in load().values():
            self.put(f"claims/{claim.id}.md", page.render(facts | {"claim": claim}))


def toctree(names: Sequence[str], caption: str = "") -> str:
    """Return, as Markdown, a hidden table of contents, which orders the side bar and the arrows at the end of a page.

    `names`: the pages; `caption`: the heading in the side bar.
    """
    pages = "\n".join(name.removesuffix(".md") for name in names)
    return f"\n```{{toctree}}\n:hidden:\n{f':caption: {caption}' if caption else ''}\n\n{pages}\n```\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=os.environ.get("GITHUB_REPOSITORY"), help="owner/name on GitHub")
    parser.add_argument("--pictures", action="store_true", help="also make README's pictures again")
    options = parser.parse_args(arguments)
    Sources(SOURCE, options.repository).write()
    shutil.rmtree(SITE, ignore_errors=True)
    # -W: a warning, e.g. about a broken link, is an error.
    extra = f"html_extra_path={SOURCE / 'extra'}"
    code = build_main(["-W", "--keep-going", "-q", "-j", "auto", "-c", str(HERE), "-D", extra, str(SOURCE), str(SITE)])
    if options.pictures and not code:
        import pictures  # needs a browser

        pictures.make(SITE)
    return code


if __name__ == "__main__":
    sys.exit(main())
