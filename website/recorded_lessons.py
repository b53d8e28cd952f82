"""Store the executed lessons of a course run in results/<machine>/lessons/, for the site.

    python website/recorded_lessons.py build/course

To keep the files small, the state of widgets, times, and second copies of pictures are left out.
"""

import base64
import io
import re
import shutil
import sys
from pathlib import Path

import nbformat
import PIL.Image

from perf_helpers.course.results import load_results
from trainmem.core.hardware import Machine

ROOT = Path(__file__).resolve().parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"
INLINE = "data:image/png;base64,"
INLINE_PICTURE = re.compile(INLINE + r"([A-Za-z0-9+/=\s]+)")


def main(course: str) -> None:
    """Store the lessons of a course run. Raises ValueError if `course` is not the folder of a course run."""
    data = load_results(course)
    folder = ROOT / "results" / Machine.from_dict(data["machine"]).slug / "lessons"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for lesson in data["lessons"]:
        name = f"{lesson['name']}.ipynb"
        text = nbformat.writes(kept(nbformat.read(Path(course, name), as_version=4)))
        # Remove this machine's path of the project.
        (folder / name).write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")


def kept(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return an executed notebook in the form that is recorded.

    The parameters of its run, the state of widgets, times, and second copies of pictures are removed.
    """
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",) if name in notebook.metadata}
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        cell.metadata = {name: cell.metadata[name] for name in ("tags", "jupyter") if cell.metadata.get(name)}
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if _is_page(each.get("data", {}))]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop(WIDGET, None)
            if "data:image/png" in (shown := data.get("text/html", "")):
                data.pop("image/png", None)
                data["text/html"] = INLINE_PICTURE.sub(lambda found: INLINE + smaller(found[1]), shown)
            elif "image/png" in data:
                data["image/png"] = smaller(data["image/png"])
    return notebook


def _is_page(data: dict) -> bool:
    """Return whether an output is visible on a page without a kernel; an output that is only a widget is not.

    `data`: {MIME type: content} of the output.
    """
    return WIDGET not in data or "text/html" in data


def smaller(encoded: str) -> str:
    """Return a base64 picture reduced to 256 colours, which are enough for a plot; unchanged if that saves nothing."""
    with PIL.Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        image.convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(
            made := io.BytesIO(), "PNG", optimize=True
        )
    return min(base64.b64encode(made.getvalue()).decode(), encoded, key=len)


if __name__ == "__main__":
    main(*sys.argv[1:])
