"""A notebook in a rehearsal: a statement that needs values is left out, told, and everything else runs."""

import ast

from perf_helpers.unknown import NeedsValues, Unknown

TOLD = "cannot be rehearsed: needs values"
_ADDING = {"append", "extend", "insert", "add", "update", "setdefault"}


class _NoAttributeKnown(NeedsValues, AttributeError):
    """Both, so that whoever only asks whether there is such an attribute hears no."""


class Unassigned(Unknown):
    """What a statement would have assigned that could not be rehearsed: unknown, and maybe not even a number."""

    __slots__ = ()

    def __getattr__(self, name: str):
        raise _NoAttributeKnown(self.why)

    __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __enter__ = __exit__ = Unknown._refuse


class Guard(ast.NodeTransformer):
    """Puts each statement of a cell into a `try` that a `NeedsValues` ends."""

    def visit_Module(self, module: ast.Module) -> ast.Module:
        module.body = [self._guarded(node) for node in module.body]
        return module

    def _guarded(self, node: ast.stmt) -> ast.stmt:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.AsyncFunctionDef):
            return node
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Await):
            # Stays an expression, for the last one of a cell is displayed.
            call = ast.Call(
                ast.Name("__rehearsed__", ast.Load()),
                [ast.Lambda(ast.arguments([], [], None, [], [], None, []), node.value), ast.Constant(node.lineno)],
                [],
            )
            return ast.copy_location(ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node)), node)
        told = ast.parse(f"__not_rehearsed__(__error__, {node.lineno}, {_changed(node)!r}, globals())").body
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "__error__", told)
        guarded = ast.Try([node], [handler], [], [])
        for part in ast.walk(handler):
            ast.copy_location(part, node)
        return ast.fix_missing_locations(ast.copy_location(guarded, node))


def _changed(statement: ast.stmt) -> list[str]:
    """The names that a statement assigns, or whose parts it does: which of it was done when it ended is not known."""
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
    """The `NeedsValues` that is the reason of an error, if one is."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, NeedsValues):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def install(shell=None) -> None:
    """Guard the cells of this kernel."""
    if shell is None:
        from IPython import get_ipython

        shell = get_ipython()

    def tell(error: Exception, line: int) -> None:
        if (reason := needs_values(error)) is None:
            raise error
        print(f"{TOLD} (line {line} of this cell: {reason})")

    def not_rehearsed(error, line, names, scope):
        tell(error, line)
        for name in names:
            scope[name] = Unassigned(f"{name} could not be rehearsed")

    def rehearsed(evaluate, line):
        try:
            return evaluate()
        except Exception as error:
            tell(error, line)

    shell.ast_transformers.append(Guard())
    shell.user_ns |= {"__rehearsed__": rehearsed, "__not_rehearsed__": not_rehearsed}
