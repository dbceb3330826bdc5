"""``specdec doctor``: what there is, whether the pair fits together, and what memory it takes.

Whether a pair can be served here: loaded, checked and planned as the service would do it; the findings are data.

What this machine is: versions, devices, memory. Plain data.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

import specdec
from cluster.cli.flags import Parser, add_service_flags, config_overrides
from cluster.config.app import AppArgs
from cluster.config.files import load_config
from cluster.config.models import ModelConfig, mib
from cluster.launch.placement import Devices, Placement, placement_of, with_pair_placed
from cluster.models.download import fetch_models
from specdec.core.errors import InvalidParameterError, SpecdecError
from specdec.drafting.length import StepTime, StepTimes
from specdec.drafting.modes import Bounds, Conditions, paces
from specdec.engine.shares import on_one_gpu
from specdec.models.host_memory import host_memory

if TYPE_CHECKING:
    from specdec.core.types import Progress
    from specdec.engine.build import Built
    from specdec.models.loading import ModelSource


PACKAGES = ("torch", "transformers", "accelerate", "ray", "pydantic")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: As its driver calls it.
        total_bytes: Its memory.
        free_bytes: What of it nobody holds now.
    """

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What specdec finds here.

    Attributes:
        versions: By package, Python included.
        num_cpus: Cores this process may use.
        total_bytes: The machine's memory, or this process's limit where that is lower.
        free_bytes: What of it can still be had.
        has_limit: Whether ``total_bytes`` is a limit on this process, as a container has one.
        gpus: In the order of CUDA's device numbers.
    """

    versions: dict[str, str]
    num_cpus: int
    total_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...]
    has_limit: bool = False


def this_machine() -> Hardware:
    """Look at this machine; imports torch."""
    import torch

    memory = host_memory()
    versions = {"python": platform.python_version(), "specdec": specdec.__version__}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    gpus = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    process = psutil.Process()
    num_cpus = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count()
    return Hardware(
        versions, num_cpus, memory.total_bytes, memory.free_bytes, tuple(gpus), memory.limit_bytes is not None
    )


@dataclass(frozen=True, slots=True)
class ModelFindings:
    """What is known of a model that loads, fits into memory and passes its parity check.

    Attributes:
        name: Hub id or folder.
        num_parameters: Each shared one once.
        dtype: Of its parameters.
        device: Where it was loaded.
        max_model_len: Longest sequence it is served with, in tokens.
        memory: The plan: see :class:`specdec.models.memory.MemoryPlan`.
        memory_line: The plan in a line.
        num_full_sequences: Sequences of ``max_model_len`` that the cache holds at once.
        admission: The check of its cached forward: see :class:`specdec.models.parity_check.AdmissionReport`; None where
            it was skipped.
        step_s: Seconds of a step of one token, with nothing beside it.
        notes: What whoever runs it should know, a sentence each.
        defaults: What it sets for requests that do not say: see :class:`specdec.core.params.GenerationDefaults`.
        remark: What of its generation config is not honoured, if there is anything.
        quantization: By which key, or by which method the checkpoint is; ``none`` for neither.
    """

    name: str
    num_parameters: int
    dtype: str
    device: str
    max_model_len: int
    memory: dict[str, Any]
    memory_line: str
    num_full_sequences: int
    admission: dict[str, Any] | None
    defaults: dict[str, Any]
    remark: str | None
    step_s: float
    notes: tuple[str, ...] = ()
    quantization: str = "none"


@dataclass(slots=True)
class Findings:
    """All that was found.

    Attributes:
        placement: What each replica would get; None where there is no room, and then nothing else is looked at.
        target: None where there is a problem with it.
        draft: The same; also None where there is no draft.
        pair: What holds for both together: see :class:`specdec.checkpoint.compat.PairReport`.
        engine: Of a target under vLLM, in place of what is found by loading it: what its environment has.
        is_paired: Whether both models are in one process, where nothing overlaps.
        problems: Why the pair cannot be served, a line each; empty where it can.
        remarks: What else could not be found out.
    """

    machine: Hardware
    placement: Placement | None
    target: ModelFindings | None = None
    draft: ModelFindings | None = None
    pair: dict[str, Any] | None = None
    engine: str | None = None
    is_paired: bool = False
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def examine(args: AppArgs, progress: Progress | None = None) -> Findings:
    """Load both models and look at everything; what is wrong is among the findings and not raised."""
    from cluster.models.sources import draft_source, target_source

    machine = this_machine()
    devices = Devices(len(machine.gpus), machine.num_cpus)
    findings = Findings(machine, None)
    try:
        args = with_pair_placed(args, devices)
        findings.is_paired = args.is_paired
        findings.placement = placement = placement_of(args, devices, can_grow=False)
    except InvalidParameterError as error:
        findings.problems.append(str(error))
        return findings
    source = target_source(args)
    shares = placement.target.gpu_share, placement.draft.gpu_share
    if args.is_paired and machine.gpus:
        shares = _pair_shares(source, draft_source(args), machine.gpus[0].total_bytes, shares[0])
    if args.target.engine == "vllm":
        _examine_engine(args, findings)
    else:
        target = _examined(source, args, args.target, shares[0], findings, progress)
        if target is not None:
            findings.target = _findings(target, source)
    draft = draft_source(args)
    if draft is not None:
        _examine_draft(args, source, draft, shares[1], findings, progress)
    return findings


def _examine_draft(
    args: AppArgs,
    target: ModelSource,
    source: ModelSource,
    gpu_share: float,
    findings: Findings,
    progress: Progress | None,
) -> None:
    """Load the draft, on a GPU of its own if there is a second one."""
    if (
        len(findings.machine.gpus) > 1
        and not args.is_paired
        and source.device_map is None
        and on_one_gpu(target, source)
    ):
        source = replace(source, device="cuda:1")  # as it will have in the service
    built = _examined(source, args, args.draft, gpu_share, findings, progress)
    if built is not None:
        findings.draft = _findings(built, source)
        if findings.target is not None or findings.engine is not None:
            findings.pair = _examined_pair(findings, target, source, args)


def _pair_shares(
    target: ModelSource, draft: ModelSource | None, total_bytes: int, gpu_share: float
) -> tuple[float, float]:
    from specdec.models.memory import pair_shares

    return (gpu_share, gpu_share) if draft is None else pair_shares(target, draft, total_bytes, gpu_share)


def _examined(
    source: ModelSource,
    args: AppArgs,
    config: ModelConfig,
    gpu_share: float,
    findings: Findings,
    progress: Progress | None,
) -> Built | None:
    from cluster.models.sources import backend_options
    from specdec.checkpoint.compat import tokenizer_width
    from specdec.engine.build import build_target
    from specdec.models.loading import load_tokenizer

    try:
        width = tokenizer_width(load_tokenizer(source))
        options = replace(backend_options(args, config, width), device_share=gpu_share)
        return build_target(source, options, progress)[1]
    except SpecdecError as error:
        findings.problems.append(str(error))
        return None


def _examine_engine(args: AppArgs, findings: Findings) -> None:
    """Of a target under vLLM what can be said without loading it."""
    from cluster.models.vllm import check_engine

    try:
        findings.engine = check_engine(args) or "vLLM is in the image of the target's replicas, which was not asked"
    except SpecdecError as error:
        findings.problems.append(str(error))


def _examined_pair(findings: Findings, target: ModelSource, draft: ModelSource, args: AppArgs) -> dict[str, Any] | None:
    from cluster.models.sources import configured_pair

    try:
        return asdict(replace(configured_pair(args, target, draft), mapping=None))
    except SpecdecError as error:
        findings.problems.append(str(error))
        return None


def _findings(built: Built, source: ModelSource) -> ModelFindings:
    from specdec.models.quantization import own_quantization
    from specdec.models.step_time import median_step_s

    own = own_quantization(built.loaded.model.config) or "none"
    return ModelFindings(
        name=built.loaded.name,
        num_parameters=built.loaded.num_parameters,
        dtype=str(built.loaded.dtype).removeprefix("torch."),
        device=str(built.loaded.device),
        max_model_len=built.memory.max_model_len,
        memory=asdict(built.memory) | {"total_bytes": built.memory.total_bytes},
        memory_line=built.memory.describe(),
        num_full_sequences=built.memory.num_full_sequences,
        admission=None if built.admission is None else asdict(built.admission),
        notes=built.notes,
        defaults=asdict(built.loaded.generation_defaults),
        remark=built.loaded.generation_defaults.remark(built.loaded.name),
        step_s=median_step_s(built.runner),
        quantization=own if source.quantization == "none" else source.quantization,
    )


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
    try:
        # Without a network this takes seconds; loading would try each file five times.
        loads_both = config.draft.application is None and config.target.engine != "vllm"
        config = fetch_models(config, _progress) if loads_both else config
    except InvalidParameterError as error:
        findings = Findings(this_machine(), None, problems=[str(error)])
    else:
        findings = examine(config, _progress)
    if arguments.json:
        print(json.dumps(findings.as_json()))
    else:
        print("\n".join(report(findings)))
    return EXIT_CANNOT_BE_SERVED if findings.problems else 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(findings: Findings) -> Iterator[str]:
    """The findings as lines of text."""
    yield from machine_lines(findings.machine)
    if findings.placement is not None:
        yield from placement_lines(findings.placement, has_draft=findings.draft is not None)
    if findings.target is not None:
        yield from model_lines("target", findings.target)
    if findings.engine is not None:
        yield _line("target", findings.engine)
    if findings.draft is not None:
        yield from model_lines("draft", findings.draft, is_draft=True)
    if findings.pair is not None:
        yield _line("pair", f"fits together: {findings.pair['num_shared_tokens']} tokens in common")
        yield from (_line("", note) for note in findings.pair["notes"])
        if findings.target is not None and findings.draft is not None:
            yield _line("", steps_line(findings.draft.step_s / findings.target.step_s, findings.is_paired))
    yield from (_line("remark", remark) for remark in findings.remarks)
    yield from (_line("problem", problem) for problem in findings.problems)
    yield _line("verdict", "cannot be served" if findings.problems else "can be served")


EXPECTED_RATES = (0.6, 0.7, 0.8)
"""Shares of draft tokens that are accepted, for which it is said what to expect."""


def steps_line(share: float, is_paired: bool = False) -> str:
    """How the draft's step stands to the target's, timed with nothing beside them, and what to expect of it."""
    takes = f"the draft's step takes {share:.2f} of the target's"
    if share >= 1:
        return f"{takes}: too slow to help: take a smaller draft, or a faster device"
    target, draft = (StepTimes((StepTime(1, 1, seconds, 1),)) for seconds in (1.0, share))
    alone = Conditions(target, target, draft, 1, 1, round_trip_s=0.0)

    def gains(bounds: Bounds) -> str:
        best = (max(paces(alone, rate, bounds).values()) for rate in EXPECTED_RATES)
        return " / ".join(f"{gain:.1f}" for gain in best)

    where = f"where {' / '.join(map(str, EXPECTED_RATES))} of its tokens are accepted"
    in_turn = gains(Bounds(modes=frozenset({"sequential"})))
    if is_paired:
        return f"{takes}; {where}, in turn: at most {in_turn} times plain at one stream"
    return f"{takes}; {where}: at most {gains(Bounds())} times plain at one stream, in turn {in_turn}"


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
    shares = {"target": placement.target} | ({"draft": placement.draft} if has_draft else {})
    for role, share in shares.items():
        options = ", ".join(f"{name} {value}" for name, value in share.ray_actor_options.items())
        yield _line("placement", f"{role}: {options}, torch threads {share.num_torch_threads}")
    yield from (_line("", remark) for remark in placement.remarks)


def model_lines(role: str, model: ModelFindings, *, is_draft: bool = False) -> Iterator[str]:
    """One model: what it is, its memory, its parity check."""
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
        if is_draft:
            yield _line("", branch_line(memory["num_state_slots"]))
    one = f"a sequence of {model.max_model_len:,} tokens takes {mib(memory['sequence_bytes'])}"
    yield _line("", f"{one}; {model.num_full_sequences:,} of them fit")
    yield _line("", f"step: {1e3 * model.step_s:.1f} ms for one token")
    if admission is None:
        yield _line("", "parity check skipped")
    else:
        passed = f"parity check passed in {admission['duration_s']:.2f} s"
        error = f"relative error {admission['relative_error']:.1e} (allowed {admission['tolerance']:g})"
        yield _line("", f"{passed}: {error} over {admission['num_tokens']} tokens")
    if model.quantization != "none":
        yield _line("", f"quantized: {model.quantization}")
    yield from (_line("", note) for note in model.notes)
    if model.remark is not None:
        yield _line("warning", model.remark)


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


def _line(label: str, text: str) -> str:
    return f"{label:<10} {text}"
