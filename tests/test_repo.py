"""The shape of the repository: imports in one direction, one list of dependencies, no stray paths, and pages whose
links and names are right.

Each check is a pure function that returns the problems it found, and is tested on this repository and on bad input.
"""

import ast
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import levels
import pytest
import size
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("trainmem", "perf_helpers")  # the engine, the course

BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}

HEAVY = ("torch", "transformers", "datasets", "matplotlib", "papermill")
HEAVY += ("pandas", "scipy", "IPython", "ipywidgets", "jupyter_client", "nbformat", "nbconvert")
CONDA_NAMES = {"pytorch": "torch", "pytorch-cpu": "torch"}

# Written in pieces, so that this file does not match itself.
STRAY = {
    "a path of one machine": r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me/\w+|Us" + r"ers/\w+)/",
    "a package registry's host": "py" + r"pi\.org|python" + r"hosted\.org|npm" + r"js\.(?:org|com)|debian" + r"\.org|"
    "py" + r"torch\.org/whl|ana" + r"conda\.org",
    "an open end": r"\b(?:TO" + r"DO|FIX" + r"ME)\b",
}


def some(items, what):
    """Return the items as a list; fail if there are none, because a check of nothing would pass.

    `what`: the name of the items, for the message.
    """
    found = list(items)
    assert found, f"nothing to check: no {what}"
    return found


