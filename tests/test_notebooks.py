"""The lessons' notebooks agree with their sources and have the shape of a lesson; each check reports a lesson that does
not.
"""

import ast
import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

from perf_helpers.widgets import sealed

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)

SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
TAGGED = ("setup", "claim", "widget", "exercise", "check", "solution", "finish")
PARAMETERS = '# %% tags=["parameters"]\nprofile = "auto"\nstrict = False\nout = ""'


def source(middle=""):
    """Return the source of a lesson without any fault; `middle` is added as a cell."""
    cells = ["# %% [markdown]\n# # Does it fit?\n#\n# - You will see.", PARAMETERS]
    cells += [f"# %% [markdown]\n# ## Part {number}" for number in range(20 - 2 - len(TAGGED))] + [middle]
    return "\n\n".join(cells + [f'# %% tags=["{tag}"]\n{tag} = 1' for tag in TAGGED]) + "\n"


def notebook(text):
    return nbformat.reads(build.build(text), as_version=4)


def test_there_are_lessons():
    assert SOURCES, "no sources in notebooks/src"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_lesson_is_up_to_date_and_in_shape(path):
    built = build.build(path.read_text(encoding="utf-8"), build.recorded_text(path.stem), path.stem)
    target = path.parents[1] / f"{path.stem}.ipynb"
    assert target.exists() and target.read_bytes() == built.encode(), "stale: run python notebooks/build.py"
    assert build.lint(nbformat.reads(built, as_version=4)) == []


def test_figures_of_recorded_runs_are_shown_before_the_last_cell():
    recorded = [path for path in SOURCES if build.recorded_text(path.stem)]  # a new lesson waits for the next whole run
    assert len(recorded) >= 20
    for path in recorded:
        cells = nbformat.read(path.parents[1] / f"{path.stem}.ipynb", as_version=4).cells
        assert build.tags(cells[-2]) == [build.RECORDED]
        assert "transformers" in cells[-2].source and "20" in cells[-2].source  # versions and date


def gpus_taken_unasked(text):
    """Return the cells that would use every GPU: a Trainer without a limit of GPUs, or DataParallel without a list of
    devices.

    `text`: the source of a lesson.
    """
    cells = [cell for cell in text.split("# %%") if not cell.startswith(" [markdown]")]
    wraps = [cell for cell in cells if "trainer.train()" in cell and "_n_gpu = min(1" not in cell]
    return wraps + [cell for cell in cells if cell.count("nn.DataParallel") > cell.count("device_ids=")]


