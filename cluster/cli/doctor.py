"""``specdec doctor``: what there is, whether the pair fits together, and what memory it takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import Parser, add_service_flags, config_overrides
from cluster.config.files import load_config

if TYPE_CHECKING:
    from cluster.cli.examine import Findings, ModelFindings
    from cluster.launch.machine import Hardware
    from cluster.launch.placement import Placement

USAGE = "[MODEL] [--draft MODEL] [--config FILE.yaml] [--json] [KEY ...]"
EXIT_CANNOT_BE_SERVED = 2


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_service_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look at everything and print it.

    Returns:
        0 where the pair can be served, 2 where it cannot.
    """
    config = load_config(arguments.config, config_overrides(arguments))
    from cluster.cli.examine import examine

    findings = examine(config, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(findings.as_json()))
    else:
        print("\n".join(report(findings)))
    return EXIT_CANNOT_BE_SERVED if findings.problems else 0


def report(findings: Findings) -> Iterator[str]:
    """The findings as lines of text."""
    yield from machine_lines(findings.machine)
    if findings.placement is not None:
        yield from placement_lines(findings.placement, has_draft=findings.draft is not None)
    for role, model in (("target", findings.target), ("draft", findings.draft)):
        if model is not None:
            yield from model_lines(role, model)
    if findings.engine is not None:
        yield _line("target", findings.engine)
    if findings.pair is not None:
        yield _line("pair", f"fits together: {findings.pair['num_shared_tokens']} tokens in common")
        yield from (_line("", note) for note in findings.pair["notes"])
    yield from (_line("remark", remark) for remark in findings.remarks)
    yield from (_line("problem", problem) for problem in findings.problems)
    yield _line("verdict", "cannot be served" if findings.problems else "can be served")


def machine_lines(machine: Hardware) -> Iterator[str]:
    """Versions and devices."""
    yield _line("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    yield _line("cores", str(machine.num_cpus))
    limit = " (the limit of this process's control group)" if machine.has_limit else ""
    yield _line("memory", f"{gib(machine.free_bytes)} free of {gib(machine.total_bytes)}{limit}")
    if not machine.gpus:
        yield _line("GPUs", "none")
    for index, gpu in enumerate(machine.gpus):
        yield _line(f"GPU {index}", f"{gpu.name}, {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}")


def placement_lines(placement: Placement, *, has_draft: bool) -> Iterator[str]:
    """What each replica of the models would get."""
    for role, share in (("target", placement.target), ("draft", placement.draft)):
        if role == "target" or has_draft:
            options = ", ".join(f"{name} {value}" for name, value in share.ray_actor_options.items())
            yield _line("placement", f"{role}: {options}, torch threads {share.num_torch_threads}")
    yield from (_line("", remark) for remark in placement.remarks)


def model_lines(role: str, model: ModelFindings) -> Iterator[str]:
    """One model: what it is, its memory, its admission check."""
    memory, admission = model.memory, model.admission
    yield _line(role, f"{model.name}: {model.num_parameters / 1e6:,.1f} M parameters, {model.dtype} on {model.device}")
    yield _line("", f"memory: {model.memory_line}")
    blocks = f"{memory['num_blocks']:,} blocks of {memory['block_size']} tokens"
    growth = f"{memory['bytes_per_token']:,} bytes a token"
    if memory["window_bytes"]:
        growth += f" and at most {mib(memory['window_bytes'])} a sequence for layers with a sliding window"
    yield _line("", f"cache: {blocks}, {growth}")
    if memory["num_state_slots"]:
        yield _line("", state_line(memory))
        if role == "draft":
            yield _line("", branch_line(memory["num_state_slots"]))
    one = f"a sequence of {model.max_model_len:,} tokens takes {mib(memory['sequence_bytes'])}"
    yield _line("", f"{one}; {model.num_full_sequences:,} of them fit")
    if admission is None:
        yield _line("", "admission check skipped")
    else:
        passed = f"admission check passed in {admission['duration_s']:.2f} s"
        error = f"relative error {admission['relative_error']:.1e} (allowed {admission['tolerance']:g})"
        yield _line("", f"{passed}: {error} over {admission['num_tokens']} tokens")
    if model.quantization != "none":
        yield _line("", f"quantized: {model.quantization}")
    if model.comparison is not None:
        yield _line("", comparison_line(memory["weights_bytes"], model.comparison))
    yield from (_line("", note) for note in model.notes)
    if model.remark is not None:
        yield _line("warning", model.remark)


def comparison_line(weights_bytes: int, comparison: dict[str, Any]) -> str:
    """A quantized model beside itself as it was."""
    kl = f"KL {comparison['mean_kl']:.2g} nats in the mean and {comparison['max_kl']:.2g} at most"
    same = f"the likeliest token is the same at {comparison['same_top']:.1%} of {comparison['num_tokens']} positions"
    step = f"a step {1e3 * comparison['step_s']:.1f} ms for {1e3 * comparison['original_step_s']:.1f} ms"
    return f"{mib(weights_bytes)} for {mib(comparison['original_bytes'])}, {step}; {kl}, {same}"


def state_line(memory: dict[str, Any]) -> str:
    """What recurrent layers keep per sequence."""
    kept = f"{mib(memory['state_bytes'])} of state and {mib(memory['checkpoint_bytes'])} of checkpoints a sequence"
    how = f"rolled back by up to {memory['rollback_tokens']} tokens"
    return f"recurrent: {kept}, {how}, {memory['num_state_slots']:,} slots"


def branch_line(num_slots: int) -> str:
    """What a draft's state slots are good for: how many branches its sequences can have."""
    taken = "each sequence and each branch takes a slot"
    if num_slots < 2:
        return f"{taken}: there is none for a branch"
    line = f"{taken}: beside 1 sequence {num_slots - 1:,} branches fit"
    several, most = 8, num_slots // 2
    if most >= several:
        line += f", beside {several} sequences {num_slots // several - 1:,} each"
    return f"{line}; beside more than {most:,} not one each"


def gib(num_bytes: int) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / (1 << 30):.1f} GiB"


def mib(num_bytes: int) -> str:
    """Bytes in MiB."""
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _line(label: str, text: str) -> str:
    return f"{label:<10} {text}"
