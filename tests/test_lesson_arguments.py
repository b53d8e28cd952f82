"""The installed transformers knows every training argument that lessons use: none was renamed.

The names are read from the sources, so that nothing has to run. `make matrix` runs the lessons themselves, under the
oldest and the newest libraries.
"""

import ast
import inspect
import json
from pathlib import Path

import pytest

from perf_helpers.lab import Lab
from trainmem.core.arguments import check_names
from trainmem.records import Run

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "notebooks" / "src").glob("[0-9][0-9]_*.py"))
# What takes training arguments beside its own: its name in a lesson, and what its own are.
TAKERS = {"train": Lab.train, "infer": Lab.infer}
FUNCTIONS = (ast.FunctionDef, ast.Lambda)


def used(source):
    """Return the names of training arguments in a lesson's source: keywords of `lab.train`, `lab.infer` and
    `TrainingArguments`.

    They include the keys of a dict that is passed by `**` and written out in the lesson.
    """
    found = set()

    def visit(scope, outer):
        names = [*outer, written_out(scope)]
        for node in within(scope):
            own = own_parameters(node.func) if isinstance(node, ast.Call) else None
            for keyword in node.keywords if own is not None else ():
                given = [keyword.arg] if keyword.arg else keys(keyword.value, names, node.lineno)
                found.update(name for name in given if name not in own)
            if isinstance(node, FUNCTIONS):
                visit(node, names)

    visit(ast.parse(source), [])
    return found


def within(scope):
    """Yield every node of a scope's syntax tree, except those inside of its functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from within(node)


def own_parameters(function):
    """Return those parameters of a function that are not training arguments, e.g. `steps` of `lab.train`.

    Return None for a function that takes no training arguments at all. `function`: the syntax tree of the expression
    that is called, e.g. `lab.train`.
    """
    name = getattr(function, "attr", getattr(function, "id", None))
    if name == "TrainingArguments":
        return set()
    is_lab = isinstance(function, ast.Attribute) and "lab" in ast.unparse(function.value).lower()
    return set(inspect.signature(TAKERS[name]).parameters) if is_lab and name in TAKERS else None


def written_out(scope):
    """Return all assignments in a scope: {name: [(line, assigned expression, or None if it cannot be read)]}.

    `scope`: the scope's syntax tree.
    """
    parameters = [arg for arg in ast.walk(scope.args) if isinstance(arg, ast.arg)] if hasattr(scope, "args") else []
    found = {arg.arg: [(scope.lineno, None)] for arg in parameters}
    for node in within(scope):
        pairs = []
        match node:
            case ast.AugAssign():  # what it was, and more
                pairs = [(node.target, ast.BinOp(node.target, ast.BitOr(), node.value))]
            case ast.Assign():
                for target in node.targets:
                    sides = [getattr(side, "elts", ()) for side in (target, node.value)]
                    several = len(sides[0]) == len(sides[1]) > 0  # a, b = {...}, {...}
                    pairs += zip(*sides, strict=True) if several else [(target, node.value)]
            case ast.For():
                pairs = [(name, None) for name in ast.walk(node.target)]
        for name, value in pairs:
            if isinstance(name, ast.Name):
                found.setdefault(name.id, []).append((node.lineno, value))
    return found


def keys(value, names, line):
    """Return the keys that an expression for a dict may have, as far as the source shows them.

    The expression is a literal, dict(...), a dict's name, or two sides joined by `|`, `or` or `if ... else`, whose keys
    are all returned. A name stands for the value last assigned to it before `line`, in the innermost scope that assigns
    it.

    `value`: the expression's syntax tree; `names`: what `written_out` returned for each scope, the innermost last.
    """
    parts = []
    match value:
        case ast.Dict():
            own = [key.value for key in value.keys if isinstance(key, ast.Constant)]
            parts = [part for key, part in zip(value.keys, value.values, strict=True) if key is None]
            return own + [key for part in parts for key in keys(part, names, line)]
        case ast.Call(func=ast.Name(id="dict")):
            return [keyword.arg for keyword in value.keywords if keyword.arg]
        case ast.BinOp():
            parts = [value.left, value.right]
        case ast.IfExp():
            parts = [value.body, value.orelse]
        case ast.BoolOp():
            parts = value.values
        case ast.Name():
            bound = next((scope[value.id] for scope in reversed(names) if value.id in scope), [])
            line, last = max((each for each in bound if each[0] < line), key=lambda each: each[0], default=(0, None))
            parts = [last] if last else []
    return [key for part in parts for key in keys(part, names, line)]


def refused(names):
    """Return {name: the lab's message} of those training arguments in `names` that the installed transformers does
    not know.
    """
    found = {}
    for name in sorted(names):
        try:
            check_names([name])
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.nightly
def test_every_training_argument_of_the_lessons_is_one_of_the_installed_transformers():
    found = {path.stem: used(path.read_text()) for path in SOURCES}
    assert len(set().union(*found.values())) > 20, "hardly any was found: the sources are read in another way"
    assert {lesson: refused(names) for lesson, names in found.items() if refused(names)} == {}


@pytest.mark.nightly
def test_the_arguments_of_recorded_runs_are_known_too():
    """Recorded runs also have argument names that the sources do not show, e.g. names that a loop builds."""
    rows = [row for path in (ROOT / "results").glob("*/*.json") for row in json.loads(path.read_text())["runs"]]
    names = {name for row in rows for name in Run.from_dict(row).arguments}
    assert len(names) > 10 and refused(names) == {}


@pytest.mark.parametrize(
    "line",
    [
        "lab.train('x', per_device_batch=4)",
        "Lab().train('x', task=task, measure='memory', **{'per_device_batch': 4})",
        "small = dict(per_device_batch=4)\nlab.infer('x', **small)",
        "a, b = {'bf16': True}, {'per_device_batch': 4}\nlab.train('x', **(a | b))",
        "TrainingArguments('folder', per_device_batch=4)",
        "more = {'bf16': True}\nmore |= {'per_device_batch': 4}\nlab.train('x', **more)",
        "lab.train('x', **({'per_device_batch': 4} if cuda else {}))",
    ],
)
def test_an_unknown_name_is_found_wherever_it_is_used(line):
    assert refused(used(line)).keys() == {"per_device_batch"}


def test_a_name_means_what_its_own_function_gives_it():
    other = "def f():\n    more = {'odd': 1}\n    model.generate(**more)\n"
    assert used(other + "more = {'bf16': True}\nlab.train('x', **more)") == {"bf16"}
    assert used(other + "more = {'bf16': True}\ndef g(more):\n    lab.train('x', **more)") == set()
    assert used("more = {'bf16': True}\ndef g():\n    lab.train('x', **more)") == {"bf16"}


def test_what_the_lab_takes_itself_and_other_functions_keywords_are_none():
    assert used("lab.train('x', task=task, steps=3, bf16=True)\nplots.memory(runs, title='x')\nmodel.train(odd=1)") == {
        "bf16"
    }