def test_no_lesson_takes_more_gpus_than_it_speaks_of():
    found = {path.stem: gpus_taken_unasked(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert sum("trainer.train()" in path.read_text(encoding="utf-8") for path in SOURCES) >= 2
    assert not any(found.values()), found
    assert gpus_taken_unasked("# %%\ntrainer.train()") and gpus_taken_unasked("# %%\ntorch.nn.DataParallel(model)")


def test_without_recorded_runs_there_is_no_such_cell(tmp_path):
    assert build.recorded_text("05_gradient_accumulation", tmp_path) == ""


def test_no_notebook_is_without_a_source():
    assert {path.stem for path in (ROOT / "notebooks").glob(f"{build.LESSONS}.ipynb")} <= {
        path.stem for path in SOURCES
    }


def test_a_build_is_valid_repeatable_and_without_outputs():
    text = build.build(source())
    assert text == build.build(source()) and text.endswith("\n")
    nbformat.validate(json.loads(text))
    assert build.lint(notebook(source())) == []
    assert notebook(source()).metadata == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def test_an_inserted_cell_changes_no_other_cell():
    twins = "# %%\nx = 1\n\n# %%\nx = 1\n"  # equal cells need different ids
    before, after = (notebook(source(middle)).cells for middle in (twins, "# %%\nnew = 1\n\n" + twins))
    assert len({cell.id for cell in after}) == len(after) == len(before) + 1
    assert [cell for cell in after if cell.source != "new = 1"] == before


QUESTION = '# %%\nexercises.question(\n    lab, "key", "Why?", {"a": "for", "b": "no"}, right="a"\n)\n\n'
PLANTED = '# %% jupyter={"source_hidden": true}\npatient = "the leak"\n\n'
HINT = '# %% jupyter={"source_hidden": true}\nexercises.hint("the cause", "the remedy")\n\n'


def sealed_cells(text):
    """Return [(kind, decoded source)] of the sealed cells in a notebook, which hide e.g. a solution; `text` is the
    content of the notebook's file.
    """
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.source.startswith(sealed.MAGIC)]
    for cell in cells:
        assert cell.metadata["jupyter"]["source_hidden"] and cell.metadata["cellView"] == "form", "folded too"
    return [(cell.source.split()[1], sealed.opened(cell.source)) for cell in cells]


def test_what_holds_an_answer_is_sealed_by_the_build():
    text = build.build(source(QUESTION + PLANTED), name="05_it_fits")
    plain = [("question:", QUESTION[5:].strip()), ("code:", PLANTED.splitlines()[1]), ("solution:", "solution = 1")]
    assert [(kind, cell.strip()) for kind, cell in sealed_cells(text)] == plain and text.count(
        "notebooks/src/05_it_fits.py"
    ) == 3
    assert not any(answer in text for answer in ("right=", "the leak", "solution = 1"))
    assert tagged(nbformat.reads(text, as_version=4).cells, "setup").source == f"setup = 1\n\n{build.OPENS}"


def test_the_source_of_a_hidden_hint_is_sealed():
    text = build.build(source(HINT), name="05_it_fits")
    assert [kind for kind, _ in sealed_cells(text)] == ["hint:", "solution:"]
    assert "the remedy" not in text


def test_a_question_has_its_own_cell():
    assert build.lint(notebook(source(QUESTION))) == []
    mixed = QUESTION.replace("# %%\n", "# %%\nprint('seen')\n")
    assert "a question has a cell of its own" in build.lint(notebook(source(mixed)))[0]


def test_no_lesson_shows_an_answer_in_any_front_end():
    found = []
    for path in SOURCES:
        text = (ROOT / "notebooks" / f"{path.stem}.ipynb").read_text(encoding="utf-8")
        found += (kinds := sealed_cells(text))
        for _, plain in kinds:
            lines = [line.strip() for line in plain.splitlines() if len(line) > 40 and line.strip().startswith('"')]
            assert not any(json.dumps(line)[1:-1] in text for line in lines)
        requested = text.replace(
            'exercises.question(lab, f\\"patient {key}\\"', ""
        )  # of lesson 23, where the code is sealed
        assert "exercises.question(" not in requested and "exercises.prove(" not in requested, path.stem
    kinds = [kind for kind, _ in found]
    assert kinds.count("question:") >= 40 and kinds.count("solution:") >= 35 and kinds.count("code:") >= 6


def tagged(cells, tag):
    return next(cell for cell in cells if tag in build.tags(cell))


def untag(tag):
    return lambda cells: tagged(cells, tag).metadata.pop("tags")


def double(tag):
    return lambda cells: cells.insert(-1, tagged(cells, tag))


def rewrite(tag, text):
    return lambda cells: tagged(cells, tag).update(source=text)


def prose(text):
    return lambda cells: cells[3].update(source=text)


def title(text):
    return lambda cells: cells[0].update(source=text)


BREAKS = {
    **{f"no {tag}": (untag(tag), f"tagged {tag}") for tag in ("parameters", *TAGGED) if tag != "widget"},
    **{f"two {tag}": (double(tag), f"exactly one cell is tagged {tag}; here 2") for tag in ("parameters", "setup")},
    "two finish": (lambda cells: cells.insert(3, cells[-1]), "exactly one cell is tagged finish; here 2"),
    "finish not last": (lambda cells: cells.append(cells.pop(4)), "the last cell is not the one tagged finish"),
    "an exercise without a check": (double("exercise"), "2 exercise, 1 check, 1 solution"),
    "a misspelt tag": (lambda cells: cells[4].metadata.update(tags=["clame"]), "unknown tag clame"),
    "setup first": (lambda cells: cells.insert(1, cells.pop(cells.index(tagged(cells, "setup")))), "comes before"),
    "a long cell": (rewrite("claim", "\n".join("x" * 26)), "has 26 lines; at most 25"),
    "an estimate that can end it": (rewrite("claim", "peak = estimate(task).peak_bytes"), "by lab.foresee(estimate"),
    "a result that is lost": (rewrite("claim", "if x:\n    claims.check('a', 1)"), "loses the result of claims.check"),
    "a result before the end": (rewrite("claim", "claims.check('a', 1)\nx = 1"), "loses the result of claims.check"),
    "outputs": (lambda cells: tagged(cells, "claim").update(execution_count=1), "has outputs"),
    "a misspelt parameter": (rewrite("parameters", 'profile = "auto"\nstrickt = False\nout = ""'), "are exactly"),
    "one parameter more": (rewrite("parameters", 'profile = "auto"\nstrict = False\nout = ""\nx = 1'), "are exactly"),
    "another default": (rewrite("parameters", 'profile = "gpu"\nstrict = False\nout = ""'), "are exactly"),
    "computed parameters": (rewrite("parameters", "print(1)"), "are exactly"),
    "few cells": (lambda cells: cells.pop(3), "19 cells; 20 to 60"),
    "many cells": (lambda cells: cells.extend([cells[3]] * 41), "61 cells"),
    "much prose": (prose("word " * 2601), "words of prose; at most 2600"),
    "no question": (title("# It fits."), "the title is a question"),
    "no title": (title("Does it fit?"), "exactly one heading of level one; here 0"),
    "two titles": (prose("# Another?"), "exactly one heading of level one; here 2"),
    "a late title": (lambda cells: cells.insert(0, cells.pop(3)), "the first cell starts with the title"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_lint_bites(name):
    broken, (damage, words) = notebook(source()), BREAKS[name]
    damage(broken.cells)
    assert any(words in problem for problem in build.lint(broken)), build.lint(broken)


def test_an_estimate_that_is_requested_by_foresee_is_fine():
    fine = notebook(source())
    rewrite("claim", "lab.foresee(estimate, task)\nlab.foresee(lambda: 2 * estimate(task).peak_bytes)")(fine.cells)
    assert build.lint(fine) == []


def test_the_lint_counts_what_is_read():
    fine = notebook(source())
    prose("[two words](https://example.org/" + "a-" * 2000 + ")\n\n```\n# not a title\n```")(fine.cells)
    assert build.lint(fine) == []


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "05_it_fits.py").write_text(source())
    assert build.main([], tmp_path) == 0
    return tmp_path


def test_check_passes_on_what_was_built_and_writes_nothing(folder):
    before = (folder / "05_it_fits.ipynb").stat().st_mtime_ns
    assert build.main(["--check"], folder) == build.main([], folder) == 0
    assert (folder / "05_it_fits.ipynb").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda folder: (folder / "src" / "05_it_fits.py").write_text(source("# %%\nnew = 1\n")),
            "05_it_fits.ipynb: stale",
        ),
        (lambda folder: (folder / "05_it_fits.ipynb").unlink(), "05_it_fits.ipynb: missing"),
        (lambda folder: (folder / "06_gone.ipynb").write_text("{}"), "06_gone.ipynb: orphaned"),
        (lambda folder: (folder / "src" / "05_it_fits.py").write_text(PARAMETERS), "05_it_fits.py: no cell is tagged"),
        (lambda folder: (folder / "src" / "05_it_fits.py").unlink(), "no lessons in"),
    ],
)
def test_check_names_what_is_stale_missing_orphaned_or_out_of_shape(folder, capsys, damage, words):
    damage(folder)
    assert build.main(["--check"], folder) == 1
    assert words in capsys.readouterr().err


def never_shown(text):
    """Return the cells that call `widgets.revealed` before their last statement, so that its result is not shown.

    `text`: the source of a lesson.
    """
    found = []
    for cell in text.split("# %%"):
        if "widgets.revealed(" in cell:
            *before, _ = ast.parse(cell.partition("\n")[2]).body
            alone = (node.value for node in before if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            found += [cell for call in alone if ast.unparse(call.func) == "widgets.revealed"]
    return found


def test_every_answer_to_a_guess_is_shown():
    found = {path.stem: never_shown(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert sum("widgets.revealed(" in path.read_text(encoding="utf-8") for path in SOURCES) > 10
    assert not any(found.values()), found
    assert never_shown("# %%\nwidgets.revealed(lab)\nprint(1)")
    assert not never_shown("# %%\nprint(1)\nwidgets.revealed(lab)")
    assert not never_shown("# %%\ndisplay(widgets.revealed(lab))\nprint(1)")
