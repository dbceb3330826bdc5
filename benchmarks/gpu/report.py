"""What a section finds, printed as it comes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field


class MissingError(Exception):
    """What a section needs is not here; the text says what."""


@dataclass
class Report:
    """Figures and checks of a run.

    Attributes:
        figures: By name, in the order in which they came; numbers, in the unit that the name ends with.
        failures: Names of the checks that failed.
    """

    figures: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _start_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the run began."""
        sys.stdout.write(f"[{time.monotonic() - self._start_s:6.1f}] {text}\n")
        sys.stdout.flush()

    def figure(
        self,
        name: str,
        value: float,
        *,
        over: float | None = None,
        most: float | None = None,
        least: float | None = None,
    ) -> None:
        """Print and keep a figure.

        Args:
            name: Ends with the unit.
            value: As measured.
            over: The least that it could be; the ratio is printed too.
            most: The most that the ratio, or the value where there is none, should be. Missing it fails nothing.
            least: The least that it should be.
        """
        self.figures[name] = value
        text, judged = f"{name} {value:.4g}", value
        if over is not None:
            judged = value / over
            self.figures[f"{name}_over_least"] = judged
            text += f", {judged:.2f} of the least {over:.4g}"
        if most is not None:
            text += f" (aim {most:g}: {'met' if judged <= most else 'missed'})"
        if least is not None:
            text += f" (aim at least {least:g}: {'met' if judged >= least else 'missed'})"
        self.say(text)

    def check(self, name: str, is_right: bool, detail: str = "") -> None:
        """Print a check of exactness; one that fails makes the run fail."""
        if not is_right:
            self.failures.append(name)
        self.say(f"{'right' if is_right else 'WRONG'}: {name}{': ' * bool(detail)}{detail}")
