"""The first rounds of one stream as a picture: needs the extra ``bench`` (matplotlib)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.bench.plot import check_plot
from cluster.bench.trace import Hop, TracedRun, hops
from specdec.engine.trace import VerifiedRow
from specdec.errors import InvalidParameterError

_ROUNDS = 12
_STEPS_SHOWN = 10
"""Width of the picture, in target steps: modes are compared over the same time."""
_MOST_PANELS = 4
_TARGET, _DRAFT = (0.0, 0.32), (0.95, 0.5)
"""Lower end and height of each row."""
_CHAIN_SHARE = 0.4
"""Of a draft step's bar, what the chain takes; the rest is for branches."""
_COLORS = {"ahead": "#4c9f70", "miss": "#d9822b", "made after": "#7a6fb0", "no draft": "#9a9a9a"}
_MEANINGS = {
    "ahead": "target step; its draft was there before the step before ended",
    "miss": "target step; none of the drafts that were there fitted",
    "made after": "target step; its draft was made after the step before",
    "no draft": "target step without a draft",
}
_CHAIN, _BRANCHES, _OFFER, _VERDICT = "#2b6cb0", "#a8c8ec", "#2b6cb0", "#b03a48"
_LEAST_GAP_MS = 0.2
_READING = (
    "ms.   Above a target step: draft tokens accepted; on it: tokens gained; below: ms since the target's last step"
)
_ON_BAR: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small", "color": "white", "clip_on": True}


def timeline_path(trace_path: str) -> str:
    """Where the picture of a trace goes."""
    return str(Path(trace_path).with_suffix(".png"))


def check_trace(path: str | None) -> None:
    """Say before anything is measured whether a trace can be written and drawn.

    Raises:
        InvalidParameterError: There is no matplotlib, no such folder, or the file is not to be JSON.
    """
    if path is None:
        return
    if Path(path).suffix.lower() != ".json":
        raise InvalidParameterError("trace", f"trace: {path} must end in .json")
    if not Path(path).resolve().parent.is_dir():
        raise InvalidParameterError("trace", f"trace: {path} is in no folder that there is")
    check_plot(timeline_path(path), "trace")


class Arrow(NamedTuple):
    """A message from one model's worker to the other's, in ms since the picture's beginning."""

    sent_ms: float
    arrived_ms: float
    is_offer: bool


class Bar(NamedTuple):
    """A target step of the stream.

    Attributes:
        kind: One of the four that have colours.
        text: Accepted and drafted tokens.
        num_decided: Tokens that it gave.
    """

    start_ms: float
    end_ms: float
    kind: str
    text: str
    num_decided: int


class DraftBar(NamedTuple):
    """A draft step, and the stream's part of it."""

    start_ms: float
    end_ms: float
    has_chain: bool
    num_branches: int


class Panel(NamedTuple):
    """What is drawn of a run."""

    title: str
    target: list[Bar]
    draft: list[DraftBar]
    arrows: list[Arrow]


