"""What `${...}`, `$((...))` and braces of a script come to, for values that are known."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence

_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_MOST_POWER = 64
_BRACES = re.compile(r"\{([^{}\s]*,[^{}\s]*)\}")


class UnreadableError(Exception):
    """Text that only running the script can tell."""


def trimmed(value: str, op: str, pattern: str) -> str:
    """`${value#pattern}` (the shortest start), `##` (the longest), `%` and `%%` (an end) taken off."""
    cuts = range(len(value) + 1)
    parts = [(value[:i], value[i:]) for i in cuts]
    if op[0] == "%":
        parts = [(after, before) for before, after in reversed(parts)]
    for taken, left in reversed(parts) if len(op) == 2 else parts:
        if fnmatch.fnmatchcase(taken, pattern):
            return left
    return value


def arithmetic(text: str, get: Callable[[str], Sequence[str] | None]) -> int:
    """The value of `$((text))`; `get` gives a variable's words. Raises UnreadableError."""

    def value_of(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            held = get(node.id)
            if held and re.fullmatch(r"-?\d+", held[0]):
                return int(held[0])
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = value_of(node.left), value_of(node.right)
            divides = isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod)
            raises = isinstance(node.op, ast.Pow | ast.LShift | ast.RShift)
            if not (divides and right == 0) and not (raises and not 0 <= right <= _MOST_POWER):
                return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value_of(node.operand)
        raise UnreadableError(f"$(({text}))")

    plain = re.sub(r"\$\{?(\w+)\}?", lambda match: match[1], text)
    try:
        return value_of(ast.parse(plain.strip(), mode="eval").body)
    except SyntaxError:
        raise UnreadableError(f"$(({text}))") from None


def braced(text: str) -> list[str]:
    """`a{b,c}d` as `abd acd`, for text that is not quoted; the innermost first, all in order."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    before, after = text[: match.start()], text[match.end() :]
    return [word for part in match[1].split(",") for word in braced(f"{before}{part}{after}")]
