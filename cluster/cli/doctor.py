"""``specdec doctor``: what there is, whether the pair fits together, and what memory it takes.

Models are loaded, checked and planned as the service would do it. Each check adds lines to one list.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import psutil

import specdec
from cluster.cli.flags import Parser, add_service_flags, config_overrides
from cluster.config.app import AppArgs
from cluster.config.files import load_config
from cluster.config.models import ModelConfig, mib
from cluster.launch.placement import Devices, Placement, placement_of, with_pair_placed
from cluster.models.download import fetch_models
from specdec.core.errors import InvalidParameterError, SpecdecError
from specdec.engine.shares import on_one_gpu
from specdec.models.host_memory import host_memory

if TYPE_CHECKING:
    from specdec.core.types import Progress
    from specdec.engine.build import Built
    from specdec.models.loading import ModelSource
    from specdec.models.memory import MemoryPlan


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


class Line(NamedTuple):
    """One thing that was found.

    Attributes:
        about: What it is of, such as ``target``; ``problem`` for why the pair cannot be served.
        text: A sentence or a part of one.
    """

    about: str
    text: str


PROBLEM = "problem"


def examine(args: AppArgs, progress: Progress | None = None) -> Iterator[Line]:
    """Load both models and look at everything; what is wrong is a line and not raised."""
    from cluster.models.sources import draft_source, target_source

    machine = this_machine()
    yield from machine_lines(machine)
    devices = Devices(len(machine.gpus), machine.num_cpus)
    try:
        args = with_pair_placed(args, devices)
        placement = placement_of(args, devices, can_grow=False)
    except InvalidParameterError as error:
        yield Line(PROBLEM, str(error))
        return
    target, draft = target_source(args), draft_source(args)
    yield from placement_lines(placement, has_draft=draft is not None)
    shares = placement.target.gpu_share, placement.draft.gpu_share
    if args.is_paired and machine.gpus:
        shares = _pair_shares(target, draft, machine.gpus[0].total_bytes, shares[0])
    target_s = None
    if args.target.engine == "vllm":
        is_ready = yield from _engine_lines(args)
    else:
        target_s = yield from _model("target", target, args, args.target, shares[0], progress)
        is_ready = target_s is not None
    if draft is None:
        return
    if len(machine.gpus) > 1 and not args.is_paired and draft.device_map is None and on_one_gpu(target, draft):
        draft = replace(draft, device="cuda:1")  # as it will have in the service
    draft_s = yield from _model("draft", draft, args, args.draft, shares[1], progress)
    if draft_s is not None and is_ready:
        yield from _pair_lines(args, target, draft, None if target_s is None else draft_s / target_s)


def _pair_shares(
    target: ModelSource, draft: ModelSource | None, total_bytes: int, gpu_share: float
) -> tuple[float, float]:
    from specdec.models.memory import pair_shares

    return (gpu_share, gpu_share) if draft is None else pair_shares(target, draft, total_bytes, gpu_share)


def _model(
    role: str, source: ModelSource, args: AppArgs, config: ModelConfig, gpu_share: float, progress: Progress | None
) -> Generator[Line, None, float | None]:
    """Load a model; gives the seconds of a step of one token, with nothing beside it, if it can be served."""
    from cluster.models.sources import backend_options
    from specdec.checkpoint.compat import tokenizer_width
    from specdec.engine.build import build_target
    from specdec.models.loading import load_tokenizer
    from specdec.models.step_time import median_step_s

    try:
        width = tokenizer_width(load_tokenizer(source))
        options = replace(backend_options(args, config, width), device_share=gpu_share)
        built = build_target(source, options, progress)[1]
    except SpecdecError as error:
        yield Line(PROBLEM, str(error))
        return None
    step_s = median_step_s(built.runner)
    yield from model_lines(role, built, source, step_s)
    return step_s


def _engine_lines(args: AppArgs) -> Generator[Line, None, bool]:
    """Of a target under vLLM what can be said without loading it; gives whether it can be served."""
    from cluster.models.vllm import check_engine

    try:
        text = check_engine(args) or "vLLM is in the image of the target's replicas, which was not asked"
    except SpecdecError as error:
        yield Line(PROBLEM, str(error))
        return False
    yield Line("target", text)
    return True


def _pair_lines(args: AppArgs, target: ModelSource, draft: ModelSource, step_share: float | None) -> Iterator[Line]:
    from cluster.models.sources import configured_pair

    try:
        pair = configured_pair(args, target, draft)
    except SpecdecError as error:
        yield Line(PROBLEM, str(error))
        return
    yield Line("pair", f"fits together: {pair.num_shared_tokens} tokens in common")
    yield from (Line("pair", note) for note in pair.notes)
    if step_share is not None:
        yield Line("pair", steps_line(step_share))


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
    lines = list(_examined(load_config(arguments.config, config_overrides(arguments))))
    problems = [line.text for line in lines if line.about == PROBLEM]
    if arguments.json:
        print(json.dumps({"problems": problems, "findings": [line._asdict() for line in lines]}))
    else:
        lines.append(Line("verdict", "cannot be served" if problems else "can be served"))
        print("\n".join(report(lines)))
    return EXIT_CANNOT_BE_SERVED if problems else 0


def _examined(config: AppArgs) -> Iterator[Line]:
    try:
        # Without a network this takes seconds; loading would try each file five times.
        loads_both = config.draft.application is None and config.target.engine != "vllm"
        config = fetch_models(config, _progress) if loads_both else config
    except InvalidParameterError as error:
        yield from machine_lines(this_machine())
        yield Line(PROBLEM, str(error))
    else:
        yield from examine(config, _progress)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(lines: Iterable[Line]) -> Iterator[str]:
    """The lines as text; what several are of in a row is said once, but for problems."""
    before = ""
    for about, text in lines:
        yield f"{about if about != before or about == PROBLEM else '':<10} {text}"
        before = about


def steps_line(share: float) -> str:
    """Compare the draft's step time with the target's, each measured alone."""
    takes = f"the draft's step takes {share:.2f} of the target's"
    return f"{takes}: too slow to help: take a smaller draft, or a faster device" if share >= 1 else takes


def machine_lines(machine: Hardware) -> Iterator[Line]:
    """Versions and devices."""
    yield Line("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    yield Line("cores", str(machine.num_cpus))
    limit = " (the limit of this process's control group)" if machine.has_limit else ""
    yield Line("memory", f"{gib(machine.free_bytes)} free of {gib(machine.total_bytes)}{limit}")
    if not machine.gpus:
        yield Line("GPUs", "none")
    for index, gpu in enumerate(machine.gpus):
        yield Line(f"GPU {index}", f"{gpu.name}, {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}")


def placement_lines(placement: Placement, *, has_draft: bool) -> Iterator[Line]:
    """What each replica of the models would get."""
    shares = {"target": placement.target} | ({"draft": placement.draft} if has_draft else {})
    for role, share in shares.items():
        options = ", ".join(f"{name} {value}" for name, value in share.ray_actor_options.items())
        yield Line("placement", f"{role}: {options}, torch threads {share.num_torch_threads}")
    yield from (Line("placement", remark) for remark in placement.remarks)


def model_lines(role: str, built: Built, source: ModelSource, step_s: float) -> Iterator[Line]:
    """One model: what it is, its memory, its parity check."""
    from specdec.models.quantization import own_quantization

    loaded, memory = built.loaded, built.memory
    dtype = str(loaded.dtype).removeprefix("torch.")
    texts = [f"{loaded.name}: {loaded.num_parameters / 1e6:,.1f} M parameters, {dtype} on {loaded.device}"]
    texts += [f"memory: {memory.describe()}", cache_line(memory)]
    if memory.num_state_slots:
        texts.append(state_line(memory))
        texts += [branch_line(memory.num_state_slots)] if role == "draft" else []
    full = f"a sequence of {memory.max_model_len:,} tokens takes {mib(memory.sequence_bytes)}"
    texts += [f"{full}; {memory.num_full_sequences:,} of them fit", f"step: {1e3 * step_s:.1f} ms for one token"]
    if (admission := built.admission) is None:
        texts.append("parity check skipped")
    else:
        passed = f"parity check passed in {admission.duration_s:.2f} s"
        error = f"relative error {admission.relative_error:.1e} (allowed {admission.tolerance:g})"
        texts.append(f"{passed}: {error} over {admission.num_tokens} tokens")
    own = own_quantization(loaded.model.config) or "none"
    quantization = own if source.quantization == "none" else source.quantization
    texts += [f"quantized: {quantization}"] if quantization != "none" else []
    yield from (Line(role, text) for text in (*texts, *built.notes))
    if remark := loaded.generation_defaults.remark(loaded.name):
        yield Line("warning", remark)


def cache_line(memory: MemoryPlan) -> str:
    """What the cache holds, and how it grows with a sequence."""
    growth = f"{memory.bytes_per_token:,} bytes a token"
    if memory.window_bytes:
        growth += f" and at most {mib(memory.window_bytes)} a sequence for layers with a sliding window"
    return f"cache: {memory.num_blocks:,} blocks of {memory.block_size} tokens, {growth}"


def state_line(memory: MemoryPlan) -> str:
    """What recurrent layers keep per sequence."""
    kept = f"{mib(memory.state_bytes)} of state and {mib(memory.checkpoint_bytes)} of checkpoints a sequence"
    how = f"rolled back by up to {memory.rollback_tokens} tokens"
    return f"recurrent: {kept}, {how}, {memory.num_state_slots:,} slots"


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
