"""The rows of a benchmark as a picture: needs the extra ``bench`` (matplotlib)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from cluster.bench.report import Report
from cluster.bench.summary import Row
from specdec.errors import InvalidParameterError

_WIDTH = 0.8
_CHARACTERS_PER_PANEL = 90


def check_plot(path: str | None, flag: str = "plot") -> None:
    """Say before anything is measured whether a plot can be drawn; ``flag`` asked for it.

    Raises:
        InvalidParameterError: There is no matplotlib, or the file is not to be a PNG.
    """
    if path is None:
        return
    if Path(path).suffix.lower() != ".png":
        raise InvalidParameterError(flag, f"{flag}: {path} must end in .png")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        message = f"{flag}: needs matplotlib, which the extra 'bench' brings: pip install 'specdec[bench]'"
        raise InvalidParameterError(flag, message) from None


def draw(report: Report, path: str) -> None:
    """Write a PNG: a panel per prompts and temperature, bars of tokens/s by mode, the limit as a line over each.

    Above them stands what the figures were made with: machine, models, versions, command.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, float], list[Row]] = {}
    for row in report.rows:
        panels.setdefault((row.prompts, row.temperature), []).append(row)
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, ((prompts, temperature), rows) in zip(axes, panels.items(), strict=True):
        _panel(axis, rows)
        axis.set_title(f"{prompts}, temperature {temperature:g}")
        axis.set_xlabel("streams")
        axis.set_ylabel("decoding tokens/s")
    axes[0].legend(fontsize="small")
    environment = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    models = (f"{role}: {shape}" for role, shape in environment.models.items())
    notes = [*environment.stand_ins, environment.machine, *models, versions, environment.command]
    width = _CHARACTERS_PER_PANEL * len(panels)
    figure.suptitle("\n".join(line for note in notes for line in textwrap.wrap(note, width)), fontsize="x-small")
    figure.savefig(path, dpi=120)


def _panel(axis: Any, rows: list[Row]) -> None:
    streams = sorted({row.num_streams for row in rows})
    modes = list(dict.fromkeys(row.mode for row in rows))
    width = _WIDTH / len(modes)
    for i, mode in enumerate(modes):
        own = [row for row in rows if row.mode == mode]
        places = [streams.index(row.num_streams) + (i - (len(modes) - 1) / 2) * width for row in own]
        axis.bar(places, [row.decode_tokens_per_s for row in own], width, label=mode)
        limits = [(place, row.limit.tokens_per_s) for place, row in zip(places, own, strict=True) if row.limit]
        for place, limit in limits:
            axis.hlines(limit, place - width / 2, place + width / 2, colors="black")
    axis.set_xticks(range(len(streams)), [str(count) for count in streams])
