"""What a scripted pair on emulated devices could give if the system added nothing: limits from the script alone.

    python -m benchmarks.modes --json figures.json --backend benchmarks.backends:stand_in:target=30,draft=3,...
    python -m benchmarks.limits figures.json --backend benchmarks.backends:stand_in:target=30,draft=3,acceptance=0.8

Nothing measured goes in: the acceptance rate, the rate of right guesses and the time of a step are what the
configuration says, the branches are those that the drafter forks (:func:`specdec.drafting.branches.foreseen`): at
many streams a share of all that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.backends import NEXT_GUESS_RATE
from benchmarks.emulation import StepCost, step_cost
from benchmarks.modes.compare import ALONE
from benchmarks.scripted import RANK_SHARES
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.config.app import AppArgs
from cluster.config.files import config_keys, load_config
from cluster.models.sources import backend_arguments
from specdec.core.messages import Plan
from specdec.drafting.branches import branch_share, foreseen
from specdec.drafting.modes import expected_tokens

LENGTHS = range(1, 17)
"""Draft lengths among which a best one is looked for."""
_PLANNED_RATE = Plan().acceptance_rate
_ITERATIONS = 80
_State = tuple[int, bool]
"""Draft tokens under verification, and whether they follow a miss."""
_Moves = tuple[tuple[_State, float], ...]


@dataclass(frozen=True, slots=True)
class ScriptedPair:
    """A target and a drafter whose tokens are scripted and whose steps take an emulated time.

    Attributes:
        alpha: Probability that a draft token is the target's.
        next_guess_rate: Probability that, where it is not, the target's is among the next three guesses.
        num_streams: Sequences that share every step; all are taken to be in the same state.
    """

    alpha: float
    next_guess_rate: float
    target: StepCost
    draft: StepCost
    num_streams: int = 1

    def target_s(self, num_draft_tokens: int) -> float:
        """Time of a verification of so many draft tokens per stream."""
        return self.target.seconds(self.num_streams, self.num_streams * (1 + num_draft_tokens))

    def draft_s(self, num_branches: int) -> float:
        """Time of a draft step with so many branches per stream, or with its share of all that a drafter holds."""
        num_rows = self.num_streams * (1 + self._held(num_branches))
        return self.draft.seconds(num_rows, num_rows)

    def alone(self) -> float:
        """Tokens per second of all streams without drafts."""
        return self.num_streams / self.target_s(0)

    def sequential(self, num_draft_tokens: int) -> float:
        """Tokens per second of all streams, drafting in turn without any latency: S E / (t_T + K t_d)."""
        round_s = self.target_s(num_draft_tokens) + num_draft_tokens * self.draft_s(0)
        return self.num_streams * expected_tokens(self.alpha, num_draft_tokens) / round_s

    def best_sequential(self) -> float:
        """The same at the best draft length."""
        return max(self.sequential(length) for length in LENGTHS)

    def hit_rate(self, num_verified: int, num_branches: int) -> float:
        """Probability that what follows a verification of so many draft tokens was prepared.

        The chain itself goes on where all are kept and its next token is right; each branch stands for one number
        accepted and one guess of the token there.
        """
        guesses = foreseen(self._held(num_branches), num_verified, _PLANNED_RATE)
        others = (self.alpha**num_accepted * self._guess_rates(guess, guess + 1) for num_accepted, guess in guesses)
        return self.alpha ** (num_verified + 1) + sum(others)

    def _guess_rates(self, first: int, end: int) -> float:
        """Probability that a draft token is wrong and one of these guesses is right."""
        return (1 - self.alpha) * self.next_guess_rate * sum(RANK_SHARES[first:end])

    def _held(self, num_branches: int) -> int:
        return min(num_branches, branch_share(self.num_streams))

    def outcomes(self, num_draft_tokens: int, num_branches: int, num_waited_for: int = 0) -> float:
        """Tokens per second of all streams over the likely outcomes; see :meth:`outcomes_round`."""
        tokens, seconds = self.outcomes_round(num_draft_tokens, num_branches, num_waited_for)
        return self.num_streams * tokens / seconds

    def outcomes_round(self, num_draft_tokens: int, num_branches: int, num_waited_for: int = 0) -> tuple[float, float]:
        """Tokens of one stream and seconds of a round, over the likely outcomes, with a drafter that hears at once.

        A Markov chain over the length of the draft under verification. From each length a hit (:meth:`hit_rate`) leads
        to a draft as long as fits into the step, which is a token less where the step was a plain one, as its outcome's
        own token is drafted first. A miss leads to a plain step, or to one with a short chain that is waited for.

        Args:
            num_draft_tokens: Most draft tokens, K.
            num_branches: Beside the accepted path.
            num_waited_for: Length of the chain for which the target waits after a miss; 0 goes on plainly.
        """
        moves = self._moves(num_draft_tokens, num_branches, num_waited_for)
        shares = dict.fromkeys(moves, 1 / len(moves))
        for _ in range(_ITERATIONS):
            moved = {state: 0.5 * share for state, share in shares.items()}  # half a step: no cycle stays one
            for state, share in shares.items():
                for following, chance in moves[state]:
                    moved[following] += 0.5 * share * chance
            shares = moved
        tokens = sum(share * expected_tokens(self.alpha, verified) for (verified, _), share in shares.items())
        waited_s = num_waited_for * self.draft_s(num_branches)
        mean_s = sum(
            share * (self.target_s(verified) + waited_s * is_miss) for (verified, is_miss), share in shares.items()
        )
        return tokens, mean_s

    def _moves(self, num_draft_tokens: int, num_branches: int, num_waited_for: int) -> dict[_State, _Moves]:
        """Where each state leads, with which probability."""
        moves: dict[_State, _Moves] = {}
        states: list[_State] = [(num_waited_for, True)]
        while states:
            state = states.pop()
            verified, _ = state
            step_s = self.target_s(verified)
            fit = int(step_s / self.draft_s(num_branches) + 1e-9) - (verified == 0)
            hit = self.hit_rate(verified, num_branches)
            after = max(0, min(num_draft_tokens, fit)), False
            moves[state] = ((after, hit), ((num_waited_for, True), 1 - hit))
            states += [] if after in moves else [after]
        return moves


@dataclass(frozen=True, slots=True)
class ScriptedLimit:
    """What the script allows, in tokens per second of all streams.

    Attributes:
        tokens_per_s: In the mode and at the draft length that was run; where none was asked for, at the best one.
        tokens_per_round: There, of one stream.
        best_tokens_per_s: In that mode at the best draft length.
        sequential_tokens_per_s: In turn, without any latency, at the best draft length.
        policy: What happens on a miss.
    """

    tokens_per_s: float
    tokens_per_round: float
    best_tokens_per_s: float
    sequential_tokens_per_s: float
    policy: str


PLAIN_MISS = "on a miss a plain step"


@cache
def scripted_limit(
    pair: ScriptedPair, mode: str | None, num_draft_tokens: int | None, num_branches: int
) -> ScriptedLimit:
    """The limit of one mode.

    Args:
        pair: The script and the devices.
        mode: ``sequential``, or one that drafts ahead.
        num_draft_tokens: K; 0 is the target alone, None the service's choice.
        num_branches: Where it drafts ahead.
    """
    sequential = max(LENGTHS, key=pair.sequential)
    ideal = pair.sequential(sequential)
    if num_draft_tokens == 0:
        return ScriptedLimit(pair.alone(), 1.0, pair.alone(), ideal, "plain steps")
    if mode == "sequential":
        length = num_draft_tokens or sequential
        return ScriptedLimit(pair.sequential(length), expected_tokens(pair.alpha, length), ideal, ideal, "in turn")
    rates = {length: pair.outcomes(length, num_branches) for length in LENGTHS}
    best = max(rates, key=rates.__getitem__)
    length = num_draft_tokens or best
    tokens, _ = pair.outcomes_round(length, num_branches)
    return ScriptedLimit(pair.outcomes(length, num_branches), tokens, rates[best], ideal, PLAIN_MISS)


def emulated_script(config: AppArgs) -> ScriptedPair | None:
    """What limits can be computed from; None unless tokens are scripted and both devices emulated."""
    given = {} if config.backend is None else backend_arguments(config.backend)[1]
    if not {"acceptance", "target", "draft"} <= given.keys():
        return None
    next_guess_rate = float(given.get("next_guess", NEXT_GUESS_RATE))
    return ScriptedPair(
        float(given["acceptance"]), next_guess_rate, step_cost(given["target"]), step_cost(given["draft"])
    )


def mode_of(name: str) -> tuple[str | None, int | None]:
    """Mode and draft length of a variant as the bench names it; see :func:`benchmarks.modes.compare.parse_variants`."""
    if name == ALONE:
        return None, 0
    if name == "auto":
        return "auto", None
    mode, _, length = name.rpartition(", ")
    return mode.replace(" ", "_") or None, int(length.split()[0])


def scripted_table(rows: Sequence[dict[str, Any]], script: ScriptedPair, num_branches: int) -> list[str]:
    """Lines of a Markdown table.

    Args:
        rows: Of the JSON file that ``python -m benchmarks.modes`` writes.
        script: Its number of streams does not count.
        num_branches: In mode ``outcomes``, and taken for ``auto``.
    """
    lines = [
        "Limits from the script and the emulated times alone, with no latency and nothing measured; all in decoding "
        "tokens/s. The best length is the one with the highest limit.",
        "",
        "| streams | variant | tokens/s | limit | share | tokens a round | limit | limit at the best length | share "
        "| over ideal in turn |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mode, length = mode_of(row["variant"])
        branches = num_branches if mode in ("outcomes", "auto") else 0
        limit = scripted_limit(replace(script, num_streams=row["num_streams"]), mode, length, branches)
        rate, per_round = row["decode_tokens_per_s"], row["tokens_per_round"]
        shares = [f"{100 * rate / most:.0f}%" for most in (limit.tokens_per_s, limit.best_tokens_per_s)]
        rounds = f"{'-' if per_round is None else f'{per_round:.2f}'} | {limit.tokens_per_round:.2f}"
        figures = f"{rate:.1f} | {limit.tokens_per_s:.1f} | {shares[0]} | {rounds}"
        best = f"{limit.best_tokens_per_s:.1f} | {shares[1]} | {rate / limit.sequential_tokens_per_s:.2f}"
        lines.append(f"| {row['num_streams']} | {row['variant']} | {figures} | {best} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Print what the script allows beside what the bench measured."""
    parser = Parser(prog="python -m benchmarks.limits", description="limits of a script")
    parser.add_argument("figures", type=Path, metavar="FILE.json", help="written by python -m benchmarks.modes --json")
    add_config_flags(parser, only={path for path, _ in config_keys()})
    arguments = parser.parse_args(argv)
    config = load_config(None, config_overrides(arguments))
    script = emulated_script(config)
    if script is None:
        parser.error("give --backend as the bench had it, with target, draft and acceptance")
    rows = json.loads(arguments.figures.read_text(encoding="utf-8"))["rows"]
    print("\n".join(scripted_table(rows, script, config.num_branches)))


if __name__ == "__main__":
    main()
