"""Guard the cells of a lesson in a rehearsal: a statement that needs values is skipped and reported; others run."""

import ast
import contextlib
from collections.abc import Iterator

from trainmem.unknown import NeedsValues, Unknown

SKIPPED = "cannot be rehearsed: needs values"  # how the line that reports a skipped statement begins
_ADDING = {"append", "extend", "insert", "add", "update", "setdefault"}
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


class _NoAttributeKnown(NeedsValues, AttributeError):
    """A NeedsValues that is an AttributeError too, so that `hasattr`, and `getattr` with a default, find no attribute
    instead of failing.
    """


class Unassigned(Unknown):
    """The value that a skipped statement would have assigned: unknown, and perhaps not even a number."""

    __slots__ = ()

    def __getattr__(self, name: str):
        raise _NoAttributeKnown(self.why)

    __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __enter__ = __exit__ = Unknown._refuse


class Guard(ast.NodeTransformer):
    """Put each statement of a cell into a `with __rehearsed__` block (see `install`). The block skips a statement that
    needs a tensor's values, which a rehearsal does not have.
    """

    def visit_Module(self, module: ast.Module) -> ast.Module:
        module.body = [part for node in module.body for part in _guarded(node)]
        return module


def _guarded(node: ast.stmt) -> list[ast.stmt]:
    if isinstance(node, _DEFINITIONS):
        return [node]
    if not isinstance(node, ast.Expr):
        (guard,) = ast.parse(f"with __rehearsed__({node.lineno}, {_changed(node)!r}): ...").body
        guard.body = [node]
        return [guard]
    # An expression has to follow, for a cell displays its last one; what it shows is not held.
    source = f"with __rehearsed__({node.lineno}, []) as __shown__: __shown__.append(0)\n__shown__.pop()"
    guard, shown = ast.parse(source).body
    guard.body[0].value.args = [node.value]
    return [guard, shown]


def _changed(statement: ast.stmt) -> list[str]:
    """Return the names of variables that a statement assigns or changes, e.g. by `x[0] = 1`, `x.y = 1`, `x.append(1)`.

    If the statement fails halfway, some of them have new values already. All of them then become `Unassigned`.
    """
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
            node = node.func
        elif not isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        while isinstance(node, ast.Subscript | ast.Attribute | ast.Starred):
            node = node.value
        if isinstance(node, ast.Name):
            names.add(node.id)
    return sorted(names)


def needs_values(error: BaseException | None) -> NeedsValues | None:
    """Return the `NeedsValues` that caused an error, or None if another error did."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, NeedsValues):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def install(shell) -> None:
    """Make an IPython shell skip, in every cell from now on, the statements that need a tensor's values.

    For a skipped statement the shell prints a line with the reason. Variables that the statement would have assigned
    become `Unassigned`.
    """

    @contextlib.contextmanager
    def rehearsed(line: int, names: list[str]) -> Iterator[list]:
        try:
            yield [None]
        except Exception as error:
            if (reason := needs_values(error)) is None:
                raise
            print(f"{SKIPPED} (line {line} of this cell: {reason})")
            shell.user_ns.update((name, Unassigned(f"{name} could not be rehearsed")) for name in names)

    shell.ast_transformers.append(Guard())
    shell.user_ns["__rehearsed__"] = rehearsed
