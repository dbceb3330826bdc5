"""What fails on a GPU, and how that ends: memory that runs out, a device that hangs or is lost, another process.

    python -m benchmarks.gpu.faults generate|assert [--device cuda]

is what runs in processes of its own: a lost device takes its process with it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.gpu.generation import Pair, Work
from benchmarks.gpu.pairs import Chain
from benchmarks.gpu.report import Report
from specdec.core.errors import DeviceLostError
from specdec.executor.graphs import PassOutput, StepGraphs

CHILD_TIMEOUT_S = 150.0
_SLEEP_CYCLES = 4_000_000_000
"""About two seconds of a GPU's clock."""
_MIB = 1 << 20
NUM_DRAFT_TOKENS = 4
_READY = "ready"


@dataclass(frozen=True)
class Sizes:
    """What is run: a pair of shapes, of which the draft's is the target here, and the work."""

    shapes: str
    work: Work
    max_num_batched_tokens: int


FULL = Sizes("8b-1b", Work(num_rows=16, prompt_length=500, num_tokens=32), 8192)
SMALL = Sizes("tiny", Work(num_rows=3, prompt_length=6, num_tokens=8), 64)
CHILD_WORK = Work(num_rows=4, prompt_length=16, num_tokens=200)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Run all of it; on a CPU what needs a GPU to fail does not fail."""
    check_out_of_memory(report, device, sizes)
    check_progress(report, device)
    check_processes(report, device)
    check_lost_device(report, device)


def check_out_of_memory(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Prompts whose step does not fit into what a process may take: it is read in parts, and nothing is lost."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Chain(sizes.shapes, 1.0).make("draft", device, dtype)
    pair = Pair(model, None, sizes.work, sizes.max_num_batched_tokens)
    prompts = sizes.work.prompts(pair.runners["target"].vocab_size)
    pair.generate([prompts[0][:1]], 0.0, 0)  # libraries take their workspaces
    # Less than one tensor of the whole step, and a multiple of what a prompt alone takes.
    with _little_memory(device, 96 * _MIB) as num_failures:
        scarce, _ = pair.generate(prompts, 0.0, 0)
        failures = num_failures()
    plenty, _ = Pair(model, None, sizes.work, sizes.max_num_batched_tokens).generate(prompts, 0.0, 0)
    report.check("out of memory: the same tokens in smaller steps", scarce == plenty, f"{failures} steps failed")
    if device.type == "cuda":
        report.check("out of memory: there was", failures > 0)


def check_progress(report: Report, device: torch.device) -> None:
    """A device that is busy for two seconds in the middle of a recorded step is seen to hang, and to go on."""
    pair = _small_pair(report, device)
    progress = pair.runners["target"].progress
    prompts = CHILD_WORK.prompts(pair.runners["target"].vocab_size)
    pair.generate(prompts, 0.0, 0)
    num_before = progress.num_layers
    with _after_launches(lambda: _hang(device)):
        thread = threading.Thread(target=pair.generate, args=(prompts, 0.0, 0))
        thread.start()
        longest_s, deadline_s = 0.0, time.monotonic() + 60
        while thread.is_alive() and time.monotonic() < deadline_s:
            longest_s = max(longest_s, time.monotonic() - progress.newest_s)
            time.sleep(0.02)
        thread.join(60)
    report.figure("faults_hang_seen_s", longest_s)
    if device.type == "cuda":
        report.check("a device that hangs in a recorded step is seen", longest_s > 1.0)
    has_gone_on = not thread.is_alive() and progress.num_layers - num_before >= CHILD_WORK.num_tokens
    report.check("and is seen to go on", has_gone_on)


def check_processes(report: Report, device: torch.device) -> None:
    """Two processes on one device give what one gives; so does the one that is left when the other is killed."""
    (alone,) = _results([_child("generate", device)])
    report.check("a process of its own generates", alone.startswith("tokens "), alone)
    both = _results([_child("generate", device) for _ in range(2)])
    report.check("two processes on one device: the tokens of one", both == [alone, alone], f"{both}")
    left, killed = (_child("generate", device) for _ in range(2))
    with killed:  # what it has started may hold its pipes open, so nobody reads them to their end
        assert killed.stdout is not None
        for line in killed.stdout:
            if _READY in line:
                break
        killed.kill()
    (text,) = _results([left])
    report.check("a process killed under load: the tokens of the one that is left", text == alone, text)


def check_lost_device(report: Report, device: torch.device) -> None:
    """A device assert in a recorded step ends as the loss of the device, for which a worker is replaced."""
    (text,) = _results([_child("assert", device)])
    report.check("a device assert in a recorded step ends in DeviceLostError", text.startswith("lost: "), text)


@contextmanager
def _little_memory(device: torch.device, num_bytes: int) -> Iterator[Callable[[], int]]:
    """Within, the process may take so much more memory; gives how often it was refused more."""
    if device.type != "cuda":
        yield lambda: 0
        return
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_stats(device)["num_ooms"]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + num_bytes) / total)
    try:
        yield lambda: int(torch.cuda.memory_stats(device)["num_ooms"] - before)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _after_launches(fault: Callable[[], object]) -> Iterator[None]:
    """Within, the third launch of a recorded step is followed by ``fault`` in the device's queue."""
    launch, counts = StepGraphs.launch, [0]

    def launched(self: StepGraphs, size: int) -> PassOutput:
        output = launch(self, size)
        counts[0] += 1
        if counts[0] == 3:
            fault()
        return output

    StepGraphs.launch = launched  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepGraphs.launch = launch  # type: ignore[method-assign]


def _hang(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(_SLEEP_CYCLES)


def _assert_on(device: torch.device) -> None:
    """What is wrong with it is found on the device, after the launch; a CPU says it at once, in words of its own."""
    if device.type != "cuda":
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    torch._assert_async(torch.zeros(1, device=device))


def _small_pair(report: Report, device: torch.device) -> Pair:
    chain = Chain("tiny", 0.7)
    pair = Pair(chain.make("target", device, torch.float32), chain.make("draft", device, torch.float32), CHILD_WORK)
    pair.record(report)
    return pair


def _child(what: str, device: torch.device) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.faults", what, "--device", str(device)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _results(children: list[subprocess.Popen[str]]) -> list[str]:
    """The last line that each has printed; of one that has failed, of its errors."""
    texts = []
    for child in children:
        try:
            text, errors = child.communicate(timeout=CHILD_TIMEOUT_S)
            text = errors if child.returncode else text
        except subprocess.TimeoutExpired:
            child.kill()
            text = f"no end after {CHILD_TIMEOUT_S:g} s"
        texts.append(text.strip().rpartition("\n")[2])
    return texts


def main(arguments: list[str] | None = None) -> None:
    """Run in a process of its own what may take it down, and print how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "assert"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    report, device = Report(), torch.device(options.device)
    pair = _small_pair(report, device)
    prompts = CHILD_WORK.prompts(pair.runners["target"].vocab_size)
    report.say(_READY)
    if options.what == "generate":
        tokens = [pair.generate(prompts, heat, NUM_DRAFT_TOKENS)[0] for heat in (0.0, 1.0)]
        sys.stdout.write(f"tokens {hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]}\n")
        return
    try:
        with _after_launches(lambda: _assert_on(device)):
            pair.generate(prompts, 0.0, NUM_DRAFT_TOKENS)
    except DeviceLostError as error:
        sys.stdout.write(f"lost: {str(error).splitlines()[0]}\n")
    else:
        sys.stdout.write("it went on\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # what is freed on a lost device may abort the process