def repository_files():
    """Return the files that are or would be committed, relative to the root; all files if git cannot list them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [Path(name) for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        made = {"build", "dist", "__pycache__"}
        paths = [p for p in paths if not made & set(p.parts) and not any(part.startswith(".") for part in p.parts)]
    return some((path for path in sorted(paths) if (ROOT / path).is_file()), "files")


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared(project, extras=True):
    """Return {distribution: Requirement} of a project's dependencies.

    `project`: the table [project] of pyproject.toml; `extras`: whether the dependencies of every extra are included.
    """
    texts = [*project["dependencies"]]
    if extras:
        texts += [text for group in project["optional-dependencies"].values() for text in group]
    return {canonicalize_name(r.name): r for r in map(Requirement, some(texts, "dependencies"))}


# ---- imports


def heads(source):
    """Return the top-level names, e.g. "torch", of the modules that a source text imports; imports for type checkers
    only are left out.
    """
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        found.update(name.split(".")[0] for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def undeclared(source, distributions, owners):
    """Return the third-party modules that a source text imports, but that none of the distributions provides.

    A module that is not installed is assumed to be provided by a distribution of its own name.

    `distributions`: names of the declared distributions; `owners`: {module: names of its distributions}.
    """
    wanted = heads(source) - set(sys.stdlib_module_names) - {*PACKAGES}
    provided = {
        head for head in wanted if {canonicalize_name(o) for o in owners.get(head, [head])} & set(distributions)
    }
    return sorted(wanted - provided)


def modules():
    """Return {name of a module: its source}; the module of an `__init__` file is named like its package,
    "perf_helpers.lab".
    """
    found = {}
    for package in PACKAGES:
        for path in some(sorted((ROOT / package).rglob("*.py")), "modules"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text()
    return found


def wrong_imports(folder):
    """Return import-linter's report on the packages in a folder, by this repository's rules; empty if no rule is
    broken.
    """
    command = [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / "pyproject.toml", "--no-cache"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert "Contracts" in done.stdout, done.stdout + done.stderr  # it did read the package
    return done.stdout.partition("Broken contracts")[2]


def test_imports_run_one_way():
    assert wrong_imports(ROOT) == ""


@pytest.mark.parametrize(
    "module, line, message",
    [
        ("trainmem/core/hardware", "from trainmem.core import task", "inside the core"),
        ("trainmem/records", "def f():\n    from trainmem import commands", "layers of the engine"),
        ("trainmem/advise/advice", "from perf_helpers.lab import Lab", "the engine knows no course"),
        ("trainmem/tables", "def f():\n    import matplotlib", "the engine knows no course"),
        ("perf_helpers/lab/lab", "from perf_helpers import cli", "layers of the course"),
        ("perf_helpers/course/claims", "def f():\n    from perf_helpers import widgets", "layers of the course"),
        ("perf_helpers/lab/odds", "import json", "inside the lab"),
    ],
)
def test_an_import_upwards_and_a_module_without_a_place_are_reported(tmp_path, module, line, message):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / f"{module}.py"
    path.write_text(f"{path.read_text() if path.exists() else ''}\n{line}\n")
    assert message in wrong_imports(tmp_path)


MOST_LINES = 345  # of code in a module


def shape_problems(modules):
    """Return the modules that are too long, and the subpackages whose docstring does not say what they do not cover.

    `modules`: {name: source}.
    """
    lines = {name: size.code_lines(source) for name, source in some(modules.items(), "modules")}
    long = [f"{name} has {n} lines of code, {MOST_LINES} at most" for name, n in lines.items() if n > MOST_LINES]
    rooms = {name.rpartition(".")[0] for name in modules if "." in name} & modules.keys()
    doors = {room: ast.get_docstring(ast.parse(modules[room])) or "" for room in sorted(rooms)}
    return long + [
        f"{room}: what is not covered?" for room, docstring in doors.items() if "ot covered" not in docstring
    ]


def test_modules_are_short_and_doors_say_what_is_behind_them():
    assert shape_problems(modules()) == []


def test_a_long_module_and_a_silent_door_are_reported():
    silent = {"lab": '"""Experiments."""', "lab.task": "a = 1\n" * (MOST_LINES + 1)}
    assert len(shape_problems(silent)) == 2
    covered = {"lab": '"""Experiments. Not covered: lessons."""', "lab.task": "a = 1\n\n# why\n" * MOST_LINES}
    assert shape_problems(covered) == []


def test_modules_are_nouns():
    assert {path.stem for path in repository_files() if path.suffix == ".py"} & BANNED_NAMES == set()


# The extra whose packages a part of the course may import, beside those that are always installed.
EXTRA_OF = {"perf_helpers.course": "course", "perf_helpers.widgets": "course", "perf_helpers.plots": "course"}
EXTRA_OF |= {"perf_helpers.sweep": "cluster"}


def test_every_import_is_a_declared_dependency():
    project, owners = pyproject(), importlib.metadata.packages_distributions()
    every, core = declared(project), declared(project, extras=False)
    extras = project["optional-dependencies"]
    of_extra = {name: declared({"dependencies": extras[name]}, extras=False) for name in {*EXTRA_OF.values()}}
    of_extra["cluster"] = {*of_extra["cluster"], "distributed"}  # by dask[distributed]
    problems = {}
    for module, source in modules().items():
        allowed = [of_extra[extra] for part, extra in EXTRA_OF.items() if module.startswith(part)]
        problems[module] = undeclared(source, {*core}.union(*allowed), owners)
    for folder in ("tests", "notebooks", "website"):
        near = [path for room in (folder, "benchmarks", "website") for path in (ROOT / room).rglob("*.py")]
        siblings = {other.stem: ["pytest"] for other in near}
        for path in some(sorted((ROOT / folder).rglob("*.py")), f"sources in {folder}"):
            problems[f"{folder}/{path.name}"] = undeclared(path.read_text(), every, {**owners, **siblings})
    assert {where: names for where, names in problems.items() if names} == {}


def test_an_undeclared_import_is_reported():
    source, owners = "import json, numpy, scipy.linalg", {"numpy": ["numpy"], "scipy": ["SciPy"]}
    assert undeclared(source, {"numpy"}, owners) == ["scipy"]


def loaded_after(statement, folder=ROOT):
    """Return the modules of `HEAVY` that a new interpreter has loaded after a statement, e.g. "import trainmem".

    `folder`: the interpreter's working directory.
    """
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{statement}\n"
    code += f"import json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import trainmem, perf_helpers") == []


def test_its_public_names_and_its_command_load_nothing_heavy():
    rooms = [path.parent for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")]
    names = "".join(f"import {room.parent.name}.{room.name}; " for room in some(rooms, "subpackages"))
    names += (
        "from perf_helpers import *; import perf_helpers.cli; perf_helpers.Lab, perf_helpers.Task, perf_helpers.plots"
    )
    assert loaded_after(names) == []


TINY = "--model bert-tiny --seq-len 16 --per_device_train_batch_size 1"
PAGES = {"jupyter_client", "nbformat", "nbconvert"}


@pytest.mark.parametrize(
    ("words", "code", "needs"),
    [
        ("--help", 0, set()),
        ("doctor", 0, set()),
        ("estimate --model bert-base-uncased --optimm adafactor", 2, set()),
        ("measure --model bert-tiny --bf16 maybe", 2, set()),
        ("advise --model bert-tiny --memory 1GB --effective-batch 2 --must optim=x", 2, set()),
        ("rehearse --model bert-tiny --card t4 --attn_implementation no", 2, set()),
        ("compare {run} {run}", 0, set()),
        ("history {folder}", 0, set()),
        ("report {folder}", 0, PAGES),
        pytest.param(f"estimate {TINY} --device cuda", 0, set(), marks=pytest.mark.nightly),
        pytest.param(f"measure {TINY} --memory-only", 0, set(), marks=pytest.mark.nightly),
    ],
)
def test_a_command_imports_nothing_that_it_does_not_use(tmp_path, words, code, needs):
    """Libraries that run or trace a training are imported only in the fresh subprocess."""
    run = shutil.copy(some(sorted((ROOT / "results").glob("*/*.json")), "runs")[-1], tmp_path / "results.json")
    words = words.format(run=run, folder=tmp_path).split()
    statement = f"""
