"""Names of other libraries that the package replaces, or that are private: trainmem/core/wrapped.toml lists
them all.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import perf_helpers

ROOT = Path(perf_helpers.__file__).parents[1]
USES = tomllib.loads((ROOT / "trainmem/core/wrapped.toml").read_text())["use"]
FILES = sorted(path for package in ("trainmem", "perf_helpers") for path in (ROOT / package).rglob("*.py"))
SOURCES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}
# Of Python's own classes, and names that this package gives.
KNOWN = {"_asdict", "_exit", "_getframe", "_replace"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


# ---- each name exists


NAMES = [
    name
    for use in USES
    if not use.get("added") and (torch.version.cuda or use.get("build") != "cuda")
    for name in use["names"]
]


def found(name):
    """Return the object at an import path, e.g. "torch.nn.Linear".

    Raises:
        AttributeError, ImportError: there is none.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
            break
        except ModuleNotFoundError:
            continue
    for attribute in parts[count:]:
        if not hasattr(thing, attribute) and inspect.isclass(thing) and f"self.{attribute}" in source_of(thing):
            return None  # objects have it
        thing = getattr(thing, attribute)
    return thing


def source_of(kind):
    return inspect.getsource(sys.modules[kind.__module__])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists_in_what_is_installed(name):
    if importlib.util.find_spec(package := name.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    found(name)


def test_a_name_that_is_gone_is_found_out():
    with pytest.raises(AttributeError):
        found("torch.distributed.distributed_c10d.ProcessGroupGlue")


def test_every_operator_that_the_package_names_exists():
    """The installed torch must have each operator that the package's sources name as `aten.name` or
    `torch.ops.aten.name`, also the private ones. Code that names a missing operator would fail.
    """
    chains = {
        ast.unparse(node) for tree in SOURCES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    operators = {chain.removeprefix("torch.ops.").split(".")[1] for chain in chains if is_of_aten(chain)}
    assert len(operators) > 50 and [name for name in sorted(operators) if not hasattr(torch.ops.aten, name)] == []


def is_of_aten(chain):
    return chain.startswith(("aten.", "torch.ops.aten.")) and chain.replace(".", "").replace("_", "").isalnum()


# ---- what takes a function's place passes on what it does not know


def replacements():
    for use in USES:
        for place in use.get("by", ()):
            if place.startswith("~"):
                yield place[1:].split(":")
                continue
            (file,) = [file for file in use["files"] if [*at(file, place)]]
            yield file, place


def at(file, place):
    """Yield the functions at a place in a file, as syntax trees.

    `place`: e.g. "Replica.forward"; a last name "<lambda>" gives all lambdas there.
    """
    *outer, last = place.split(".")
    nodes = [SOURCES[file]]
    for name in outer:
        nodes = [each for node in nodes for each in ast.walk(node) if getattr(each, "name", None) == name]
    for node in nodes:
        for each in ast.walk(node):
            if each is not node and getattr(each, "name", "<lambda>" * isinstance(each, ast.Lambda)) == last:
                yield each


def passes_on(function):
    """Return whether a function, given as a syntax tree, accepts any argument and passes unknown ones on."""
    taken = function.args
    if not taken.vararg or not taken.kwarg:
        return False
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    passed = [[*(arg.value for arg in call.args if isinstance(arg, ast.Starred))] for call in calls]
    named = [[each.value for each in call.keywords if each.arg is None] for call in calls]
    either = [call for call, stars, pairs in zip(calls, passed, named, strict=True) if stars or pairs]
    return all(
        taken.kwarg.arg in map(ast.unparse, pairs)
        for call, stars, pairs in zip(calls, passed, named, strict=True)
        if call in either and taken.vararg.arg in map(ast.unparse, stars)
    )


@pytest.mark.parametrize("place", [f"{file}:{place}" for file, place in replacements()])
def test_a_replacement_passes_on_what_it_does_not_know(place):
    functions = [*at(*place.split(":"))]
    assert functions and all(map(passes_on, functions)), f"{place} takes no unknown arguments, or loses them"


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("def f(*args, timeout): return g(*args, timeout=timeout)", False),
        ("def f(*args, **options): return g(*args)", False),
        ("def f(*args, **options): return g(*args, **options)", True),
        ("def f(*_, **__): return True", True),
        ("def f(): return True", False),
    ],
)
def test_a_replacement_that_loses_arguments_is_found_out(text, fine):
    assert passes_on(ast.parse(text).body[0]) is fine


