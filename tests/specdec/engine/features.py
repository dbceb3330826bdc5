"""The demo pair with one feature more: whatever the target's weights, its texts are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from cluster.models.demos import demo_folder
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams
from specdec.core.types import Adapter
from specdec.drafting.ngram import NgramOptions
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.in_process import InProcessService
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.overlap import OverlapService
from tests.specdec.engine.pairs import Case, collect, run
from tests.specdec.engine.schemas import grammar_of
from tests.specdec.engine.test_hostile_network import TARGET, HostileService
from tests.specdec.engine.test_processors import BOTH
from tests.thorough.engine.test_structured import PERSON

Feature = Literal["drafts", "grammars", "prompt lookup", "hooks", "prefix reuse", "preemption", "branches", "kills"]
PROMPTS = ("def read(path):\n", "class A:\n    def __init__(self", "import sys\nimport os\n", "x = 1\nx = 1\nx = 1\n")
SHARED = "import os\n" * 8
OPTIONS = BackendOptions(max_model_len=256, block_size=4, max_num_seqs=8, skip_parity_check=True)
CHANGES = {
    "hooks": {"logits_processors": BOTH},
    # The target's cache holds one whole sequence.
    "preemption": {"max_model_len": 128, "kv_cache_memory": 33 * 4 * 24_576, "max_num_batched_tokens": 64},
}


def demo(role: str, **fields: object) -> ModelSource:
    """A demo model in float32 on the CPU."""
    return ModelSource(str(demo_folder(role)), dtype="float32", device="cpu", **fields)  # type: ignore[arg-type]


def make_cases(source: ModelSource, adapters: Sequence[Adapter | None], feature: Feature) -> list[Case]:
    """Eight texts, at temperatures 0 and 1, each with the next one of the adapters."""
    tokenizer = load_tokenizer(source)
    shared = SHARED if feature in ("prefix reuse", "preemption") else ""
    grammar = grammar_of(PERSON) if feature == "grammars" else None
    return [
        Case(
            tuple(tokenizer.encode(shared + PROMPTS[i % len(PROMPTS)])),
            24 + 2 * i,
            SamplingParams(temperature=float(i % 2), grammar=grammar),
            seed=i,
            eos_token_ids=(0,),
            adapter=adapters[i % len(adapters)],
        )
        for i in range(8)
    ]


def assert_texts_are_its_own(
    source: ModelSource, draft: ModelSource, feature: Feature, adapters: Sequence[Adapter | None] = (None,)
) -> list[list[int]]:
    """Eight texts in one batch, drafted, are those that the target gives one at a time without drafts; gives them."""
    options = replace(OPTIONS, vocab_size=tokenizer_width(load_tokenizer(source)), **CHANGES.get(feature, {}))
    cases = make_cases(source, adapters, feature)
    plain = InProcessService(build_target(source, replace(options, kv_cache_memory="auto"))[0], None, 0)
    wanted = [run(plain, [replace(case, num_speculative_tokens=0)])[0][0] for case in cases]
    target, built = build_target(source, options)
    drafter, _, drafting = build_drafter(draft, options, source)
    match feature:
        case "kills":
            makers = [partial(ModelRunner, one.loaded, num_blocks=300, block_size=4) for one in (built, drafting)]
            hostile = HostileService(*makers, seed=1, sampler=partial(Sampler, options.vocab_size))
            outputs = [output.tokens for output in collect(hostile, cases)]
            hostile.count(TARGET)
            assert min(hostile.counts[what] for what in ("accepted", "T restarted", "D restarted")) > 0
            assert outputs == wanted
            return wanted
        case "branches":
            service = OverlapService(target, drafter, Plan(4, 8, acceptance_rate=0.5), lambda: 6)
        case "prompt lookup":
            service = InProcessService(target, None, 0, ngram=NgramOptions(8))
        case _:
            service = InProcessService(target, drafter, 4)
    if feature == "prefix reuse":
        run(service, cases)
    outputs, stats = run(service, cases)
    assert outputs == wanted
    assert stats.num_accepted_tokens > 20
    happened = {
        "branches": lambda: service.drafter.counters.num_promoted,
        "prefix reuse": lambda: target.gauges()["num_reused_tokens"],
        "preemption": lambda: target.gauges()["num_evictions"],
    }
    assert feature not in happened or happened[feature]() > 5
    return wanted