import sys
sys.argv = ["perf-helpers", *{words}]
from perf_helpers.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == {code}, end.code"""
    assert {*loaded_after(statement, tmp_path)} <= needs


def test_a_heavy_import_is_seen():
    assert loaded_after("import matplotlib") == ["matplotlib"]


def test_public_names():
    import perf_helpers

    assert {"Lab", "Task", "claims", "hardware", "plots"} <= set(perf_helpers.__all__) <= set(dir(perf_helpers))
    assert all(getattr(perf_helpers, name) is not None for name in perf_helpers.__all__)
    with pytest.raises(AttributeError, match="Choose from Claims, Lab"):
        perf_helpers.Labb  # noqa: B018


# ---- dependencies


def pins(text):
    """Return ({distribution: version}, problems) of the text of a constraints file."""
    pinned, problems = {}, []
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.!]+)", line)
        if not match:
            problems.append(f"not an exact pin without a local tag: {line}")
        elif (name := canonicalize_name(match[1])) in pinned:
            problems.append(f"pinned twice: {name}")
        else:
            pinned[name] = Version(match[2])
    return pinned, problems


def pin_problems(project, constraints):
    pinned, problems = pins(constraints)
    for name, requirement in declared(project).items():
        if name not in pinned:
            problems.append(f"{name} is in pyproject.toml and not in constraints.txt")
        elif pinned[name] not in requirement.specifier:
            problems.append(f"{name} {pinned[name]} in constraints.txt is outside pyproject's {requirement.specifier}")
    return problems


def as_specifier(text):
    """Return the version specifier that a text means; conda's `=3.11` means any 3.11 release."""
    return SpecifierSet(re.sub(r"^=(?!=)(.+)$", r"==\1.*", text.replace(" ", "")))


def environment_problems(environment, folder, project, constraints):
    """Return the problems of a conda environment, one line each.

    Args:
        environment: the parsed environment file.
        folder: folder of that file, relative to the root.
        project: the table [project] of pyproject.toml.
        constraints: the text of constraints.txt.
    """
    problems, pinned = [], pins(constraints)[0]
    lines = [line for line in environment["dependencies"] if isinstance(line, str)]
    pip_lines = [line for entry in environment["dependencies"] if isinstance(entry, dict) for line in entry["pip"]]
    paths = [line.split()[-1] for line in pip_lines if line.startswith(("-e ", "--editable ", "."))]
    homes = [(ROOT / folder / path.split("[")[0]).resolve() for path in paths]
    if "pip" not in lines or homes != [ROOT] or not paths[0].endswith("[course]"):
        problems.append("it does not install the package itself with [course], once, through pip")
    requirements = {}
    for line in [*lines, *(line for line in pip_lines if line[0].isalnum())]:
        name, spec = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*(.*)", line).groups()
        requirements[CONDA_NAMES.get(name, canonicalize_name(name))] = as_specifier(spec)
    python = requirements.pop("python", SpecifierSet())
    versions = [Version(f"3.{minor}.0") for minor in range(6, 30)]
    admitted = [version for version in versions if version in python]
    wanted = SpecifierSet(project["requires-python"])
    if not python or not admitted or not all(version in wanted for version in admitted):
        problems.append(f"python{python} does not keep to requires-python {wanted}")
    for name, specifier in requirements.items():
        declaration = declared(project).get(name)
        exact = pinned.get(name) is not None and str(specifier) == f"=={pinned[name]}"
        if declaration and specifier and not exact and specifier != declaration.specifier:
            problems.append(
                f"{name}{specifier} is neither pyproject's range {declaration.specifier} nor the tested version"
            )
    return problems


def test_constraints_pin_every_dependency_within_its_range():
    assert pin_problems(pyproject(), (ROOT / "constraints.txt").read_text()) == []


@pytest.mark.parametrize(
    "constraints, problem",
    [
        ("torch==2.13.0+cpu\ntorch==2.13.0\npytest==9", "local tag: torch"),
        ("torch>=2.13\ntorch==2.13.0\npytest==9", "local tag: torch"),
        ("torch==2.13.0", "pytest is in pyproject"),
        ("torch==2.10.0\npytest==9", "torch 2.10.0 in constraints.txt is outside"),
        ("torch==2.13.0\nTorch==2.12.0\npytest==9", "twice"),
    ],
)
def test_a_bad_pin_is_reported(constraints, problem):
    project = {"dependencies": ["torch>=2.11"], "optional-dependencies": {"dev": ["pytest>=8"]}}
    (found,) = pin_problems(project, constraints)
    assert problem in found
    assert pin_problems(project, "torch==2.13.0\npytest==9") == []


@pytest.mark.parametrize("name", ["environment.yml", "binder/environment.yml"])
def test_environments_follow_from_pyproject(name):
    environment = yaml.safe_load((ROOT / name).read_text())
    constraints = (ROOT / "constraints.txt").read_text()
    assert environment_problems(environment, Path(name).parent, pyproject(), constraints) == []


