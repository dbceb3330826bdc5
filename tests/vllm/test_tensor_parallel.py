"""Two workers in processes of their own: every one decides, all alike."""

from __future__ import annotations

import pytest

from specdec.engine.target import ModelTarget
from tests.specdec.engine.contract import SAMPLINGS, Soak, generate
from tests.vllm.engines import make
from tests.vllm.models import VOCAB_SIZE, prompts, spec_of


@pytest.mark.timeout(900)
def test_two_workers_decide_as_one(reference: ModelTarget) -> None:
    target = make(engine_args={"tensor_parallel_size": 2}, max_num_seqs=8)
    try:
        for name in ("T0", "T1", "mixed"):
            spec = [spec_of(SAMPLINGS[name], i, max_tokens=24) for i in range(len(prompts()))]
            wanted, _ = generate(reference, prompts(), spec.__getitem__)
            outputs, seen = generate(
                target, prompts(), spec.__getitem__, lambda i, log, w=wanted: w[i][len(log) - len(prompts()[i]) :][:4]
            )
            assert outputs == wanted
            assert seen["accepted"] == seen["drafted"] > 0
        Soak(target, reference, prompts(), vocab_size=VOCAB_SIZE, most_open=6).run(150)
    finally:
        target.close()
