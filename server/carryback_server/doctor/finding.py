"""What a check has found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "WARN", "FAIL", "skip"]


@dataclass(frozen=True)
class Finding:
    """One check's result, a line.

    Attributes:
        check: its name, as in docs/doctor.md.
        status: `ok`; `WARN`: it works, but not as it should; `FAIL`: something does not work; `skip`: it could
            not be checked.
        found: what was found.
        fix: what is to be changed: a setting, a flag, a variable.
    """

    check: str
    status: Status
    found: str
    fix: str = ""

    def line(self) -> str:
        """As text."""
        return f"{self.status:4}  {self.check:14}  {self.found}" + (f". Fix: {self.fix}" if self.fix else "")


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def warn(check: str, found: str, fix: str = "") -> Finding:
    """Not as it should be."""
    return Finding(check, "WARN", found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    """Something does not work."""
    return Finding(check, "FAIL", found, fix)


def skip(check: str, why: str) -> Finding:
    """Could not be checked."""
    return Finding(check, "skip", why)


def failures(findings: Iterable[Finding]) -> int:
    """How many failed."""
    return sum(each.status == "FAIL" for each in findings)


def report(findings: list[Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "object": "doctor.report",
        "ok": not failures(findings),
        "findings": [asdict(each) for each in findings],
    }