@pytest.mark.parametrize(
    "dependencies, problem",
    [
        (["python=3.10", "pip", {"pip": ["-e .[course]"]}], "requires-python"),
        (["python>=3.9", "pip", {"pip": ["-e .[course]"]}], "requires-python"),
        (["python", "pip", {"pip": ["-e .[course]"]}], "requires-python"),
        (["python=3.11", "pip", {"pip": ["-e ..[course]"]}], "package itself"),
        (["python=3.11", "pip", {"pip": ["torch"]}], "package itself"),
        (["python=3.11", "pip", "pytorch-cpu>=2.5", {"pip": ["-e .[course]"]}], "torch>=2.5"),
        (["python=3.11", "pip", {"pip": ["-e .[course]", "torch==2.12.0"]}], "torch==2.12.0"),
    ],
)
def test_an_environment_that_goes_its_own_way_is_reported(dependencies, problem):
    project = {"requires-python": ">=3.11", "dependencies": ["torch>=2.11"], "optional-dependencies": {}}
    (found,) = environment_problems({"dependencies": dependencies}, ".", project, "torch==2.13.0")
    assert problem in found
    good = {"dependencies": ["python=3.12", "pip", "pytorch>=2.11", {"pip": ["-e ..[course]", "torch==2.13.0"]}]}
    assert environment_problems(good, "binder", project, "torch==2.13.0") == []


# ---- text


def stray(text):
    return [f"{what}: {match[0]}" for what, pattern in STRAY.items() for match in re.finditer(pattern, text)]


def test_no_file_names_a_machine_a_registry_or_an_open_end():
    contents = ((path, (ROOT / path).read_bytes()) for path in repository_files())
    texts = some(((path, raw.decode(errors="replace")) for path, raw in contents if b"\0" not in raw), "text files")
    assert [f"{path}: {problem}" for path, text in texts for problem in stray(text)] == []


@pytest.mark.parametrize("pieces", ["/wo rk/x", "('/ho me/ann/x')", "py pi.org", "TO DO:", "FIX ME"])
def test_stray_text_is_reported(pieces):
    assert stray(pieces) == []
    assert len(stray(pieces.replace(" ", ""))) == 1
    assert stray("results/root/x, https://site.example/work/of/art, todo lists") == []


# The folders and pages whose wording is checked.
WORDED = (*PACKAGES, "notebooks/src", "benchmarks", "website", "tests", "docs", "README.md", "CONTRIBUTING.md")
PRIVATE_WORDS = re.compile(r"\b(told|strangers|nobody\s+chose|anew)\b", re.I)
HEADLESS = re.compile(r"\W*What\b")  # a docstring says what to expect: "Return the peak.", not "What it takes."


def prose(path, text):
    """Return (docstrings, texts to check) of a Python source or a Markdown page.

    The texts of a source are its docstrings and comments. A page has no docstrings; its text is the page without code.

    `path`: the file's path, whose suffix gives the kind; `text`: the file's content.
    """
    if path.suffix == ".md":
        return [], [re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.M | re.S)]
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (each for each in ast.walk(ast.parse(text)) if isinstance(each, kinds))
    docstrings = [found for each in nodes if (found := ast.get_docstring(each))]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return docstrings, [*docstrings, *(each.string for each in tokens if each.type == tokenize.COMMENT)]


def wording_problems(path, text):
    """Return one line for each private word in the prose of a file (`PRIVATE_WORDS`), and for each docstring that
    begins with "What" instead of a verb.

    `path`, `text`: the file's path and content.
    """
    docstrings, texts = prose(path, text)
    words = (found[0].lower() for each in texts for found in PRIVATE_WORDS.finditer(each))
    return [f"{path}: {word!r}, see docs/words.md" for word in words] + [
        f"{path}: begin with a verb instead of: {each.splitlines()[0]}" for each in docstrings if HEADLESS.match(each)
    ]