def draw_timeline(runs: Sequence[TracedRun], notes: Iterable[str], path: str) -> None:
    """Write a PNG: a panel per mode, of the runs with the fewest streams; DRAFT above, TARGET below.

    Args:
        runs: Of one bench, in any order.
        notes: What is said above.
        path: Of the file.
    """
    from matplotlib.figure import Figure

    least = min(run.num_streams for run in runs)
    found = [panel for run in runs if run.num_streams == least and (panel := panel_of(run)).target][:_MOST_PANELS]
    if not found:
        return
    figure = Figure(figsize=(12, 1.2 + 2.1 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 1, squeeze=False, sharex=True)[:, 0]
    for axis, panel in zip(axes, found, strict=True):
        _draw(axis, panel)
    axes[-1].set_xlabel(_READING)
    axes[0].set_xlim(0, _width_ms(found))
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.suptitle("\n".join(notes), fontsize="small")
    figure.savefig(path, dpi=110)


def _width_ms(panels: Sequence[Panel]) -> float:
    step_ms = statistics.median(bar.end_ms - bar.start_ms for panel in panels for bar in panel.target)
    return min(_STEPS_SHOWN * step_ms, max(panel.target[-1].end_ms for panel in panels))


def panel_of(run: TracedRun, num_rounds: int = _ROUNDS) -> Panel:
    """The first rounds of a run's first stream."""
    rows = sorted(
        (step.start_ns, step.end_ns, row)
        for worker in run.of("target")
        for step in worker.target_steps
        for row in step.rows
    )
    rows = [entry for entry in rows if entry[2].seq == rows[0][2].seq][:num_rounds]
    if not rows:
        return Panel(run.label, [], [], [])
    seq, origin_ns, end_ns = rows[0][2].seq, rows[0][0], rows[-1][1]

    def ms(at_ns: int) -> float:
        return (at_ns - origin_ns) / 1e6

    target = [Bar(ms(start), ms(end), _kind(row), _text(row), row.num_decided) for start, end, row in rows]
    draft = [
        DraftBar(ms(step.start_ns), ms(step.end_ns), row.num_ahead > 0, row.num_branches)
        for worker in run.of("drafter")
        for step in worker.draft_steps
        for row in step.rows
        if row.seq == seq and origin_ns <= step.start_ns < end_ns
    ]
    arrows = [
        Arrow(ms(sent_ns), ms(arrived_ns), is_offer)
        for is_offer in (True, False)
        for sent_ns, arrived_ns in _ways(run, seq, is_offer=is_offer)
        if origin_ns <= sent_ns and arrived_ns <= end_ns
    ]
    return Panel(run.label, target, draft, arrows)


def _ways(run: TracedRun, seq: str, *, is_offer: bool) -> list[tuple[int, int]]:
    """When messages left one worker and arrived at the other, through the router."""
    first, second = ("Offer", "Offer") if is_offer else ("Verdict", "Commit")
    routers = {worker.name for worker in run.of("router")}
    found = [hop for hop in hops(run.workers) if hop.message.seq == seq]
    onward: dict[tuple[int, ...], list[Hop]] = {}
    for hop in found:
        if hop.message.kind == second and hop.sender in routers:
            onward.setdefault(_content(hop, is_offer), []).append(hop)
    ways = []
    for hop in found:
        if hop.message.kind == first and hop.receiver in routers:
            later = onward.get(_content(hop, is_offer), [])
            if later:
                ways.append((hop.sent_ns, later.pop(0).arrived_ns))
    return ways


def _content(hop: Hop, is_offer: bool) -> tuple[int, ...]:
    """What both hops of a message have in common."""
    message = hop.message
    return (message.length, message.num_tokens, message.num_branches) if is_offer else (message.length,)


def _kind(row: VerifiedRow) -> str:
    if row.is_ahead:
        return "ahead"
    if row.outcome == "miss":
        return "miss"
    return "made after" if row.num_drafted else "no draft"


def _text(row: VerifiedRow) -> str:
    if not row.num_decided:
        return "prompt"
    return f"{row.num_accepted} of {row.num_drafted}" if row.num_drafted else ""


# Drawing.


def _draw(axis: Any, panel: Panel) -> None:
    _draw_target(axis, panel.target)
    most = max((bar.num_branches for bar in panel.draft), default=0)
    bottom, height = _DRAFT
    for bar in panel.draft:
        width = bar.end_ms - bar.start_ms
        chain = height * _CHAIN_SHARE
        if bar.has_chain:
            axis.broken_barh([(bar.start_ms, width)], (bottom, chain), facecolor=_CHAIN, edgecolor="white", lw=0.5)
        if bar.num_branches:
            size = height * (1 - _CHAIN_SHARE) * bar.num_branches / most
            base = bottom + chain
            axis.broken_barh([(bar.start_ms, width)], (base, size), facecolor=_BRANCHES, edgecolor="white", lw=0.5)
    for arrow in panel.arrows:
        _draw_arrow(axis, arrow)
    axis.set_yticks([sum(_TARGET) / 2, bottom + height / 2], ["TARGET", "DRAFT"])
    axis.set_ylim(-0.22, bottom + height + 0.05)
    axis.set_title(panel.title, fontsize="medium", loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _draw_target(axis: Any, bars: Sequence[Bar]) -> None:
    """Steps, what was accepted on top of each, and how long the target stood still below the gaps."""
    bottom, height = _TARGET
    before = None
    for bar in bars:
        middle = (bar.start_ms + bar.end_ms) / 2
        span = [(bar.start_ms, bar.end_ms - bar.start_ms)]
        axis.broken_barh(span, _TARGET, facecolor=_COLORS[bar.kind], edgecolor="white", lw=0.5)
        axis.text(middle, bottom + height, bar.text, ha="center", va="bottom", fontsize="small", clip_on=True)
        axis.text(middle, bottom + height / 2, f"+{bar.num_decided}", **_ON_BAR)
        if before is not None and bar.start_ms - before > _LEAST_GAP_MS:
            gap_ms = bar.start_ms - before
            axis.text(
                bar.start_ms - gap_ms / 2,
                bottom - 0.04,
                f"{gap_ms:.1f}",
                ha="center",
                va="top",
                fontsize="x-small",
                clip_on=True,
            )
        before = bar.end_ms


def _draw_arrow(axis: Any, arrow: Arrow) -> None:
    low, high = sum(_TARGET) + 0.13, _DRAFT[0] - 0.02
    start, end = (high, low) if arrow.is_offer else (low, high)
    style = {"arrowstyle": "-|>", "color": _OFFER if arrow.is_offer else _VERDICT, "lw": 1, "mutation_scale": 8}
    style |= {"shrinkA": 0, "shrinkB": 0}
    axis.annotate("", (arrow.arrived_ms, end), (arrow.sent_ms, start), arrowprops=style)


def _legend(panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {bar.kind for panel in panels for bar in panel.target}
    handles: list[Any] = [Patch(color=_COLORS[kind], label=_MEANINGS[kind]) for kind in _COLORS if kind in kinds]
    if any(panel.draft for panel in panels):
        handles.append(Patch(color=_CHAIN, label="draft step: next token of the chain"))
        handles.append(Line2D([], [], color=_OFFER, marker="v", label="drafts offered, until they are at the target"))
        handles.append(
            Line2D([], [], color=_VERDICT, marker="^", label="tokens decided, until they are at the drafter")
        )
    if any(bar.num_branches for panel in panels for bar in panel.draft):
        handles.append(Patch(color=_BRANCHES, label="draft step: branches for other outcomes (height: how many)"))
    return handles
