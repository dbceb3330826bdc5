"""A method of heads from outside the tree: it reads states, and its cache is cut back, shared, moved and lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from cluster.config.app import AppArgs
from cluster.models.sources import backend_options
from specdec.core.drafts import Draft, path_to
from specdec.core.errors import InvalidParameterError, ModelLoadError
from specdec.core.params import SamplingParams
from specdec.core.tokens import as_list
from specdec.drafting.heads import HeadDrafter, HeadRow, HeadsOptions, load_heads, with_heads
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.sizes import one_of_each
from tests.specdec.engine.pairs import MAX_MODEL_LEN, TIE, make_model, run
from tests.specdec.models.families import VOCAB_SIZE
from tests.thorough.engine.test_recurrent import make_cases

MODULE = '''
from copy import deepcopy
from dataclasses import replace


class Itself:
    """A copy of the target, with a cache of its own; it reads each token but the first, and nothing of the states."""

    num_tokens, num_bytes, hidden_layers = None, 0, (0,)

    def __init__(self, target):
        self.model = deepcopy(target.model)
        count = len(target.attention_layers)
        for layer in self.model.base_model.layers:
            layer.self_attn.layer_idx += count
        self.cache_layers = tuple(replace(layer, index=layer.index + count) for layer in target.attention_layers)

    def fuse(self, states):
        return states[0]

    def forward(self, features, tokens, positions, **caches):
        output = self.model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=True, **caches)
        return output.last_hidden_state[0]

    def logits(self, features, place):
        return self.model.lm_head(features).float()


def load(path, target):
    """They need no files."""
    return Itself(target)
'''
METHOD = "outside_heads:load"


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_heads.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


Drafts = list[tuple[list[int], Draft]]


def serve(
    family: str, num_blocks: int = 400, chunk: int = 64, tree: int = 0, made: Drafts | None = None
) -> InProcessService:
    """A target with the heads; ``made`` takes all texts that something was drafted for, with the drafts."""
    loaded, heads = load_heads(HeadsOptions("", 4, tree, METHOD), prepare_model(make_model(family), "tiny"))
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=4)
    sampler = Sampler(VOCAB_SIZE)

    class Noted(HeadDrafter):
        def drafts(self, states: Sequence[Tensor], rows: Sequence[HeadRow]) -> list[Draft]:
            for row in rows:  # states are embeddings, each of the token that the one before it came with
                wanted = loaded.model.get_input_embeddings()(torch.tensor(as_list(row.tokens)))[:-1]
                assert cosine_similarity(states[0][row.states][1:], wanted).gt(0.999).all()
            drafts = super().drafts(states, rows)
            if made is not None:
                made.extend((list(map(int, row.text)), draft) for row, draft in zip(rows, drafts, strict=True))
            return drafts

    lengths = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": chunk}
    target = ModelTarget(runner, sampler, **lengths, heads=Noted(heads, runner, sampler, 4, tree))
    return InProcessService(target, None, 0)


def test_the_configuration_names_it() -> None:
    fields = {"target": "t", "draft": {"method": METHOD, "heads": "h"}, "num_speculative_tokens": 5}
    args = AppArgs.model_validate(fields)
    assert args.draft.has_heads
    assert not args.drafts_from_tokens
    assert backend_options(args, args.target).heads == HeadsOptions("h", 5, 0, METHOD)
    missing = AppArgs.model_validate(fields | {"draft": {"method": "outside_heads:gone", "heads": "h"}})
    with pytest.raises(InvalidParameterError, match="cannot import outside_heads:gone"):
        backend_options(missing, missing.target)


SCHEDULES = {"whole": {}, "chunks": {"chunk": 7}, "preempted": {"num_blocks": 36}}


@pytest.mark.parametrize(("family", "tree", "schedule"), one_of_each(["llama", "gemma2"], [0, 10, 10], [*SCHEDULES]))
def test_its_drafts_are_what_it_says_without_a_cache(family: str, tree: int, schedule: str) -> None:
    """A copy of the target that reads no first token: what is refused, moved, shared or lost is so for both."""
    stock, made = make_model(family), Drafts()
    stock.set_attn_implementation("eager")  # by default transformers 5.17 takes what knows no soft cap
    cases = [replace(case, max_tokens=40, eos_token_ids=()) for case in make_cases()]
    wanted, _ = run(serve(family), [replace(case, num_speculative_tokens=0) for case in cases])
    service = serve(family, tree=tree, made=made, **SCHEDULES[schedule])
    for _ in range(2):  # the second time prompts are cached
        assert run(service, cases)[0] == wanted
    metrics = service.target._backend.metrics()
    assert metrics["num_reused_tokens"] > 0
    assert (metrics["num_evictions"] > 0) == (schedule == "preempted")
    drafted = [(text, draft) for text, draft in made if draft.tokens]
    assert len(drafted) > 40
    if schedule == "whole":
        assert {len(draft.tokens) for _, draft in drafted} == {tree or 4}
    for text, draft in drafted[::3]:
        for node, token in enumerate(draft.tokens):
            before = path_to(draft.parents, node)[:-1] if draft.parents else range(node)
            read = [*text[1:], *(draft.tokens[i] for i in before)]
            logits = stock(torch.tensor([read]), use_cache=False).logits[0, -1]
            siblings = [i for i, parent in enumerate(draft.parents) if parent == draft.parents[node]] or [node]
            best = logits.topk(len(siblings)).values[-1]
            assert logits[token] > best - TIE


@pytest.mark.parametrize("tree", [10, 0])
def test_no_token_depends_on_it(tree: int) -> None:
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, top_p=0.95)
        cases = make_cases(sampling)
        wanted, _ = run(serve("llama"), [replace(case, num_speculative_tokens=0) for case in cases])
        outputs, stats = run(serve("llama", tree=tree, chunk=16), cases)
        assert outputs == wanted
        assert stats.num_accepted_tokens > 5


def test_layers_that_are_not_there_are_refused() -> None:
    target = prepare_model(make_model("llama"), "tiny")

    class Deep:
        hidden_layers, cache_layers, num_bytes = (99,), (), 0

    with pytest.raises(ModelLoadError, match=r"tiny does not go with its heads: .* in \[0, \d+\], got 99"):
        with_heads(target, Deep())
