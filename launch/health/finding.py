"""A fact about a machine, and the report that they make."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One fact. With `problem`, `fix` says what to do; `required` problems keep a run from working, others
    are warnings.
    """

    section: str
    name: str
    value: str
    problem: str = ""
    fix: str = ""
    required: bool = False


@dataclass(frozen=True)
class Report:
    """Findings in the order they are printed."""

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> bool:
        """Whether something required doesn't work."""
        return bool(self.failures)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What keeps a run from working."""
        return tuple(f for f in self.findings if f.required and f.problem)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What a run may be slow by, or fail on later."""
        return tuple(f for f in self.findings if not f.required and f.problem)

    def text(self) -> str:
        lines: list[str] = []
        for i, f in enumerate(self.findings):
            if i == 0 or f.section != self.findings[i - 1].section:
                lines.append(f.section)
            lines.append(f"  {f.name:<22} {f.value}")
            if f.problem:
                lines.append(f"    {'BROKEN' if f.required else 'warning'}: {f.problem}")
                lines.append(f"    fix: {f.fix}")
        for what, found in (("broken", self.failures), ("warnings", self.warnings)):
            if found:
                lines.append(f"{what}: {', '.join(f'{f.section} {f.name}' for f in found)}")
        return "\n".join([*lines, *([] if self.broken else ["a run can work here"])])

    def json(self) -> str:
        return json.dumps({"broken": self.broken, "findings": [asdict(f) for f in self.findings]}, indent=1)
