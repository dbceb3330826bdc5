"""A benchmark's results for people and for programs: Markdown and JSON."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.modes.summary import SummaryRow

HEAD = (
    "prompts",
    "T",
    "streams",
    "variant",
    "tokens/s",
    "against the first variant (least, median, most)",
    "TTFT ms",
    "ITL ms mean; p50, p95, p99",
    "acceptance",
    "tokens a draft",
    "step ms target, draft",
    "idle target, draft",
    "decoding tokens/s",
    "same text as the first variant",
    "load",
)

EXPLANATIONS = (
    "ITL is per token: tokens that come in one message have no time between them.",
    "A step's time is offline that of steps that read no prompt, over HTTP the mean of all.",
    "Decoding tokens/s are those of each stream from its first tokens on, summed.",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and how the figures were made.

    Attributes:
        machine: Processor, cores, GPUs.
        versions: By package.
        models: Shape of each model, by role.
        stand_ins: Emulated devices and scripted tokens; empty where all is real.
        work: What was run, in words.
        command: That makes the figures again.
    """

    machine: str
    versions: dict[str, str]
    models: dict[str, str]
    stand_ins: tuple[str, ...]
    work: str
    command: str


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All results of one benchmark."""

    environment: Environment
    rows: tuple[SummaryRow, ...]

    def markdown(self) -> str:
        """The tables, with what they were made with."""
        environment = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
        lines = [f"`{environment.command}`", "", f"{environment.machine}; {versions}."]
        lines += [f"{role}: {shape}." for role, shape in environment.models.items()]
        remarks = self.remarks()
        lines += [f"{environment.work}.", "", *remarks, *([""] if remarks else []), *table(self.rows)]
        lines += pooled_table(self.rows)
        lines += ["", *EXPLANATIONS]
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """What must be read with every figure of the table."""
        remarks = [f"**Not real: {note}.**" for note in self.environment.stand_ins]
        emulated, overrun = (sum(getattr(row, name) for row in self.rows) for name in _EMULATED)
        if emulated:
            verdict = "all fitted" if not overrun else f"**{overrun} did not fit: their time is real, not emulated**"
            remarks.append(f"Computation inside the emulated time: {emulated} steps, {verdict}.")
        return remarks

    def as_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps(asdict(self), indent=1)


_EMULATED = ("num_emulated_steps", "num_overruns")


def table(rows: Sequence[SummaryRow]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    return lines + [f"| {' | '.join(_cells(row))} |" for row in rows]


def _cells(row: SummaryRow) -> list[str]:
    p50, p95, p99 = (f"{1e3 * gap:.1f}" for gap in row.gap_percentiles_s)
    return [
        row.prompts,
        f"{row.temperature:g}",
        str(row.num_streams),
        row.variant,
        f"{row.tokens_per_s:.1f}",
        ", ".join(f"{ratio:.2f}" for ratio in row.ratio),
        f"{1e3 * row.first_s:.1f}",
        f"{_number(row.gap_mean_s, 1e3, '.1f')}; {p50}, {p95}, {p99}",
        _number(row.acceptance_rate, 1, ".3f"),
        _number(row.mean_acceptance_length, 1, ".2f"),
        ", ".join(_number(row.step_s.get(device), 1e3, ".2f") for device in ("target", "draft")),
        ", ".join(_number(row.idle_share.get(device), 100, ".0f", "%") for device in ("target", "draft")),
        f"{row.decode_tokens_per_s:.1f}",
        "yes" if row.has_equal_texts else "no",
        f"{row.load:.1f}",
    ]


def pooled_table(rows: Sequence[SummaryRow]) -> list[str]:
    """Lines of a Markdown table of what the controller gave over all rounds; nothing where it was not compared."""
    chosen = [(row, row.over_first, row.over_best_fixed) for row in rows if row.over_best_fixed is not None]
    if not chosen:
        return []
    bases = "over the first variant (95% interval) | over the best fixed one (95% interval)"
    lines = ["", f"| prompts | T | streams | variant | {bases} |", "|---" * 6 + "|"]
    for row, *pooled in chosen:
        cells = (f"{p.ratio:.3f} ({p.low:.3f} to {p.high:.3f})" for p in pooled if p is not None)
        lines.append(
            f"| {row.prompts} | {row.temperature:g} | {row.num_streams} | {row.variant} | {' | '.join(cells)} |"
        )
    return lines


def command_line(argv: Sequence[str]) -> str:
    """The command as it can be given again."""
    return shlex.join(["python", "-m", "benchmarks.modes", *argv])


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _number(value: float | None, factor: float, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value * factor:{form}}{unit}"
