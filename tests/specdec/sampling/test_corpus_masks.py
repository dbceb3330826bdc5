"""The masks of the corpus of schemas are the same in every environment: ``make test-vllm`` runs this in vLLM's, too."""

from __future__ import annotations

import hashlib
import random

from transformers import AutoTokenizer

import specdec.demo
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling.rows import RowGroup
from specdec.structured.compiler import Grammars
from specdec.structured.matchers import Matchers
from tests.specdec.engine.schemas import grammar_of, make_schemas

MOST_TOKENS = 12
MASKS = "4b90a07105328695"


def test_masks_are_those_of_every_environment() -> None:
    """Along a text drawn at random from what each mask allows: where one differs, all that follows does."""
    tokenizer = AutoTokenizer.from_pretrained(f"{specdec.demo.__path__[0]}/target")
    matchers = Matchers(Grammars(tokenizer, len(tokenizer), (0,)))
    digest, num_masks = hashlib.sha256(), 0
    for number, schema in enumerate(make_schemas(208)):
        rng = random.Random(number)
        spec = SequenceSpec(SamplingParams(grammar=grammar_of(schema)), number, 1, MOST_TOKENS, (0,))
        tokens = [1]
        while len(tokens) <= MOST_TOKENS and tokens[-1] != 0:
            (group,), failures = matchers.masked([RowGroup(spec, tokens)])
            assert not failures, f"{number}: {failures}"
            assert group.mask is not None
            mask = group.mask[0].numpy()
            digest.update(mask.tobytes())
            num_masks += 1
            allowed = [token for token in range(len(tokenizer)) if mask[token // 32] >> (token % 32) & 1]
            tokens.append(rng.choice(allowed))
    assert num_masks > 1_500
    assert digest.hexdigest()[:16] == MASKS
