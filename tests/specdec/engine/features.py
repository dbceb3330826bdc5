"""The demo pair with one feature more: whatever the target's weights, its texts are those of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

from cluster.models.demos import demo_folder
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams
from specdec.core.types import Adapter
from specdec.drafting.heads import HeadsOptions
from specdec.drafting.ngram import NgramOptions
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.engine.pair import PairedTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.sampling.pipeline import Sampler
from tests.specdec.drafting.eagle3_folders import write_eagle3
from tests.specdec.engine.overlap import OverlapService
from tests.specdec.engine.pairs import Case, collect, greedy, run
from tests.specdec.engine.schemas import grammar_of
from tests.specdec.engine.test_hostile_network import DRAFTER, TARGET, HostileService
from tests.specdec.engine.test_processors import BOTH
from tests.thorough.engine.test_after_reasoning import REASONED
from tests.thorough.engine.test_structured import PERSON, matcher_source

Feature = Literal[
    "drafts",
    "pair",
    "grammars",
    "prompt lookup",
    "heads",
    "trees",
    "EAGLE-3",
    "EAGLE-3 trees",
    "hooks",
    "prefix reuse",
    "preemption",
    "branches",
    "kills",
]
PROMPTS = ("def read(path):\n", "class A:\n    def __init__(self", "import sys\nimport os\n", "x = 1\nx = 1\nx = 1\n")
SHARED = "import os\n" * 8
OPTIONS = BackendOptions(max_model_len=256, block_size=4, max_num_seqs=8, skip_parity_check=True)
HEADS = str(demo_folder("heads"))
CHANGES = {
    "heads": {"heads": HeadsOptions(HEADS, 4)},
    "trees": {"heads": HeadsOptions(HEADS, 4, 12)},
    "hooks": {"logits_processors": BOTH},
    # The target's cache holds one whole sequence.
    "preemption": {"max_model_len": 128, "kv_cache_memory": 33 * 4 * 24_576, "max_num_batched_tokens": 64},
}


@cache
def eagle3(num_tokens: int = 60) -> TemporaryDirectory[str]:
    """A head for the demo target, fitted to what that says."""
    source = demo("target")
    tokenizer = load_tokenizer(source)
    stock = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    greedily = SamplingParams(temperature=0.0)
    cases = [Case(tuple(tokenizer.encode(prompt)), num_tokens, greedily, eos_token_ids=(0,)) for prompt in PROMPTS]
    texts = [[*case.prompt, *greedy(stock, case)] for case in cases]
    folder = TemporaryDirectory()
    write_eagle3(Path(folder.name), stock, texts)
    return folder


def demo(role: str, **fields: object) -> ModelSource:
    """A demo model in float32 on the CPU."""
    return ModelSource(str(demo_folder(role)), dtype="float32", device="cpu", **fields)  # type: ignore[arg-type]


def make_cases(source: ModelSource, adapters: Sequence[Adapter | None], feature: Feature) -> list[Case]:
    """Eight texts, at temperatures 0 and 1, each with the next one of the adapters."""
    tokenizer = load_tokenizer(source)
    shared = SHARED if feature in ("prefix reuse", "preemption") else ""
    chosen = {"kills": (None, grammar_of(PERSON), REASONED["by tokens"])}
    grammars = (
        (grammar_of(PERSON),)
        if feature in ("grammars", "heads", "trees", "EAGLE-3", "pair")
        else chosen.get(feature, (None,))
    )
    return [
        Case(
            tuple(tokenizer.encode(shared + PROMPTS[i % len(PROMPTS)])),
            24 + 2 * i,
            SamplingParams(temperature=float(i % 2), grammar=grammars[i % len(grammars)]),
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
    changes = CHANGES.get(feature, {})
    if feature in ("EAGLE-3", "EAGLE-3 trees"):
        changes = {"heads": HeadsOptions(eagle3().name, 4, 12 if feature == "EAGLE-3 trees" else 0, "eagle3")}
    options = replace(OPTIONS, vocab_size=tokenizer_width(load_tokenizer(source)), **changes)
    cases = make_cases(source, adapters, feature)
    plain = InProcessService(build_target(source, replace(options, kv_cache_memory="auto"))[0], None, 0)
    wanted = [run(plain, [replace(case, num_speculative_tokens=0)])[0][0] for case in cases]
    target, built = build_target(source, options)
    drafter, drafting = build_drafter(draft, options, source)
    match feature:
        case "kills":
            of_target = partial(ModelRunner, built.loaded, num_blocks=300, block_size=4)
            of_draft = partial(ModelRunner, drafting.loaded, num_blocks=300, block_size=4)
            for case in cases:  # time passes by steps there, and not while a grammar is compiled
                if case.sampling.grammar is not None:
                    matcher_source().check(case.sampling.grammar)
            counts: Counter[str] = Counter()
            for seed in (1, 2):
                sampler = partial(Sampler, options.vocab_size, grammars=matcher_source())
                hostile = HostileService(of_target, of_draft, seed, sampler=sampler, ngram=NgramOptions(8))
                assert [output.tokens for output in collect(hostile, cases)] == wanted
                for worker in (TARGET, DRAFTER):
                    hostile.count(worker)
                counts += hostile.counts
            kinds = ("promoted", "accepted", "looked up", "stale", "T restarted", "D restarted")
            assert [kind for kind in kinds if not counts[kind]] == [], "the schedules are too kind"
            return wanted
        case "branches":
            service = OverlapService(target, drafter, Plan(4, 8, acceptance_rate=0.5), lambda: 6)
        case "prompt lookup":
            service = InProcessService(target, None, 0, ngram=NgramOptions(8))
        case "heads" | "trees" | "EAGLE-3" | "EAGLE-3 trees":
            service = InProcessService(target, None, 0)
        case "pair":
            service = InProcessService(PairedTarget(target, drafter, 4), None, 0)
        case _:
            service = InProcessService(target, drafter, 4)
    if feature == "prefix reuse":
        run(service, cases)
    outputs, stats = run(service, cases)
    assert outputs == wanted
    assert stats.num_accepted_tokens > 20
    happened = {
        "branches": lambda: service.drafter.counters.num_promoted,
        "prefix reuse": lambda: target.metrics()["num_reused_tokens"],
        "preemption": lambda: target.metrics()["num_evictions"],
    }
    assert feature not in happened or happened[feature]() > 5
    return wanted
