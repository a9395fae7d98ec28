"""What a check found: one table, from which every problem can be read at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rolemesh.engine.loggers.secrets import hide
from rolemesh.launch.checkpoint_rules import Resume
from rolemesh.placement.plan import PlacementPlan

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Row:
    """One finding about `area`, such as data or placement."""

    area: str
    state: State
    text: str


@dataclass
class CheckReport:
    """Findings, in order; the run can start when none of them is a problem."""

    rows: list[Row] = field(default_factory=list)
    plan: PlacementPlan | None = None
    resume: Resume = field(default_factory=Resume)

    def fine(self, area: str, texts: Iterable[str]) -> None:
        """Facts."""
        self.rows += [Row(area, "ok", text) for text in texts]

    def note(self, area: str, texts: Iterable[str]) -> None:
        """What a person should know, and may leave."""
        self.rows += [Row(area, "note", text) for text in texts]

    def problem(self, area: str, texts: Iterable[str]) -> None:
        """What keeps the run from starting."""
        self.rows += [Row(area, "problem", text) for text in texts]

    @property
    def lines(self) -> list[str]:
        return self._texts("ok")

    @property
    def notes(self) -> list[str]:
        return self._texts("note")

    @property
    def problems(self) -> list[str]:
        return self._texts("problem")

    def text(self) -> str:
        """The table, an area's rows together, and the verdict on the last line; secrets are masked."""
        areas = list(dict.fromkeys(row.area for row in self.rows))
        ordered = sorted(self.rows, key=lambda row: areas.index(row.area))
        width = max(map(len, areas), default=0)
        lines, before = [], ""
        for row in ordered:
            said = "" if row.state == "ok" else f"{row.state}: "
            text = row.text.removeprefix(f"{row.area}: ")
            first, *more = f"{said}{text}".splitlines() or [""]
            lines.append(f"{'' if row.area == before else row.area:<{width}}  {first}".rstrip())
            lines += [f"{'':<{width}}  {line}".rstrip() for line in more]
            before = row.area
        n_problems = len(self.problems)
        lines.append(f"{n_problems} problem{'s' * (n_problems > 1)}" if n_problems else "ok")
        return hide("\n".join(lines))

    def _texts(self, state: State) -> list[str]:
        return [row.text for row in self.rows if row.state == state]