def test_docstrings_comments_and_pages_are_plain_english():
    found = [path for path in repository_files() if path.suffix in (".py", ".md") and path != Path("docs/words.md")]
    paths = some((path for path in found if path.as_posix().startswith(WORDED)), "files with prose")
    assert [problem for path in paths for problem in wording_problems(path, (ROOT / path).read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""What a step takes."""'),
        ("a.py", 'def f():\n    """ "What" is cut."""'),
        ("a.py", "x = 1  # as it was told"),
        ("a.md", "It is made anew."),
        ("a.md", "Sizes that nobody\nchose."),
    ],
)
def test_private_words_and_docstrings_without_a_subject_are_reported(name, text):
    assert len(wording_problems(Path(name), text)) == 1
    assert wording_problems(Path("a.py"), 'told = "anew"\n') == []
    assert wording_problems(Path("a.md"), "`told` is a name.\n```\ntold = 1\n```\n") == []


def test_the_first_line_of_a_scripts_docstring_which_is_its_help_is_a_sentence():
    firsts = {
        path: ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))).splitlines()[0]
        for path in some((path for path in repository_files() if path.match("benchmarks/*.py")), "scripts")
    }
    assert {path: line for path, line in firsts.items() if not line.endswith(".")} == {}


IN_FIELD_TERMS = (*PACKAGES, "notebooks/src", "benchmarks", "tests")  # folders whose identifiers are checked
PRIVATE_NAMES = {  # pronouns and verbs in the past tense
    *("told", "said", "asked", "foretold", "foreseen", "mended", "born", "stands", "stood", "heard", "spoke"),
    *("began", "begun", "gave", "got", "went", "came", "fell", "births", "deaths", "anew", "there"),
    *("whose", "who", "theirs", "their", "ours", "mine", "yours", "they", "them", "stranger", "strangers"),
}


def introduced_name(node):
    """Return the name that a node of a Python syntax tree introduces, or None. The names of tests are sentences and
    left out.
    """
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.alias(asname=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return None if name.startswith("test_") else name


def naming_problems(path, text):
    """Return one line for each private identifier of a Python source that contains a past-tense verb or a pronoun; each
    identifier once.

    `path`, `text`: the file's path and content.
    """
    names = sorted({name for node in ast.walk(ast.parse(text)) if (name := introduced_name(node))})
    private = [name for name in names if PRIVATE_NAMES & {*name.lower().split("_")}]
    return [
        f"{path}: rename {name!r}: a noun for a value, a verb for a function, see docs/words.md" for name in private
    ]


def test_identifiers_are_standard_terms():
    found = [path for path in repository_files() if path.suffix == ".py" and path.as_posix().startswith(IN_FIELD_TERMS)]
    sources = {path: (ROOT / path).read_text("utf-8") for path in some(found, "sources")}
    assert [problem for path, text in sources.items() for problem in naming_problems(path, text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "told = 1",
        "for whose, value in {}.items(): pass",
        "def is_there(): pass",
        "def f(*, said): pass",
        "self.asked = []",
        "f(lambda theirs: 1)",
        "with f() as ways_told: pass",
        "import a as ours",
        "TOLD: int = 1",
    ],
)
def test_a_private_identifier_is_reported(text):
    assert len(naming_problems(Path("a.py"), text)) == 1
    assert naming_problems(Path("a.py"), "def test_what_is_told():\n    f(said=1)['told'] = record.asked") == []


def tree(page):
    """Return the full path of every entry in a page's file tree.

    In a line of the tree, a remark follows the names, after at least two blanks or " #".
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)
    blocks = [block for block in blocks if re.search(r"^\W*perf_helpers/", block, re.M)]
    assert len(blocks) == 1, "the page has not exactly one fenced file tree with perf_helpers/"
    paths, folders = [], []
    for line in re.sub(r"[│├└─]", " ", blocks[0]).splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        above = "".join(folder for _, folder in folders)
        names = re.split(r" {2,}| #", line.strip())[0].split(" ")
        paths += [above + name for name in names]
        if names[0].endswith("/"):
            folders.append((indent, names[0]))
    return paths


def tree_problems(page, files):
    """Return the differences between a page's file tree and the repository: files and folders at the top, modules and
    subpackages.

    In the tree, NN_slug and <x> match any name. `page`: its text; `files`: paths of the repository.
    """
    listed, problems = some(tree(page), "entries in the file tree"), []
    names = {str(path) for path in files} | {f"{parent}/" for path in files for parent in path.parents}
    for path in listed:
        pattern = re.sub(r"NN_slug|<\w+>", "[^/]+", re.escape(path))
        if not any(re.fullmatch(pattern, name) for name in names):
            problems.append(f"in the file tree, not in the repository: {path}")
    heads = {path.split("/")[0] for path in listed}
    expected = {path.parts[0] for path in files} - heads
    inside = [path for path in files if path.parts[0] in PACKAGES and len(path.parts) > 1]
    parts = {f"{path.parts[0]}/{path.parts[1]}{'/' if len(path.parts) > 2 else ''}" for path in inside}
    expected |= parts - set(listed)
    expected = {path for path in expected if not path.rstrip("/").rpartition("/")[2].startswith((".", "__"))}
    return problems + [f"in the repository, not in the file tree: {path}" for path in sorted(expected)]


def test_the_file_tree_is_true():
    assert tree_problems((ROOT / "CONTRIBUTING.md").read_text(), repository_files()) == []


def test_a_wrong_file_tree_is_reported():
    page = (
        "```\nREADME.md LICENSE  what it is\nnotebooks/NN_slug.py  x\nperf_helpers/   y\n  lab/  z\n  cli.py  z\n```\n"
    )
    names = ["README.md", "LICENSE", "notebooks/01_a.py", "perf_helpers/__init__.py", "perf_helpers/lab/lab.py"]
    files = [Path(name) for name in [*names, "perf_helpers/cli.py"]]
    assert tree_problems(page, files) == []
    for missing in ("tests", "perf_helpers/runs.py", "perf_helpers/estimate/"):
        path = Path(missing) / "a.py" if not missing.endswith(".py") else Path(missing)
        assert tree_problems(page, [*files, path]) == [f"in the repository, not in the file tree: {missing}"]
    assert tree_problems(page, files[:-1]) == ["in the file tree, not in the repository: perf_helpers/cli.py"]


# ---- pages: how long, and where their links lead

MOST_BYTES = 13_500  # of the README without the addresses of links: a newcomer reads it to its end
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)  # of an address elsewhere
LINK = re.compile(r"\]\(([^()\s]+)\)|\bsrc=\"([^\"]+)\"")
NAMED = re.compile(r"(?<![\w/.-])((?:README|CONTRIBUTING|docs/[\w-]+)\.md)(#[\w-]+)?")  # in a comment or a message


