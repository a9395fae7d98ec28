"""A shell script cut into commands and words; nothing is expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rolemesh.placement.importers.settings import ForeignConfigError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*\+?)=")
_REDIRECT = re.compile(r"(\d*|&)(<<<|<<-?|>>|>\||<|>)(&\d+|&-)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!]")


@dataclass(frozen=True)
class Piece:
    """A part of a word: `text` as it stands, or what is inside of a `variable`, `arithmetic` or `run`."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """A word: its text in the script and its pieces.

    `assigns` is the name that it sets as a command's first word (`X`, or `X+` for `X+=`), `value` the pieces
    of what it is set to, `items` the words of an array.
    """

    source: str
    pieces: tuple[Piece, ...]
    items: tuple[Word, ...] | None = None

    @property
    def assigns(self) -> str:
        """The variable's name, empty where it sets none."""
        match = _ASSIGNMENT.match(self.source)
        return match[1] if match else ""

    @property
    def value(self) -> tuple[Piece, ...]:
        """The pieces after the equals sign."""
        first = self.pieces[0]
        rest = Piece("text", first.text[len(self.assigns) + 1 :], first.quoted)
        return ((rest,) if rest.text else ()) + self.pieces[1:]


@dataclass(frozen=True)
class Command:
    """The words of a command, and the line where it starts; `guarded`: it stands behind `&&` or `||`."""

    words: tuple[Word, ...]
    line: int
    guarded: bool = False


def commands(text: str) -> list[Command]:
    """The commands of a script in order. Raises ForeignConfigError for a quote or bracket without its end."""
    return _Reader(text).script()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = re.sub(r"\\[ \t]*\r?\n", lambda _: " \x00", text.replace("\x00", "")), 0
        self.text = self.text.replace("\r\n", "\n")

    def script(self) -> list[Command]:
        found: list[Command] = []
        words: list[Word] = []
        ends: list[str] = []  # of here-documents that start at the next line
        line, guarded = 1, False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\x00":
                self.at += 1
            elif char == "#":
                self.at = self._find("\n")
            elif redirect := _REDIRECT.match(self.text, self.at):
                self._redirect(redirect, ends)
            elif self.text.startswith("((", self.at) and not words:  # as `let`
                inside = self._balanced("(", ")")[1:-1]
                found.append(Command((Word("let", ()), Word(inside, ())), line, guarded))
            elif char in "\n;&|()":
                chain = self.text[self.at : self.at + 2] in ("&&", "||")
                self.at += 1 + chain
                if words:
                    found.append(Command(tuple(words), line, guarded))
                    words = []
                    guarded = False
                guarded = chain or (guarded and char in "\n(")
                if char == "\n":
                    for end in ends:
                        self._skip_here(end)
                    ends.clear()
            else:
                if not words:
                    line = 1 + self.text[: self.at].count("\n") + self.text[: self.at].count("\x00")
                words.append(self._word())
        return [*found, Command(tuple(words), line, guarded)] if words else found

    def _redirect(self, match: re.Match[str], ends: list[str]) -> None:
        self.at = match.end()
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if match[3] or self.at >= len(self.text):
            return
        if self.text[self.at] == "(":  # process substitution
            self._balanced("(", ")")
            return
        target = self._word()
        if match[2].startswith("<<") and match[2] != "<<<":
            ends.append("".join(piece.text for piece in target.pieces))

    def _skip_here(self, end: str) -> None:
        match = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
        if match is None:
            raise ForeignConfigError(f"not readable as a shell script: no end of the text up to {end!r}")
        self.at = match.end()

    def _word(self) -> Word:
        start, pieces = self.at, list[Piece]()
        items: tuple[Word, ...] | None = None
        while self.at < len(self.text) and (char := self.text[self.at]) not in " \t\n\x00;&|<>)":
            if char == "(":
                if not self.text[start : self.at].endswith("="):
                    break
                items = self._array()
            elif char == "'":
                end = self._find("'", self.at + 1, must=True)
                pieces.append(Piece("text", self.text[self.at + 1 : end].replace(" \x00", "\\\n"), True))
                self.at = end + 1
            elif char == '"':
                pieces += self._double()
            elif char == "\\":
                pieces.append(Piece("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char == "$" and self.text.startswith("$'", self.at):
                pieces.append(self._ansi())
            elif char in "$`":
                pieces.append(self._dollar(quoted=False))
            else:
                pieces.append(Piece("text", char, False))
                self.at += 1
        if self.at == start:  # a bracket that opens a group
            self.at += 1
        return Word(self.text[start : self.at].replace("\x00", ""), _merged(pieces), items)

    def _array(self) -> tuple[Word, ...]:
        self.at += 1
        words: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            if char in " \t\n\x00":
                self.at += 1
            elif char == "#":
                self.at = self._find("\n")
            else:
                words.append(self._word())
        self.at += 1
        return tuple(words)

    def _double(self) -> list[Piece]:
        self.at += 1
        pieces = list[Piece]()
        while self.at < len(self.text) and (char := self.text[self.at]) != '"':
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "$", "`", "\\"):
                pieces.append(Piece("text", self.text[self.at + 1], True))
                self.at += 2
            elif char in "$`":
                pieces.append(self._dollar(quoted=True))
            elif self.text.startswith(" \x00", self.at):  # a line that goes on
                self.at += 2
            else:
                pieces.append(Piece("text", char, True))
                self.at += 1
        if self.at >= len(self.text):
            raise ForeignConfigError('not readable as a command line: a " has no end')
        self.at += 1
        return pieces or [Piece("text", "", True)]

    def _ansi(self) -> Piece:
        """`$'a\\tb'`."""
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise ForeignConfigError("not readable as a command line: a $' has no end")
        self.at = match.end()
        return Piece("text", re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), match[1]), True)

    def _dollar(self, *, quoted: bool) -> Piece:
        if self.text[self.at] == "`":
            end = self._find("`", self.at + 1, must=True)
            inside, self.at = self.text[self.at + 1 : end], end + 1
            return Piece("run", inside, quoted)
        self.at += 1
        if self.text.startswith("((", self.at):
            return Piece("arithmetic", self._balanced("(", ")")[1:-1], quoted)
        if self.text.startswith("(", self.at):
            return Piece("run", self._balanced("(", ")"), quoted)
        if self.text.startswith("{", self.at):
            return Piece("variable", self._balanced("{", "}"), quoted)
        match = _VARIABLE.match(self.text, self.at)
        if match is None:
            return Piece("text", "$", quoted)
        self.at = match.end()
        return Piece("variable", match[0], quoted)

    def _balanced(self, opens: str, closes: str) -> str:
        """What stands between brackets; the position goes behind them."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            depth += (char == opens) - (char == closes)
            self.at += 1
            if depth == 0:
                return self.text[start + 1 : self.at - 1]
        raise ForeignConfigError(f"not readable as a command line: a {opens} has no end")

    def _find(self, what: str, start: int | None = None, *, must: bool = False) -> int:
        at = self.text.find(what, self.at if start is None else start)
        if at < 0 and must:
            raise ForeignConfigError(f"not readable as a command line: a {what} has no end")
        return len(self.text) if at < 0 else at


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbouring texts of the same quoting as one."""
    out: list[Piece] = []
    for piece in pieces:
        if out and piece.kind == out[-1].kind == "text" and piece.quoted == out[-1].quoted:
            out[-1] = Piece("text", out[-1].text + piece.text, piece.quoted)
        else:
            out.append(piece)
    return tuple(out)
