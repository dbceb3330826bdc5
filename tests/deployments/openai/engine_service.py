"""A token service over both models in this process, for tests of whole answers without a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import specdec.demo
from deployments.openai import ModelInfo, SequenceRequest, ServedModel, TokenDelta
from specdec import BackendOptions, ModelSource, SpeculativeEngine
from specdec.types import Tokens
from tests.deployments.openai.scripted import rounds
from tests.specdec.engine.pairs import Case, collect

MAX_MODEL_LEN = 1024


class EngineService:
    """Answers with the demo pair.

    Args:
        most_draft_tokens: Per round, for requests that name no number.
    """

    def __init__(self, most_draft_tokens: int = 4) -> None:
        sources = [ModelSource(str(Path(specdec.demo.__path__[0]) / name)) for name in ("target", "draft")]
        self._engine = SpeculativeEngine.from_pretrained(*sources, options=BackendOptions(max_model_len=MAX_MODEL_LEN))
        self._most_draft_tokens = most_draft_tokens
        self.opened: list[SequenceRequest] = []
        self.outputs: list[Tokens] = []

    def model_info(self) -> ModelInfo:
        """Of the demo pair."""
        return ModelInfo(ServedModel("demo", "target", MAX_MODEL_LEN, 4096, (0,)), None, self._most_draft_tokens)

    async def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        """Generate it at once, and give it in small pieces."""
        self.opened.append(request)
        spec, count = request.spec, request.spec.num_speculative_tokens
        count = self._most_draft_tokens if count is None else count
        case = Case(request.prompt, spec.max_tokens, spec.sampling, spec.seed, count, spec.eos_token_ids)
        (output,) = collect(self._engine._service, [case])
        self.outputs.append(tuple(output.tokens))
        assert output.finish is not None
        for delta in rounds(output.tokens, 3, output.finish):
            yield delta

    def check_health(self) -> None:
        """It is always well."""
