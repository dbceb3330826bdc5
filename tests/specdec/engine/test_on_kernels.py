"""An engine whose steps are decided by kernels gives the tokens, and the reports, of one that decides in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from specdec.core.backends import DraftJob, Proposal
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Record
from specdec.models.loading import prepare_model
from specdec.sampling import rows
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.pairs import Case, collect, make_draft
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.models.families import VOCAB_SIZE
from tests.specdec.models.test_finite import BAD, loaded_with

LIMITS = {"max_model_len": 112, "max_num_batched_tokens": 64}


class SometimesBad(ModelDrafter):
    """Proposes at every third place a token that the target cannot read."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        found = zip(jobs, super().propose(jobs), strict=True)
        return [p if p.token is None or len(job.tokens) % 3 else p._replace(token=BAD) for job, p in found]


@interpreted
@pytest.mark.parametrize("most_rows", [100, 4])
def test_tokens_and_reports_are_those_of_torch_and_a_step_is_one_download(most_rows: int) -> None:
    """Also where a step's rows are decided in several parts."""
    edited = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)
    cases = [
        Case((9, 10, 11), 7, edited, seed=1),
        Case((5, 6), 6, SamplingParams(temperature=0.0, bad_words=((3,),), min_tokens=3), seed=2),
        Case((7, 8), 6, replace(edited, temperature=1.0, logprobs=3), seed=3),
    ]

    def generate(on_kernels: bool) -> tuple[object, int, int]:
        target = ModelRunner(loaded_with(float("nan")), num_blocks=40)
        draft = ModelRunner(prepare_model(make_draft("llama", 0.05), "tiny"), num_blocks=40)
        service = InProcessService(
            ModelTarget(target, Sampler(VOCAB_SIZE, on_kernels=on_kernels), **LIMITS),
            SometimesBad(draft, Sampler(VOCAB_SIZE, on_kernels=on_kernels), **LIMITS),
            3,
        )
        with (
            patch.object(rows, "MAX_SLICE_BYTES", 4 * VOCAB_SIZE * most_rows),
            patch.object(Record, "download", autospec=True, side_effect=Record.download) as downloads,
            patch.object(ModelRunner, "spoilt_rows", autospec=True, side_effect=ModelRunner.spoilt_rows) as asked,
        ):
            outputs = [(one.tokens, one.notes.logprobs) for one in collect(service, cases)]
        told = [call.args[1] for call in asked.call_args_list if call.args[0] is target]
        of_target = [call for call in downloads.call_args_list if "decided" in call.args[0].layout.offsets]
        return outputs, len(of_target), sum(flags is not None for flags in told)

    wanted, none, _ = generate(False)
    found, num_downloads, num_told = generate(True)
    assert found == wanted
    assert none == 0
    assert num_downloads == num_told > 4
