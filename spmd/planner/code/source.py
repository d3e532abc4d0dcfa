"""Expressions in the code of a user: found by the places of operations, and marked where they run.

Nothing of the user's is written, imported or run a second time. Functions that are alive get the
code of a text in which some expressions are marked, for the time of one trace.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import copy
import gc
import linecache
import threading
import types
from typing import Any, NamedTuple, TypeAlias
import warnings

from spmd.inspection.records.names import is_library
from spmd.inspection.shardy import passes

Where: TypeAlias = tuple[int, int, int, int]
"""Line and column of a beginning, then of an end."""


class Span(NamedTuple):
    """A stretch of code that a frame is at.

    Attributes:
        file: path as Python knows it.
        line: of its beginning, from one.
        column: of its beginning, in bytes of UTF-8, from zero, as `ast` counts them.
        end_line: of its end.
        end_column: of its end.
        function: qualified name of the function that it is in.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str

    @property
    def where(self) -> Where:
        """Its beginning and end."""
        return self.line, self.column, self.end_line, self.end_column


class Expression(NamedTuple):
    """An expression whose value may be constrained.

    Attributes:
        span: where it stands.
        text: of it, as it is written.
        is_operand: whether it is what another one takes, and not the result of an operation.
        depth: how many frames of the user's are further inside.
    """

    span: Span
    text: str
    is_operand: bool
    depth: int


def users_spans(location: Any) -> list[Span]:
    """The frames of an operation that are the user's, innermost first."""
    return [
        Span(one.filename, one.start_line, one.start_col, one.end_line, one.end_col, function)
        for one, function in passes.places_of(location)
        if not is_library(one.filename)
    ]


class SourceFile:
    """A file, or a cell of a notebook, as its text says now.

    Attributes:
        text: all of it.
    """

    def __init__(self, name: str):
        linecache.checkcache(name)
        self.text = "".join(linecache.getlines(name))
        self._name = name
        self._tree = _parsed(self.text)
        self._found: dict[Where, ast.expr] = {}
        for node in ast.walk(self._tree) if self._tree else ():
            if isinstance(node, (ast.BinOp, ast.Call, ast.Subscript)):
                self._found.setdefault(_where(node), node)

    def expressions(self, span: Span, depth: int) -> Iterator[Expression]:
        """What makes a value at a frame, and what that takes; nothing where no text says it."""
        node = self._made_at(span.where)
        if node is not None:
            yield self._expression(span, node, is_operand=False, depth=depth)
            for operand in filter(_may_be_held, _operands(node)):
                yield self._expression(span, operand, is_operand=True, depth=depth)

    def _made_at(self, where: Where) -> ast.expr | None:
        """The expression of a frame; Python has calls of methods begin where their name does."""
        if where in self._found:
            return self._found[where]
        around = (one for one in self._found if one[2:] == where[2:] and one[:2] < where[:2])
        return self._found.get(max(around, default=where))

    def _expression(
        self, span: Span, node: ast.expr, *, is_operand: bool, depth: int
    ) -> Expression:
        text = ast.get_source_segment(self.text, node) or ""
        return Expression(Span(span.file, *_where(node), span.function), text, is_operand, depth)

    def codes(self, marked: Mapping[Where, int]) -> list[_Codes]:
        """The code of each function that has marked expressions, by their numbers."""
        if self._tree is None:
            return []
        tree = _Marker(marked).visit(copy.deepcopy(self._tree))
        with warnings.catch_warnings(action="ignore"):  # Python has said them once
            plain = compile(self._tree, self._name, "exec", dont_inherit=True)
            pairs = _pairs(plain, compile(tree, self._name, "exec", dont_inherit=True))
        return [one for one in pairs if one.plain != one.marked]


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text) if text else None
    except (SyntaxError, ValueError):  # a magic of a notebook, or another language
        return None


def _where(node: ast.expr) -> Where:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp():
            yield from (node.left, node.right)
        case ast.Subscript():
            yield node.value
        case ast.Call():
            if isinstance(node.func, ast.Attribute):
                yield node.func.value
            yield from node.args
            yield from (one.value for one in node.keywords if one.arg)


def _may_be_held(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return False
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp))