# ---- nothing is missing in the list


def used(tree):
    """Yield the names of other libraries that a module depends on in two ways: functions that the module replaces with
    its own, and private names that it uses.

    `tree`: the module's syntax tree.
    """
    imported = {alias.asname or alias.name.partition(".")[0]: (node, alias.name) for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip

    def is_foreign(node):
        """Return whether an attribute belongs to another library, judged by the first name in its owner's expression.

        `node`: the syntax tree of the owner.
        """
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        word = getattr(node, "id", "")
        if word in ("self", "cls", "tracker"):
            return False
        where = imported.get(word)
        module = (getattr(where[0], "module", None) or where[1]) if where else ""
        return (
            not module.startswith(("trainmem", "perf_helpers"))
            and module.partition(".")[0] not in sys.stdlib_module_names
        )

    for scope in ast.walk(tree):
        if isinstance(scope, FUNCTIONS):
            constants = {target.id: node.value.value for node in ast.walk(scope) if isinstance(node, ast.Assign)
                         for target in node.targets if isinstance(target, ast.Name)
                         and isinstance(node.value, ast.Constant)}  # fmt: skip
            yield from patched(scope, constants, is_foreign)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_of_aten(ast.unparse(node)):
            if is_foreign(node.value):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("trainmem", "perf_helpers", "_")):
            inner = any(map(is_private, node.module.split(".")))
            yield from (alias.name for alias in node.names if inner or is_private(alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and is_foreign(node.args[0]):
                yield name.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and is_imported(target, imported) and is_foreign(target.value):
                    yield target.attr


def is_imported(node, imported):
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "") in imported


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def patched(scope, constants, is_foreign):
    for node in ast.walk(scope):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and scope.name == "_replacements":
            yield from (name.value for name in node.value.elts[1:2] if isinstance(name, ast.Constant))
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("patch"):
            continue
        kind, (first, *rest) = ast.unparse(node.func), node.args
        if kind == "patch":
            yield first.value.rpartition(".")[2]
        elif kind == "patch.object" and is_foreign(first):
            name = rest[0]
            yield name.value if isinstance(name, ast.Constant) else constants.get(ast.unparse(name), "")
        elif kind == "patch.multiple" and is_foreign(first):
            yield from (each.arg for each in node.keywords if each.arg not in ("create", None))
            if any(each.arg is None for each in node.keywords):
                tables = (each for each in ast.walk(scope) if isinstance(each, ast.Dict))
                yield from (key.value for table in tables for key in table.keys)


def own_names():
    """Yield the name of each function, class, variable and attribute that the package itself defines."""
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.attr] * (getattr(node.value, "id", "") in ("self", "cls", "TimeMeter"))


def missing(file, tree, own):
    listed = {part for use in USES if file in use["files"] for name in use["names"] for part in name.split(".")}
    return {
        name for name in used(tree) if name and name not in listed | KNOWN and not (is_private(name) and name in own)
    }


def test_no_name_is_missing_in_the_list():
    own = {*own_names()}
    assert {file: left for file, tree in SOURCES.items() if (left := missing(file, tree, own))} == {}


def test_a_name_that_is_not_listed_is_found_out():
    text = """
import torch
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map
def f():
    with patch.object(torch.Tensor, "sum", g), patch.object(self, "x", 1), patch("transformers.training_args.y", g):
        torch._C._cuda_sleep(1)
    distributed_c10d.ProcessGroupMPI = g
"""
    left = missing("lab/none.py", ast.parse(text), set())
    assert left == {"sum", "y", "_C", "_cuda_sleep", "ProcessGroupMPI", "tree_map"}


def test_every_listed_use_is_one():
    """Every file that trainmem/core/wrapped.toml lists exists; every listed name is in one of the files of its
    entry.
    """
    for use in USES:
        texts = [(ROOT / file).read_text() for file in use["files"]]
        assert all(any(name.rpartition(".")[2] in text for text in texts) for name in use["names"]), use["names"]
        assert use["why"] and use["without"] and use["files"]