def without_code(text):
    """Return the text of a Markdown page without its code, in which link-like text is not a link."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text):
    """Return the anchors of a Markdown text: its headings, as GitHub writes them in an address."""
    found, seen = set(), {}
    for heading in re.findall(r"^#+ (.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
    return found


def link_problems(pages, files, heads=None):
    """Return the relative links that lead nowhere, one line each.

    Args:
        pages: {path: text} of the pages with the links.
        files: all paths of the repository.
        heads: {path: text} of the pages to whose headings a link may lead; None: `pages`.
    """
    heads, problems = heads or pages, []
    existing = {str(path) for path in files} | {str(parent) for path in files for parent in Path(path).parents}
    links = [(page, "".join(pair)) for page, text in pages.items() for pair in LINK.findall(without_code(text))]
    for page, link in some(((page, link) for page, link in links if not SCHEME.match(link)), "relative links"):
        target, _, anchor = link.partition("#")
        path = os.path.normpath(Path(page).parent / target) if target else str(page)
        if path not in existing:
            problems.append(f"{page}: there is no {link}")
        elif anchor and anchor not in anchors(heads.get(Path(path), "")):
            problems.append(f"{page}: {link} leads to no heading of {path}")
    return problems


def notebooks():
    """Return the paths of the lessons' notebooks; the executed ones in results/, which the site uses, are left out."""
    return some((p for p in repository_files() if p.suffix == ".ipynb" and p.parts[0] != "results"), "notebooks")


def written_pages():
    """Return {path: text} of the repository's pages, and of the prose in lessons."""
    found = {path: (ROOT / path).read_text() for path in repository_files() if path.suffix == ".md"}
    for path in notebooks():
        cells = json.loads((ROOT / path).read_text())["cells"]
        found[path] = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert {path.suffix for path in found} == {".md", ".ipynb"}
    return found


def test_every_link_of_pages_and_lessons_leads_somewhere():
    assert link_problems(written_pages(), repository_files()) == []


def test_a_link_that_leads_nowhere_is_reported():
    a, b = Path("docs/a.md"), Path("b.md")
    pages = {
        a: "## One, `two`: three\n[x](../b.md) [y](#one-two-three) `[z](gone.md)`\n```\n[z](gone.md)\n```",
        b: "# B",
    }
    assert link_problems(pages, [a, b]) == []
    for link, message in (
        ("[x](b.md)", "there is no b.md"),
        ("[x](../b.md#c)", "../b.md#c leads to no heading of b.md"),
        ("[x](#two)", "#two leads to no heading of docs/a.md"),
        ('<img src="p.png">', "there is no p.png"),
    ):
        assert link_problems(pages | {a: link}, [a, b]) == [f"docs/a.md: {message}"]
    assert anchors("# A\n## A\n```\n# B\n```") == {"a", "a-1"}


def named_problems(texts, pages):
    """Return the pages, or headings of pages, that a comment or a message names but that do not exist.

    `texts`: {place: text} of comments and messages; `pages`: {path: text} of all pages.
    """
    found = [(where, *names) for where, text in texts.items() for names in NAMED.findall(text)]
    named = some(found, "pages that are named")
    return [
        f"{where}: there is no {page}{anchor}"
        for where, page, anchor in named
        if Path(page) not in pages or (anchor and anchor[1:] not in anchors(pages[Path(page)]))
    ]


def test_pages_that_code_names_are_there():
    kinds = (".py", ".j2", ".toml", ".txt", ".yml", ".sh")
    texts = {path: (ROOT / path).read_text() for path in repository_files() if path.suffix in kinds}
    del texts[Path(__file__).relative_to(ROOT)]
    assert named_problems(texts, written_pages()) == []


def test_a_page_that_code_names_and_nobody_wrote_is_reported():
    pages = {Path("docs/a.md"): "# A", Path("README.md"): ""}
    assert named_problems({"x.py": "see docs/a.md#a, results/README.md, https://x.example/docs/b.md"}, pages) == []
    for name in ("docs/b.md", "docs/a.md#b", "README.md#a"):
        assert named_problems({"x.py": f"see {name}."}, pages) == [f"x.py: there is no {name}"]


