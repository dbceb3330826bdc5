"""Step times of a pair by batch and draft length: ``python -m benchmarks.steps [--streams 1,8] [KEY ...]``.

The keys are those of ``specdec serve``.
"""

from __future__ import annotations

import torch

from benchmarks.modes.offline import load_pair
from benchmarks.step_times import measure_steps, step_table
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.config.files import config_keys, load_config


def main(argv: list[str] | None = None) -> None:
    """Print the table of the configured pair, by default the demo pair."""
    parser = Parser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--streams", default="1,8", help="numbers of rows, separated by commas")
    parser.add_argument("--draft-length", type=int, default=4, help="longest draft that is verified")
    parser.add_argument("--context", type=int, default=256, help="tokens behind each row")
    parser.add_argument("--repeats", type=int, default=11, help="of every step")
    add_config_flags(parser, only={path for path, _ in config_keys()})
    arguments = parser.parse_args(argv)
    config = load_config(None, config_overrides(arguments))
    torch.set_num_threads(int(config.actors.target.num_cpus or 1))
    pair = load_pair(config)
    steps = measure_steps(
        pair.target,
        pair.drafter,
        batches=sorted({int(number) for number in arguments.streams.split(",")}),
        draft_lengths=range(arguments.draft_length + 1),
        context=arguments.context,
        repeats=arguments.repeats,
        clock=pair.clock,
    )
    print("\n".join(step_table(steps)))


if __name__ == "__main__":
    main()
