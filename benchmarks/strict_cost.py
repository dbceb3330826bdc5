"""What ``exactness: strict`` costs over fast: CPU time of a target's steps, and of reading a prompt, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.strict_cost [--target MODEL] [--dtype bfloat16] [--tile-tokens 16]

The time is the process's own, so that others on the machine count little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from cluster.models.demos import demo_folder
from specdec.cache.blocks import CachedSequence
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model

STREAMS, DRAFTS, CONTEXT, CHUNK = (1, 4, 16), (0, 4), 128, 256


class Steps:
    """A runner with sequences of ``CONTEXT`` tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sequences = [self._sequence() for _ in range(max(STREAMS))]
        for sequence in self._sequences:
            self._read([sequence], CONTEXT)

    def decode(self, num_streams: int, num_drafts: int) -> None:
        """A step of streams with drafts, taken back."""
        rows = self._sequences[:num_streams]
        self._read(rows, 1 + num_drafts)
        for sequence in rows:
            self._runner.truncate(sequence, CONTEXT)

    def prefill(self) -> None:
        """A prompt of ``CHUNK`` tokens in one step."""
        sequence = self._sequence()
        self._read([sequence], CHUNK)
        self._runner.free(sequence)

    def _sequence(self) -> CachedSequence:
        return self._runner.new_sequence()

    def _read(self, sequences: Sequence[CachedSequence], count: int) -> None:
        for sequence in sequences:
            self._runner.reserve(sequence, len(sequence) + count)
        self._runner.forward([RowInput(sequence, [1] * count, min(count, 5)) for sequence in sequences])


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo_folder("target")), help="hub id or folder; default: the demo's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tile-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    loaded = load_model(ModelSource(args.target, dtype=args.dtype, device="cpu"))
    fast, strict = (Steps(ModelRunner(loaded, num_blocks=400, tile_tokens=tiles)) for tiles in (None, args.tile_tokens))

    def compare(what: str, run: Callable[[Steps], None]) -> None:
        spent: list[list[float]] = [[], []]
        for i in range(2 * (1 + args.repeats)):
            start_s = time.process_time()
            run((fast, strict)[i % 2])
            if i > 1:
                spent[i % 2].append(time.process_time() - start_s)
        one, other = map(statistics.median, spent)
        print(f"{what}: fast {one * 1e3:.1f} ms, strict {other * 1e3:.1f} ms, {other / one:.2f} times", flush=True)

    for num_streams in STREAMS:
        for num_drafts in DRAFTS:
            compare(f"{num_streams} streams, K = {num_drafts}", lambda s: s.decode(num_streams, num_drafts))  # noqa: B023
    compare(f"a prompt of {CHUNK} tokens", Steps.prefill)


if __name__ == "__main__":
    main()
