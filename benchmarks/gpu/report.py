"""What a section finds, printed and written as it comes."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

FIGURES, LOG, ERRORS = "figures.json", "log.txt", "errors.txt"
"""Files of a run's folder."""
_MOST_SHOWN = 170
"""Characters of a line on the terminal: of a run's output only the end may come back."""


class MissingError(Exception):
    """What a section needs is not here; the text says what."""


@dataclass
class Report:
    """Figures and checks of a run.

    Attributes:
        figures: By name, in the order in which they came; numbers, in the unit that the name ends with.
        failures: Names of the checks that failed.
        not_run: Sections that lack something.
        folder: Gets the figures and the log after each line, which all processes of a run write; None for none.
        limit_s: When whatever is measured next should not begin.
    """

    figures: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    folder: Path | None = None
    limit_s: float = math.inf
    _start_s: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit_s - (time.monotonic() - self._start_s)

    def has_time(self, needed_s: float, what: str) -> bool:
        """Whether so many seconds are left; says what is left out where not."""
        if self.left() >= needed_s:
            return True
        self.say(f"left out for want of time: {what}")
        return False

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the run began; of a longer text the last one, and the log has it all."""
        passed_s = time.monotonic() - self._start_s
        if self.folder is not None:
            with (self.folder / LOG).open("a") as log:
                log.write(f"[{passed_s:6.1f}] {text}\n")
        line = text.strip().rpartition("\n")[2]
        sys.stdout.write(f"[{passed_s:6.1f}] {line[:_MOST_SHOWN]}\n")
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
        self.write()

    def check(self, name: str, is_right: bool, detail: str = "") -> None:
        """Print a check of exactness; one that fails makes the run fail."""
        if not is_right:
            self.failures.append(name)
        self.say(f"{'right' if is_right else 'WRONG'}: {name}{': ' * bool(detail)}{detail}")
        self.write()

    def write(self) -> None:
        """Write what there is so far."""
        if self.folder is not None:
            found = {"figures": self.figures, "failures": self.failures, "not_run": self.not_run}
            (self.folder / FIGURES).write_text(json.dumps(found, indent=1))

    def read(self) -> None:
        """Take what another process has written into the folder, in place of what there is."""
        if self.folder is not None and (self.folder / FIGURES).exists():
            found = json.loads((self.folder / FIGURES).read_text())
            self.figures, self.failures, self.not_run = (found[name] for name in ("figures", "failures", "not_run"))
