"""The command line that a shell script runs, read without running anything.

Quotes, line continuations, comments, arrays, `$X`, `${X}`, `${X:-default}` and `$((arithmetic))` are followed
as a shell would. What only running can tell (`$(...)`, other expansions, variables set inside `if` or a loop)
is refused by name, but only where the command line uses it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rolemesh.placement.importers.settings import ForeignConfigError
from rolemesh.placement.importers.shell_words import Command, Piece, Word, commands

_NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"(?P<name>[A-Za-z_]\w*|\d+|[@*#?])(?:(?P<op>:?-)(?P<default>.*))?", re.DOTALL)
_ARRAY = re.compile(r"(?P<name>[A-Za-z_]\w*)\[[@*]\]")
_OPENS = ("if", "for", "while", "until", "case", "select", "function")
_CLOSES = ("fi", "done", "esac")
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip


class _UnreadableError(Exception):
    """Text that only running the script can tell."""


@dataclass
class _Variables:
    """What the script has set so far: words by name, or why they are not known. `given` ones win."""

    given: Mapping[str, str]
    known: dict[str, list[str] | str] = field(default_factory=dict)  # a str says why it cannot be read
    unset: list[str] = field(default_factory=list)

    def get(self, name: str) -> list[str] | None:
        """Words of a variable, None where the script does not set it. Raises _UnreadableError."""
        if name in self.given:
            return [self.given[name]]
        value = self.known.get(name)
        if isinstance(value, str):
            raise _UnreadableError(value)
        return value


@dataclass(frozen=True)
class CommandLine:
    """The words after the module or script, and variables that the script uses and does not set."""

    words: tuple[str, ...]
    unset: tuple[str, ...] = ()


def read_script(text: str, is_ours: re.Pattern[str], given: Mapping[str, str] | None = None) -> CommandLine:
    """The arguments of the one command that has a word matching `is_ours`; without one, all words.

    `given` sets variables by name, whatever the script says. Raises ForeignConfigError for several such
    commands, for text that is not shell, and for a word that only running could tell.
    """
    found = commands(text)
    starts = [(command, at) for command in found if (at := _start(command, is_ours)) is not None]
    if len(starts) > 1:
        lines = ", ".join(str(command.line) for command, _ in starts)
        raise ForeignConfigError(
            f"{len(starts)} commands start training (lines {lines}): keep one of them in the file"
        )
    variables, words = _Variables(given or {}), list[str]()
    depth = 0
    for command in found:
        if starts and command is starts[0][0]:
            words = _expanded(command.words[starts[0][1] + 1 :], variables)
            break
        depth = max(0, depth + _nesting(command))
        rest = _assign(command, variables, nested=depth > 0)
        if not starts:
            words += _expanded(rest, variables)
    return CommandLine(tuple(words), tuple(dict.fromkeys(variables.unset)))


def _start(command: Command, is_ours: re.Pattern[str]) -> int | None:
    return next((i for i, word in enumerate(command.words) if is_ours.search(word.source)), None)


def _nesting(command: Command) -> int:
    first = [word.source for word in command.words[:2]]
    opened = sum(word in _OPENS or word == "{" for word in first[:1]) + (first[1:] in (["{"], ["()"]))
    return opened - sum(word in (*_CLOSES, "}") for word in first[:1])


def _assign(command: Command, variables: _Variables, *, nested: bool) -> Sequence[Word]:
    """Take leading assignments into `variables`; the words after them."""
    words = list(command.words)
    while words and words[0].source in (
        "export",
        "declare",
        "local",
        "readonly",
        "then",
        "else",
        "do",
        "set",
    ):
        words = words[1:] if words[0].source != "set" else []
        while words and words[0].source.startswith("-"):
            words = words[1:]
    if len(words) > 1 and words[0].source == "for":
        variables.known[words[1].source] = f"${words[1].source} changes in a loop"
        return ()
    while words and words[0].assigns:
        word = words.pop(0)
        name, adds = word.assigns.removesuffix("+"), word.assigns.endswith("+")
        try:
            value = (
                _expanded(word.items, variables) if word.items is not None else [_text(word.value, variables)]
            )
            before = variables.get(name) or []
            if adds:
                value = [*before, *value] if word.items is not None else ["".join([*before, *value])]
            variables.known[name] = f"${name} is set inside if, a loop or a function" if nested else value
        except _UnreadableError as error:
            said = str(error)
            variables.known[name] = said if said.startswith(f"${name} ") else f"${name} is {said}"
    return words


def _expanded(words: Sequence[Word], variables: _Variables) -> list[str]:
    out: list[str] = []
    for word in words:
        try:
            out += _fields(word.pieces, variables)
        except _UnreadableError as error:
            raise ForeignConfigError(
                f"{word.source.partition('=')[0]}: {error}, which only running the script can tell: put its "
                "value in, or give the variable with --var NAME=VALUE"
            ) from None
    return out


def _fields(pieces: Sequence[Piece], variables: _Variables) -> list[str]:
    """The words that one word of the script becomes: unquoted variables are split at blanks."""
    fields: list[str] = []
    joined: str | None = None
    for piece in pieces:
        values = _values(piece, variables)
        if piece.quoted or piece.kind == "text":
            parts, glued_before, glued_after = values, True, True
        else:
            text = " ".join(values)
            parts = text.split()
            glued_before, glued_after = not text[:1].isspace(), not text[-1:].isspace()
        for i, part in enumerate(parts):
            if joined is not None and (i > 0 or not glued_before):
                fields.append(joined)
                joined = None
            joined = part if joined is None else joined + part
        if not glued_after and joined is not None:
            fields.append(joined)
            joined = None
    return [*fields, joined] if joined is not None else fields


def _text(pieces: Sequence[Piece], variables: _Variables) -> str:
    return "".join(" ".join(_values(piece, variables)) for piece in pieces)


def _values(piece: Piece, variables: _Variables) -> list[str]:
    if piece.kind == "text":
        return [piece.text]
    if piece.kind == "run":
        raise _UnreadableError(f"$({piece.text})")
    if piece.kind == "arithmetic":
        return [str(_arithmetic(piece.text, variables))]
    if array := _ARRAY.fullmatch(piece.text):
        return list(variables.get(array["name"]) or [])
    match = _EXPANSION.fullmatch(piece.text)
    if match is None:
        raise _UnreadableError(f"${{{piece.text}}}")
    name, default = match["name"], match["default"]
    value = variables.get(name)
    if value and (value[0] or match["op"] != ":-"):
        return [value[0]]
    if value is None and default is None and name in ("@", "*"):
        return []  # what the user would add to the script's own call
    if default is not None:
        return [_text(commands(f'"{default}"')[0].words[0].pieces if default else (), variables)]
    if value is not None:
        return [""] if piece.quoted else []
    variables.unset.append(name)
    return [f"${name}"]


def _arithmetic(text: str, variables: _Variables) -> int:
    def value_of(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            held = variables.get(node.id)
            if held and re.fullmatch(r"-?\d+", held[0]):
                return int(held[0])
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = value_of(node.left), value_of(node.right)
            if right or not isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
                return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value_of(node.operand)
        raise _UnreadableError(f"$(({text}))")

    plain = re.sub(r"\$\{?(\w+)\}?", lambda match: match[1], text)
    try:
        return value_of(ast.parse(plain.strip(), mode="eval").body)
    except SyntaxError:
        raise _UnreadableError(f"$(({text}))") from None
