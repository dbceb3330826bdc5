"""The hook for logits processors: what it does to the target's rows is part of the target's own distribution."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.rows import RowInput
from specdec.sampling.pipeline import LogitsProcessor
from specdec.sampling.rows import RowGroup
from tests.sizes import some
from tests.specdec.engine.pairs import Case, add_noise, backend, make_model, run
from tests.specdec.hooks import by_row
from tests.specdec.models.families import VOCAB_SIZE

PROMPTS = ((5, 9, 77, 31), tuple(range(30, 63)), (8,))


@by_row
def no_echo(spec: SequenceSpec, tokens: list[int], logits: Tensor) -> Tensor:
    """Bans by sequence (its seed), position (its parity) and history (the last four tokens): a new tensor."""
    changed = logits.clone()
    changed[(len(tokens) + spec.seed) % 2 :: 2] -= 4.0
    changed[list(tokens[-4:])] = -torch.inf
    return changed


def rising(groups: Sequence[RowGroup], logits: Tensor) -> Tensor:
    """Prefers tokens above the newest one: for all rows at once, a new tensor."""
    newest = torch.tensor([token for group in groups for token in (group.tokens[-1], *group.draft)])
    return logits - 3.0 * (torch.arange(logits.shape[1]) <= newest.unsqueeze(1))


BOTH: tuple[LogitsProcessor, ...] = (no_echo, rising)


def make_service(
    in_target: Sequence[LogitsProcessor],
    in_draft: Sequence[LogitsProcessor],
    num_draft_tokens: int,
) -> InProcessService:
    return InProcessService(
        backend(ModelTarget, make_model("llama"), processors=in_target),
        backend(ModelDrafter, add_noise(make_model("llama"), 0.06), processors=in_draft),
        num_draft_tokens,
    )


def make_cases(temperature: float, **sampling: object) -> list[Case]:
    params = SamplingParams(temperature=temperature, **sampling)  # type: ignore[arg-type]
    return [Case(prompt, 20, params, seed=6 + i) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
def test_a_processor_changes_what_is_chosen_and_drafts_do_not(temperature: float) -> None:
    cases = make_cases(temperature, frequency_penalty=0.3)
    unchanged, _ = run(make_service((), (), 0), cases)
    plain, _ = run(make_service(BOTH, (), 0), cases)
    assert all(a != b for a, b in zip(plain, unchanged, strict=True))
    for case, output in zip(cases, plain, strict=True):
        log = [*case.prompt, *output]
        assert all(log[i] not in log[max(i - 4, 0) : i] for i in range(len(case.prompt), len(log)))
    in_both, with_both = run(make_service(BOTH, BOTH, 4), cases)
    in_target, with_target = run(make_service(BOTH, (), 4), cases)
    assert in_both == in_target == plain
    assert with_both.acceptance_rate > 0.2
    assert with_both.acceptance_rate > with_target.acceptance_rate + 0.1
    assert [run(make_service(BOTH, BOTH, 4), [case])[0][0] for case in cases] == plain


def test_a_processor_is_called_once_a_step_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all rows of it, of the drafts under verification too."""
    calls: dict[str, list[int]] = {"target": [], "draft": []}

    def seen(name: str) -> LogitsProcessor:
        return lambda groups, logits: calls[name].append(len(logits))

    service = make_service((seen("target"),), (seen("draft"),), 4)
    assert service.drafter is not None
    wanted: dict[str, list[int]] = {"target": [], "draft": []}
    for name, machine in (("target", service.target), ("draft", service.drafter)):
        runner = machine._backend._runner
        forward = runner.forward

        def count(rows: Sequence[RowInput], name: str = name, forward: Any = forward, **more: Any) -> Tensor:
            logits = forward(rows, **more)
            if len(logits):
                wanted[name].append(len(logits))
            return logits

        monkeypatch.setattr(runner, "forward", count)
    run(service, make_cases(1.0))
    assert calls == wanted
    assert max(calls["target"]) > 5, "the rows of several sequences come together"


def test_a_processor_that_leaves_one_token_decides_it() -> None:
    """A row that leaves one token decides it, whatever was drafted."""

    @by_row
    def counts_up(spec: SequenceSpec, tokens: list[int], logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[3 + (spec.seed + len(tokens)) % (VOCAB_SIZE - 3)] = 0.0
        return only

    cases = make_cases(1.0)
    wanted = [
        [3 + (case.seed + len(case.prompt) + i) % (VOCAB_SIZE - 3) for i in range(case.max_tokens)] for case in cases
    ]
    for in_draft, rate in (((counts_up,), 1.0), ((), 0.1)):
        outputs, stats = run(make_service((counts_up,), in_draft, 4), cases)
        assert outputs == wanted
        assert stats.acceptance_rate == 1.0 if rate == 1.0 else stats.acceptance_rate < rate
