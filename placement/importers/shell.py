"""The command line that a shell script runs, read without running anything.

Quotes, line continuations, comments, arrays, braces, `$X`, `${X}`, `${X:-default}`, `${X##*/}`,
`$((arithmetic))`, a function and its one call, and commands kept in a variable are followed as a shell would.
What only running can tell (`$(...)`, other expansions, variables set on a condition) is refused by name, but
only where the command line uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolemesh.placement.importers.settings import ForeignConfigError
from rolemesh.placement.importers.shell_values import UnreadableError, arithmetic, braced, trimmed
from rolemesh.placement.importers.shell_words import Command, Piece, Word, commands

_NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d+|[@*#?])(?:\[(?P<at>\d+)\])?(?:(?P<op>:?[-=+?]|##?|%%?)(?P<rest>.*))?",
    re.DOTALL,
)
_ARRAY = re.compile(r"(?P<name>[A-Za-z_]\w*)\[(?P<how>[@*])\]")
_BY_INDEX = re.compile(r"([A-Za-z_]\w*)\[[^]]*\]\+?=")
_SETS = ("read", "mapfile", "readarray", "let", "printf", "getopts")  # commands that set variables they name
_SEQUENCE = re.compile(r"\{[^{}\s]*\.\.[^{}\s]*\}")
_BEFORE_ASSIGNMENTS = ("export", "declare", "typeset", "local", "readonly", "then", "else", "do")
_OPENS = ("if", "for", "while", "until", "case", "select", "function")
_CLOSES = ("fi", "done", "esac")
_SETTING = re.compile(r"(--[A-Za-z]|[+~]*[A-Za-z_]\w*(\.\w+)+\+?=)")  # no command starts like this


@dataclass
class _Variables:
    """What the script has set so far: words by name, or why they are not known. `given` ones win."""

    given: Mapping[str, str]
    known: dict[str, list[str] | str] = field(default_factory=dict)  # a str says why it cannot be read
    unset: list[str] = field(default_factory=list)

    def get(self, name: str) -> list[str] | None:
        """Words of a variable, None where the script does not set it. Raises UnreadableError."""
        if name in self.given:
            return [self.given[name]]
        value = self.known.get(name)
        if isinstance(value, str):
            raise UnreadableError(value)
        return value

    def take_arguments(self, words: Sequence[str]) -> None:
        """`$@`, `$1` and so on are these from now on."""
        for name in [name for name in self.known if name.isdigit()]:
            del self.known[name]
        self.known["@"] = self.known["*"] = list(words)
        self.known |= {str(i): [word] for i, word in enumerate(words, 1)}


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
    if starts:
        _check_nothing_is_cut_off(found)
    variables, words = _Variables(given or {}), list[str]()
    depth, function = 0, ""
    before: Command | None = None
    for number, command in enumerate(found):
        if depth == 0:
            function = _function(command, before) or function
        if starts and command is starts[0][0]:
            if depth and function:
                _call(function, found[number + 1 :], variables)
            words = _expanded(command.words[starts[0][1] + 1 :], variables)
            break
        depth = max(0, depth + _nesting(command))
        function = function if depth else ""
        rest, before = _assign(command, variables, nested=depth > 0), command
        if not starts:
            said = _expanded(rest, variables)
            if (inner := _command_in(said, is_ours)) is not None:
                line = (
                    read_script(inner, is_ours, given)
                    if isinstance(inner, str)
                    else CommandLine(tuple(inner))
                )
                return CommandLine(line.words, tuple(dict.fromkeys([*variables.unset, *line.unset])))
            words += said
    return CommandLine(tuple(words), tuple(dict.fromkeys(variables.unset)))


def _check_nothing_is_cut_off(found: Sequence[Command]) -> None:
    """Raise ForeignConfigError for a setting that a shell would run as a command of its own."""
    for command in found:
        source = command.words[0].source
        if _SETTING.match(source):
            raise ForeignConfigError(
                f"line {command.line}: {source} is no part of a command: a comment, or a line without a "
                "backslash at its end, ends the one before; mend that"
            )


def _function(command: Command, before: Command | None) -> str:
    """The name of the function whose body begins with this command, empty where none does."""
    sources = [word.source for word in command.words[:2]]
    if sources[0] == "function" and len(sources) > 1:
        return sources[1]
    opens = sources[0] == "{" and before is not None and len(before.words) == 1
    return before.words[0].source if opens and before is not None else ""


def _start(command: Command, is_ours: re.Pattern[str]) -> int | None:
    words = enumerate(command.words)
    return next((i for i, word in words if not word.assigns and is_ours.search(word.source)), None)


def _command_in(words: Sequence[str], is_ours: re.Pattern[str]) -> str | Sequence[str] | None:
    """Arguments of a command that came out of variables (`$CMD a=1`), or text for another shell; or None."""
    if words and words[0] == "eval" and any(is_ours.search(word) for word in " ".join(words).split()):
        return " ".join(words[1:])
    at = next(
        (i for i, word in enumerate(words) if is_ours.search(word) and not re.search(r"\s", word)), None
    )
    if at is not None:
        return words[at + 1 :]
    return next((text for text in words if any(is_ours.search(word) for word in text.split())), None)


def _call(function: str, later: Sequence[Command], variables: _Variables) -> None:
    """Set the arguments of the one call of `function`, in whose body the command line is."""
    calls = [command for command in later if command.words[0].source == function]
    if len(calls) > 1:
        lines = ", ".join(str(command.line) for command in calls)
        raise ForeignConfigError(
            f"{function} is called {len(calls)} times (lines {lines}): keep one of the calls"
        )
    if not calls:
        return
    depth = 1
    for command in later[: later.index(calls[0])]:
        depth = max(0, depth + _nesting(command))
        _assign(command, variables, nested=depth > 0)
    variables.take_arguments(_expanded(calls[0].words[1:], variables))


def _nesting(command: Command) -> int:
    first = [word.source for word in command.words[:2]]
    opened = sum(word in _OPENS or word == "{" for word in first[:1]) + (first[1:] in (["{"], ["()"]))
    return opened - sum(word in (*_CLOSES, "}") for word in first[:1])


def _assign(command: Command, variables: _Variables, *, nested: bool) -> Sequence[Word]:
    """Take leading assignments into `variables`; the words after them."""
    words = list(command.words)
    unsure = "inside if, a loop or a function" if nested else "behind && or ||" if command.guarded else ""
    while words and words[0].source in _BEFORE_ASSIGNMENTS:
        words = words[1:]
        while words and words[0].source.startswith("-"):
            words = words[1:]
    if words and (words[0].source in _SETS or words[0].source in ("for", "set", "shift", "unset", ":")):
        _run_builtin(words[0].source, words[1:], variables)
        return ()
    while words and (words[0].assigns or _BY_INDEX.match(words[0].source)):
        word = words.pop(0)
        if by_index := _BY_INDEX.match(word.source):
            variables.known[by_index[1]] = f"${by_index[1]} is set by its index"
            continue
        name, adds = word.assigns.removesuffix("+"), word.assigns.endswith("+")
        try:
            if any(item.source.startswith("[") for item in word.items or ()):
                raise UnreadableError("an array with keys")
            value = (
                _expanded(word.items, variables) if word.items is not None else [_text(word.value, variables)]
            )
            before = variables.get(name) or []
            if adds:
                value = [*before, *value] if word.items is not None else ["".join([*before, *value])]
            variables.known[name] = f"${name} is set {unsure}" if unsure else value
        except UnreadableError as error:
            said = str(error)
            variables.known[name] = said if said.startswith(f"${name} ") else f"${name} is {said}"
    return words


def _run_builtin(name: str, words: Sequence[Word], variables: _Variables) -> None:
    """A command of the shell that sets variables, as far as it can be told."""
    sources = [word.source for word in words]
    if name == "for" and words:
        variables.known[sources[0]] = f"${sources[0]} changes in a loop"
    elif name == "set" and "--" in sources:
        variables.take_arguments(_expanded(words[sources.index("--") + 1 :], variables))
    elif name == "shift":
        variables.take_arguments((variables.get("@") or [])[1:])
    elif name == "unset":
        for source in sources:
            variables.known.pop(source, None)
    elif name == ":":
        for word in words:
            with contextlib.suppress(UnreadableError):
                _fields(word.pieces, variables)
    elif name in _SETS:
        told = sources[sources.index("-v") + 1 :][:1] if name == "printf" and "-v" in sources else sources
        for source in told if name != "printf" or "-v" in sources else ():
            for changed in re.findall(r"^[A-Za-z_]\w*$|[A-Za-z_]\w*(?=\s*[-+*/%]?=[^=]|\+\+|--)", source):
                variables.known[changed] = f"${changed} is set by {name}"


def _expanded(words: Sequence[Word], variables: _Variables) -> list[str]:
    out: list[str] = []
    for word in words:
        try:
            for pieces in _braces(word.pieces):
                out += _fields(pieces, variables)
        except UnreadableError as error:
            raise ForeignConfigError(
                f"{word.source.partition('=')[0]}: {error}, which only running the script can tell: put its "
                "value in, or give the variable with --var NAME=VALUE"
            ) from None
    return out


def _braces(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The words that `a{b,c}` is. Raises UnreadableError for braces around variables, and `{1..3}`."""
    bare = "".join(piece.text if piece.kind == "text" and not piece.quoted else "$" for piece in pieces)
    if braced(bare) == [bare] and not _SEQUENCE.search(bare):
        return [tuple(pieces)]
    choices = [
        [Piece("text", text, False) for text in braced(piece.text)]
        if piece.kind == "text" and not piece.quoted
        else [piece]
        for piece in pieces
    ]
    found = list(itertools.product(*choices))
    if len(found) != len(braced(bare)) or _SEQUENCE.search(bare):
        raise UnreadableError("braces around more than plain words")
    return found