class _Marker(ast.NodeTransformer):
    """Puts expressions into calls of `marks.held`, which no name of the user's can hide."""

    def __init__(self, marked: Mapping[Where, int]):
        self.marked = marked

    def visit(self, node: ast.AST) -> Any:
        number = self.marked.get(_where(node)) if isinstance(node, ast.expr) else None
        node = self.generic_visit(node)
        if number is None or not isinstance(node, ast.expr):
            return node
        held = ast.parse(
            '__import__("sys").modules["spmd.planner.code.marks"].held', mode="eval"
        ).body
        call = ast.Call(held, [ast.Constant(number), node], [])
        for one in (*ast.walk(held), call.args[0], call):
            if isinstance(one, ast.expr):  # what it calls has the frame of the expression
                ast.copy_location(one, node)
        return call


# Functions that are alive


class _Codes(NamedTuple):
    """The code of a function, without marks and with them."""

    plain: types.CodeType
    marked: types.CodeType


def _pairs(plain: types.CodeType, marked: types.CodeType) -> Iterator[_Codes]:
    """All codes inside of two of the same shape."""
    inner = [[c for c in one.co_consts if isinstance(c, types.CodeType)] for one in (plain, marked)]
    for a, b in zip(*inner, strict=True):
        yield _Codes(a, b)
        yield from _pairs(a, b)


_swapping = threading.Lock()


@contextlib.contextmanager
def marked(expressions: Mapping[int, Expression]) -> Iterator[list[Expression]]:
    """Has functions mark these expressions, by their number, as long as the context lasts.

    Functions whose text has changed since they were made stay as they are; gives the expressions
    that are in them.
    """
    by_file: dict[str, dict[Where, int]] = {}
    for number, one in expressions.items():
        by_file.setdefault(one.span.file, {})[one.span.where] = number
    with _swapping:
        swaps = [*_swaps({name: SourceFile(name).codes(at) for name, at in by_file.items()})]
        names = {(codes.plain.co_filename, codes.plain.co_qualname) for _, codes in swaps}
        try:
            for function, codes in swaps:
                function.__code__ = codes.marked
            yield [one for one in expressions.values() if not names.intersection(_around(one.span))]
        finally:
            for function, codes in swaps:
                function.__code__ = codes.plain


def _around(span: Span) -> Iterator[tuple[str, str]]:
    """The functions that a frame is in, outer ones too."""
    parts = span.function.split(".<locals>.")
    return ((span.file, ".<locals>.".join(parts[: n + 1])) for n in range(len(parts)))


def _swaps(
    files: Mapping[str, Sequence[_Codes]],
) -> Iterator[tuple[types.FunctionType, _Codes]]:
    """Functions that run one of these codes."""
    known: dict[Any, list[_Codes]] = {}
    for name, found in files.items():
        for codes in found:
            known.setdefault((name, codes.plain.co_qualname), []).append(codes)
    for one in _functions():
        code = one.__code__
        same = known.get((code.co_filename, code.co_qualname), ())
        if match := next((codes for codes in same if codes.plain == code), None):
            yield one, _Codes(code, match.marked)


def _functions() -> list[types.FunctionType]:
    """All functions that the garbage collector knows, what `gc.freeze` has set apart too."""
    if not gc.get_freeze_count():
        return _functions_now()
    gc.collect()  # what is frozen again is what is there: no garbage is to be among it
    gc.unfreeze()
    try:
        return _functions_now()
    finally:
        gc.freeze()


def _functions_now() -> list[types.FunctionType]:
    """The same of what is not set apart.

    They are what refers to the builtins. A list of all objects would hold a tuple that another
    thread is making, and CPython refuses to go on with it: `tuple()` of a generator raises a
    `SystemError` there.
    """
    found = gc.get_referrers(vars(builtins))
    return [one for one in found if type(one) is types.FunctionType]


def expressions_of(locations: Iterable[Any]) -> tuple[list[Expression], list[Span]]:
    """The expressions that operations come from, each once, and the frames that no text tells.

    Of each operation all frames of the user's count: a constraint may be right in a function, or
    where it is called.
    """
    files: dict[str, SourceFile] = {}
    found: dict[Any, Expression] = {}
    missing: dict[Span, None] = {}
    for location in locations:
        for depth, span in enumerate(users_spans(location)):
            if span.file not in files:
                files[span.file] = SourceFile(span.file)
            made = [*files[span.file].expressions(span, depth)]
            if not made and depth == 0:
                missing[span] = None
            for one in made:
                key = one.span[:-1]
                found[key] = min(found.get(key, one), one, key=_nearness)
    return [*found.values()], [*missing]


def _nearness(one: Expression) -> tuple[bool, int]:
    """What counts where several operations lead to an expression: the nearest to a result."""
    return one.is_operand, one.depth
