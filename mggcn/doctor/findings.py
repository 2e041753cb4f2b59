"""Findings of `mggcn doctor`, one for each check, and how they are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: Literal["ok", "missing", "broken"]
    """missing: mggcn works without it; broken: it does not."""
    detail: str
    remedy: str = ""
    """The remedy; empty if nothing need be done."""


def guarded(name: str, probe: Callable[[], Finding]) -> Finding:
    """Return the finding of `probe`, or its error as a finding, so that one fault does not hide others."""
    try:
        return probe()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return Finding(name, "broken", said, "this check itself failed; please report it with this text")


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if something is broken, else 0: what is missing is optional."""
    return int(any(finding.state == "broken" for finding in findings))


def render(findings: Sequence[Finding]) -> str:
    """Return the findings as a table for the terminal, remedies below, and a last line that sums up."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8}{finding.name:<{width}}  {' '.join(finding.detail.split())}")
        if finding.remedy:
            margin = " " * (width + 10)
            lines += textwrap.wrap(finding.remedy, 120, initial_indent=f"{margin}-> ", subsequent_indent=f"{margin}   ",
                                   break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return "\n".join([*lines, "", _summary(findings)]) + "\n"


def _summary(findings: Sequence[Finding]) -> str:
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if broken:
        return f"{len(broken)} broken: {', '.join(broken)}"
    missing = [finding.name for finding in findings if finding.state == "missing"]
    return "mggcn works here" + (f"; optional and absent: {', '.join(missing)}" if missing else "")
