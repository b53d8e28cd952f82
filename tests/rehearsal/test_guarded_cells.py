"""Cells of lessons in a rehearsal: a statement that needs values is skipped and reported; and which lessons run on
which machine.
"""

import ast
import json
import pickle
import weakref

import pytest
import rehearse_lessons
from guarded_cells import SKIPPED, Unassigned, install, needs_values

from trainmem.unknown import NeedsValues, Unknown


class Shell:
    """A stub of IPython's shell with the attributes that guarded cells need; `run` runs the source of a cell."""

    def __init__(self):
        self.ast_transformers, self.user_ns = [], {}
        install(self)

    def run(self, source):
        tree = self.ast_transformers[0].visit(ast.parse(source))
        exec(compile(ast.fix_missing_locations(tree), "<cell>", "exec"), self.user_ns)


def test_a_statement_that_needs_values_is_skipped_and_reported_and_the_rest_runs(capsys):
    shell = Shell()
    shell.user_ns["loss"] = Unknown("no values")
    shell.run("a = 1\nb = 2 if loss < 1 else 3\nc = a + 1\nprint(c, loss)\nprint(b + 1)\nif b > 2:\n    d = 1")
    assert shell.user_ns["c"] == 2
    listed = capsys.readouterr().out.splitlines()
    assert listed == [
        f"{SKIPPED} (line 2 of this cell: no values)",
        "2 unknown",
        "unknown",
        f"{SKIPPED} (line 6 of this cell: b could not be rehearsed)",
    ]


def test_an_expression_may_assign_and_what_it_yields_is_not_held(capsys):
    shell = Shell()
    shell.user_ns |= {"Model": type("Model", (), {}), "weakly": weakref.ref}
    shell.run("print(len(text := 'abc'))\nmodel = Model()\nseen = weakly(model)\nmodel\ndel model\nprint(text, seen())")
    assert capsys.readouterr().out == "3\nabc None\n"


def test_what_was_begun_is_unknown_too():
    shell = Shell()
    shell.user_ns["loss"] = Unknown("no values")
    shell.run("seen, table = [], {}\nfor i in range(3):\n    seen.append(i)\n    table[i] = loss > i\nx = seen[0]")
    assert isinstance(shell.user_ns["seen"], Unknown) and isinstance(shell.user_ns["table"], Unknown)
    assert isinstance(shell.user_ns["x"], Unknown)


@pytest.mark.parametrize("use", ["x.mean", "x()", "x[0]", "[*x]", "len(x)", "x < 1", "bool(x)", "int(x)", "x in x"])
def test_what_could_not_be_rehearsed_cannot_be_used(use):
    with pytest.raises(NeedsValues, match="x could not"):
        eval(use, {"x": Unassigned("x could not be rehearsed")})


def test_what_could_not_be_rehearsed_travels_to_fresh_processes_as_such():
    x = pickle.loads(pickle.dumps(Unassigned("x could not be rehearsed")))
    with pytest.raises(NeedsValues):
        x["rate"]


def test_any_other_error_ends_the_cell():
    with pytest.raises(ZeroDivisionError):
        Shell().run("1 / 0")


def test_values_that_are_needed_deep_inside_are_found():
    def deep():
        try:
            raise NeedsValues("no values")
        except NeedsValues as error:
            raise RuntimeError("unexpected") from error

    with pytest.raises(RuntimeError) as caught:
        deep()
    assert isinstance(needs_values(caught.value), NeedsValues)
    assert needs_values(ValueError("other")) is None


def test_a_notebooks_statements_that_need_values_are_counted(tmp_path):
    text = [f"{SKIPPED} (line 3 of this cell: no values)\n", "something else\n"]
    cell = {"cell_type": "code", "execution_count": 7, "outputs": [{"output_type": "stream", "text": text}]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert rehearse_lessons.skipped(tmp_path / "a.ipynb") == 1 and rehearse_lessons.skipped(tmp_path / "b.ipynb") == 0


def test_the_core_rehearses_every_profile_and_two_devices():
    assert {machine.profile for machine in rehearse_lessons.MACHINES if machine.core} == {"gpu", "t4"}
    assert any(machine.card.devices == 2 and machine.core == ("17",) for machine in rehearse_lessons.MACHINES)
    assert {machine.card.capability for machine in rehearse_lessons.MACHINES} == {(7, 5), (8, 0), (9, 0)}
