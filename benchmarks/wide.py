"""Trees of a draft model against its chains, over outcomes: the real machines and the script in virtual time.

    python -m benchmarks.wide [--acceptance-rate 0.8 --next-guess-rate 0.95 --branches 16 --rounds 600]

A step of the target takes as long with up to 64 tokens, a message a millisecond; a draft step takes a tenth of the
target's. For each draft length one stream of the same tokens, with and without siblings.
"""

from __future__ import annotations

import argparse

from specdec.protocol.plans import PlanController, Planner, fixed_plan
from tests.specdec.control.machines import Pair, Service

LENGTHS = (7, 9)
TREE_TOKENS = 63


def tokens_per_s(pair: Pair, num_rounds: int, planner: Planner | PlanController | None, tree_tokens: int = 0) -> float:
    """Of one stream, after as many rounds to warm up."""
    service = Service(pair, planner, tree_tokens=tree_tokens)
    service.begin(1)
    service.run_rounds(num_rounds)
    _, num_tokens, seconds = service.run_rounds(num_rounds)
    return num_tokens / seconds


def main(argv: list[str] | None = None) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wide", description=__doc__)
    parser.add_argument("--acceptance-rate", type=float, default=0.8)
    parser.add_argument("--next-guess-rate", type=float, default=0.95)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=600)
    arguments = parser.parse_args(argv)
    pair = Pair(arguments.acceptance_rate, 0.1, arguments.next_guess_rate, free_tokens=64)
    print("| draft tokens | chains, tokens/s | with siblings | over chains |\n|---|---|---|---|")
    for length in (*LENGTHS, None):
        rates = []
        for tree_tokens in (0, TREE_TOKENS):
            planner = None
            if length is not None:
                planner = fixed_plan(length, "outcomes", num_branches=arguments.branches, tree_tokens=tree_tokens)
            rates.append(tokens_per_s(pair, arguments.rounds, planner, tree_tokens))
        chains, trees = rates
        print(f"| {length or 'auto'} | {chains:.1f} | {trees:.1f} | {trees / chains:.3f} |", flush=True)


if __name__ == "__main__":
    main()