def page_problems(readme, pages):
    """Return problems that would stop a newcomer: README is too long, or does not name a page.

    `readme`: README's text; `pages`: paths of the pages.
    """
    size = len(re.sub(r"\]\([^)]*\)", "]", readme).encode())
    long = [f"README.md has {size:,} bytes, {MOST_BYTES:,} are enough"] if size > MOST_BYTES else []
    return long + [f"README.md does not name {page}" for page in some(pages, "pages") if f"]({page})" not in readme]


def addresses(text):
    """Return the repositories (owner/name) to which a text's links to GitHub, Colab and Binder lead."""
    own = r"github\.com/([\w.-]+/[\w-]+)(?:\.git|/actions/|/issues\)|(?=[`\"]|\n|$))"
    forms = rf"{own}|(?:colab\.research\.google\.com/github|mybinder\.org/v2/gh)/([\w.-]+/[\w-]+)"
    return {one or other for one, other in re.findall(forms, text)}


def test_pages_name_one_address_of_the_repository():
    with open(ROOT / "pyproject.toml", "rb") as file:
        address = tomllib.load(file)["project"]["urls"]["Repository"]
    for page in ("README.md", "docs/running.md"):
        assert addresses((ROOT / page).read_text()) == {address.removeprefix("https://github.com/")}, page


def test_another_address_is_seen():
    for form in (
        "git clone https://github.com/me/it.git",
        "(https://github.com/me/it/issues)",
        "https://github.com/me/it/actions/workflows/tests.yml",
        "(https://colab.research.google.com/github/me/it/blob/main/notebooks/05_x.ipynb)",
        "(https://mybinder.org/v2/gh/me/it/main?urlpath=lab)",
        '`!pip install -q "it[course] @ git+https://github.com/me/it"`',
    ):
        assert addresses(form) == {"me/it"}, form
    assert addresses("[a](https://github.com/huggingface/transformers/issues/47688)") == set()


def test_the_readme_is_short_and_names_every_page():
    pages = [path for path in repository_files() if path.parts[0] == "docs" and path.parts[1] != "upstream"]
    assert page_problems((ROOT / "README.md").read_text(), pages) == []


def test_a_long_readme_and_a_page_that_it_does_not_name_are_reported():
    assert page_problems("[a](docs/a.md)", ["docs/a.md"]) == []
    assert page_problems("ä" * (MOST_BYTES // 2 + 1), ["docs/a.md"]) == [
        "README.md has 13,502 bytes, 13,500 are enough",
        "README.md does not name docs/a.md",
    ]


def changelog_problems(page):
    """Return the changelog's entries that are too long, lines that are not entries, and versions without a date.

    `page`: the changelog's text.
    """
    _, *sections = re.split(r"(?m)^## ", page)
    titles = [section.splitlines()[0] for section in some(sections, "versions")]
    problems = [f"no date: {title}" for title in titles[1:] if not re.search(r"\d{4}-\d\d-\d\d$", title)]
    for line in (line for section in sections for line in section.splitlines()[1:] if line):
        words = len(re.sub(r"\]\([^)]*\)", "]", line.removeprefix("- ")).split())
        if not line.startswith("- ") or words > 25:
            problems.append(f"{words} words: {line}")
    return problems


def test_the_changelog_is_short_and_its_versions_have_dates():
    assert changelog_problems((ROOT / "CHANGELOG.md").read_text()) == []


def test_a_long_entry_and_a_version_without_a_date_are_reported():
    good = "# Changelog\n\nHead.\n\n## Unreleased\n\n- One.\n\n## 2026-11-28\n\n- Two ([three](four.md)).\n"
    assert changelog_problems(good) == []
    long = "- " + "word " * 26
    assert changelog_problems(good + long) == [f"26 words: {long}"]
    assert changelog_problems(good + "  more\n") == ["1 words:   more"]
    assert changelog_problems(good + "## 0.2\n- Three.\n") == ["no date: 0.2"]


def word_problems(page, wanted):
    """Return problems of the glossary: rows without three cells, terms listed twice, and `wanted` terms that are
    missing.

    `page`: the glossary's text.
    """
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    words = [row[0] for row in some(rows, "words") if not row[0].startswith("**")]
    problems = [
        f"not a word, one line, other names: {line}" for line in page.splitlines() if line.count(" |") not in (0, 3)
    ]
    problems += [f"twice: {word}" for word in sorted({word for word in words if words.count(word) > 1})]
    return problems + [f"nowhere: {word}" for word in wanted if word not in page]


def test_every_word_has_one_line_and_no_verdict_category_or_profile_is_missing():
    from perf_helpers.course.ledger import Verdict
    from trainmem.core.task import PROFILES
    from trainmem.records import CATEGORIES
    from trainmem.texts import name_text

    wanted = [*map(str, Verdict), *(name_text(name) for name in CATEGORIES), *(f"`{name}`" for name in PROFILES)]
    assert word_problems((ROOT / "docs" / "words.md").read_text(), wanted) == []


def test_a_word_twice_or_missing_is_reported():
    head = "| word | here | elsewhere |\n|---|---|---|\n| run | what is kept | record |\n"
    assert word_problems(head, ["kept"]) == []
    assert word_problems(head + "| run | again | |\n", []) == ["twice: run"]
    assert word_problems(head, ["peak"]) == ["nowhere: peak"]
    assert len(word_problems(head + "| peak | the most |\n", [])) == 1


# ---- notebooks


def notebook_problems(notebook):
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    problems = [] if len(tagged) == 1 else [f"{len(tagged)} cells are tagged parameters: papermill needs one"]
    if any(cell["outputs"] or cell["execution_count"] for cell in code):
        problems.append("it has outputs")
    return problems


def test_notebooks_have_parameters_and_no_outputs():
    for path in notebooks():
        assert notebook_problems(json.loads((ROOT / path).read_text())) == [], path


def test_a_notebook_with_outputs_or_without_parameters_is_reported():
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "outputs": [], "execution_count": None}
    assert notebook_problems({"cells": [cell]}) == []
    assert notebook_problems({"cells": [cell, {**cell, "metadata": {}, "outputs": ["1"]}]}) == ["it has outputs"]
    assert len(notebook_problems({"cells": [cell, cell]})) == len(notebook_problems({"cells": []})) == 1