def _fields(pieces: Sequence[Piece], variables: _Variables) -> list[str]:
    """The words that one word of the script becomes: unquoted variables are split at blanks."""
    fields: list[str] = []
    joined: str | None = None
    for piece in pieces:
        values = _values(piece, variables)
        if piece.quoted or piece.kind == "text" or _is_quoted_default(piece):
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
        raise UnreadableError(f"$({piece.text})")
    if piece.kind == "arithmetic":
        return [str(arithmetic(piece.text, variables.get))]
    array, match = _ARRAY.fullmatch(piece.text), _EXPANSION.fullmatch(piece.text)
    if array or (match and match["name"] in ("@", "*") and not match["op"]):
        name, how = (array["name"], array["how"]) if array else (piece.text, piece.text)
        held = list(variables.get(name) or [])  # of "$@": what the user would add to the script's own call
        return [" ".join(held)] if how == "*" and piece.quoted else held
    if match is None:
        raise UnreadableError(f"${{{piece.text}}}")
    return _one_value(match, piece, variables)


def _one_value(match: re.Match[str], piece: Piece, variables: _Variables) -> list[str]:
    """What `${name}`, `${name:-rest}` and the like are."""
    name, op, rest = match["name"], match["op"] or "", match["rest"] or ""
    words = variables.get(name)
    at = int(match["at"] or 0)
    value = None if words is None else words[at] if at < len(words) else "" if at == 0 else None
    is_set = value is not None and (value != "" or not op.startswith(":"))
    kind = op.removeprefix(":")
    if kind == "+":
        return [_rest(rest, piece, variables) if is_set else ""]
    if is_set or (value is not None and kind not in ("-", "=")):
        assert value is not None
        if kind[:1] in ("#", "%") and kind:
            return [trimmed(value, kind, _rest(rest, piece, variables))]
        if value == "" and kind == "?":
            raise UnreadableError(f"${{{piece.text}}}")
        return [value] if value or piece.quoted else []
    if kind in ("-", "="):
        default = _rest(rest, piece, variables)
        if kind == "=":
            variables.known[name] = [default]
        return [default]
    if op:
        raise UnreadableError(f"${{{piece.text}}}")
    variables.unset.append(name)
    return [f"${name}"]


def _is_quoted_default(piece: Piece) -> bool:
    match = _EXPANSION.fullmatch(piece.text) if piece.kind == "variable" else None
    rest = (match["rest"] or "") if match else ""
    return len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "\"'"


def _rest(rest: str, piece: Piece, variables: _Variables) -> str:
    """The text of a default or a pattern, its own quotes taken off."""
    if not rest:
        return ""
    if _is_quoted_default(piece) and (rest[0] == '"' or not piece.quoted):
        if rest[0] == "'":
            return rest[1:-1]
        rest = rest[1:-1]
    plain = re.sub(r'(?<!\\)"', "", rest)
    return _text(commands(f'"{plain}"')[0].words[0].pieces, variables) if plain else ""
