"""Write toy lessons that fail in every known way, and results as a course run would write them."""

import json

import nbformat

PARAMETERS = 'profile = "auto"\nstrict = False\nout = ""'
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SHOW = f"""import IPython.display as d
d.display(d.HTML('<img style="display:block" alt="a &lt;plot&gt;" src="data:image/png;base64,{PNG}">'))"""
ORPHAN = """import os, pathlib, subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(out, "orphan.pid").write_text(str(child.pid))
pathlib.Path(out, "left").write_text(tempfile.mkdtemp())
os.kill(os.getpid(), 9)"""
SWALLOWED = "import ipywidgets\nwith ipywidgets.Output():\n    raise ValueError('swallowed by a widget')"


def decision(id, verdict="holds", *, expected=None, **fields):
    """Return a claim as a row of results, in the form of `claims.Decision.to_dict`.

    Args:
        id: the claim's id.
        verdict: the claim's verdict.
        expected: the expected verdicts; None: only `verdict`.
        fields: fields of the row to change.
    """
    expected = expected or [verdict]
    plain = {"id": id, "lesson": "00_a", "says": f"{id} says so", "quantity": "peak / peak", "threshold": "below 0.9"}
    plain |= {
        "verdict": verdict,
        "expected": expected,
        "as_expected": verdict in expected,
        "value": 0.5,
        "interval": None,
    }
    guide = {"value": 0.58, "text": "8681 against 14949 MB", "hardware": "V100", "source": "2023 guide"}
    return plain | {"reference": guide, "reason": "", "note": ""} | fields


def finish(name, *decisions, **fields):
    """Return the source of a toy lesson's last cell, which writes the results file as `Claims.finish` does.

    Args:
        name: name of the lesson.
        decisions: rows of its claims, see `decision`.
        fields: further fields of the file.
    """
    rows = [row | {"lesson": name} for row in decisions]
    record = {"schema": 1, "lesson": name, "claims": rows, "complete": True} | fields
    runs = "record['runs'] = [{'name': f'{profile} {strict}', 'status': 'ok', 'losses': [float('nan')]}]"
    write = f"pathlib.Path(out, {name + '.json'!r}).write_text(json.dumps(record))"
    return f"import json, pathlib\nrecord = json.loads({json.dumps(record)!r})\n{runs}\n{write}"


def write_lesson(folder, name, *sources, parameters=PARAMETERS):
    cells = [nbformat.v4.new_markdown_cell(f"# Does {name} <work>?")]
    cells += [
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, sources),
    ]
    folder.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


OK = (
    decision("small-peak", interval=[0.45, 0.55]),
    decision("same-gradient", "refuted", reason="the library divides by <tokens>"),
    decision("slower", "too small to tell"),
    decision("fast-link", "not testable here", value=None, reason="needs two GPUs"),
)
STATUS = {
    "00_killed": "crashed",
    "01_raises": "failed",
    "02_swallowed": "failed",
    "03_silent": "failed",
    "04_undecided": "failed",
    "05_misspelt": "failed",
    "07_unexpected": "ok",
    "08_ok": "ok",
}


def write_all(lessons):
    """Write each toy lesson of `STATUS` as a notebook into the folder `lessons`."""
    write_lesson(lessons, "00_killed", ORPHAN, finish("00_killed", decision("never")))
    write_lesson(
        lessons, "01_raises", finish("01_raises", decision("kept")), "raise KeyError('\\x1b[31mred\\x1b[0m & <b>')"
    )
    write_lesson(lessons, "02_swallowed", SWALLOWED, finish("02_swallowed", decision("green")))
    write_lesson(lessons, "03_silent", "1 + 1")
    write_lesson(
        lessons, "04_undecided", finish("04_undecided", decision("elsewhere", "not testable here", value=None))
    )
    write_lesson(lessons, "05_misspelt", "1 + 1", parameters=PARAMETERS.replace("strict", "strickt"))
    write_lesson(lessons, "07_unexpected", finish("07_unexpected", decision("promise", "refuted", expected=["holds"])))
    write_lesson(lessons, "08_ok", SHOW, finish("08_ok", *OK))


def results(*claims, lessons=("ok",), machine="CPU, 2 cores", torch="2.13.0", **fields):
    lessons = [{"name": "00_a", "status": status, "seconds": 1, "message": ""} for status in lessons]
    machine = {"name": machine, "kind": "cpu", "gpus": [], "memory_available_bytes": hash(torch)}
    data = {"schema": 1, "date": "2026-01-01", "profile": "cpu", "machine": machine, "versions": {"torch": torch}}
    return data | {"lessons": lessons, "claims": [*claims], "runs": []} | fields
