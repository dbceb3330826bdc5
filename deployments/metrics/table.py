"""The table of every family of metrics, as it stands in ``deployments/metrics/README.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from deployments.metrics.families import FAMILIES

HEADING = "## Every metric\n"
"""After it comes the table, to the end of the document."""


def metrics_table() -> Iterator[str]:
    """Markdown lines: the series, its kind, whose it is, labels of its own, meaning."""
    yield from ("| series | kind | of | labels | meaning |", "|---|---|---|---|---|")
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        yield f"| `{family.series}` | {family.kind} | {', '.join(family.parts)} | {labels} | {family.text} |"


def main() -> None:
    """Put the table into the document that the argument names, in place of the one that is there."""
    document = Path(sys.argv[1])
    before, heading, _ = document.read_text(encoding="utf-8").partition(HEADING)
    document.write_text("\n".join([before + heading, *metrics_table()]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