def test_a_check_over_nothing_fails():
    with pytest.raises(AssertionError, match="no notebooks"):
        some([], "notebooks")


def lesson_rows(readme):
    """Return {notebook: its question} from README's table of lessons."""
    return dict(re.findall(r"\(notebooks/(\w+\.ipynb)\) \| (.+?) \|", readme))


def test_the_readme_lists_every_lesson_with_its_question():
    notebooks = some(sorted((ROOT / "notebooks").glob("*.ipynb")), "notebooks")
    titles = {path.name: "".join(json.loads(path.read_text())["cells"][0]["source"]) for path in notebooks}
    wanted = {name: text.splitlines()[0].removeprefix("# ") for name, text in titles.items()}
    assert lesson_rows((ROOT / "README.md").read_text()) == wanted


def test_a_wrong_question_in_the_readme_is_seen():
    assert lesson_rows("| I | [05 x](notebooks/05_x.ipynb) | Why? |") == {"05_x.ipynb": "Why?"}


def test_the_scoreboard_and_the_recorded_figures_are_up_to_date():
    done = subprocess.run([sys.executable, "benchmarks/build.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- sizes


def test_every_part_is_within_its_budget_and_one_that_is_not_is_named(tmp_path, monkeypatch):
    assert size.problems(size.sizes()) == []
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "nouns.py").write_text("a = 1\nb = 2\n")
    found = []
    for lines, files in ((2, 1), (1, 1), (2, 0)):
        monkeypatch.setattr(size, "BUDGETS", (("room", ["room/*.py"], lines, files),))
        found += size.problems(size.sizes(tmp_path))
    assert found == ["room: 2 lines, 1 at most", "room: 1 files, 0 at most"]
    assert size.problems([("moved away", 0, 1, 0, 1)]) == ["moved away: nothing to count"]


def test_docstrings_comments_and_blank_lines_count_in_no_budget(tmp_path, monkeypatch):
    source = '"""A page.\n\nMore."""\n\n# why\na = """b\n\nc"""  # d\n\n\n'
    source += 'def f():\n    """Do."""\n    return (\n        a\n    )\n'
    assert size.code_lines(source) == 7  # the text of three lines, def, return of three
    for name in ("a.py", "a.js"):
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(size, "BUDGETS", (("code", ["*.py"], 7, 1), ("text", ["*.js"], 15, 1)))
    assert [row[1] for row in size.sizes(tmp_path)] == [7, len(source.splitlines())]


def named_tests(text):
    """Return the test files that a text names, e.g. tests/test_cli.py, and patterns of names, e.g. %_exact.py.

    In a pattern, % stands for any path in tests/ and the beginning of the name.
    """
    return re.findall(r"tests/[\w/]*test_\w+\.py|(?<=[ (])%\w*\.py", text)


def missing_tests(named, root=ROOT):
    return [name for name in named if not [*root.glob(name.replace("%", "tests/**/*"))]]


def test_tests_that_the_makefile_and_the_levels_name_are_there():
    named = some(named_tests((ROOT / "Makefile").read_text()), "tests in the Makefile")
    assert not missing_tests(named + some(levels.TESTS, "tests of the levels"))


def test_a_named_test_that_was_renamed_is_reported(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_new_name.py").touch()
    named = named_tests("T := tests/test_old.py $(filter-out %_name.py %_zero.py,$(wildcard tests/test_*.py))")
    assert named == ["tests/test_old.py", "%_name.py", "%_zero.py"]
    assert missing_tests(named, tmp_path) == ["tests/test_old.py", "%_zero.py"]
