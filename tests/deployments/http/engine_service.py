"""A token service over both models in this process, for tests of whole answers without a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import specdec.demo
from deployments.http.service import ModelInfo, SequenceRequest, ServedModel
from specdec import BackendOptions, ModelSource, NgramOptions, SpeculativeEngine
from specdec.core.types import Tokens
from specdec.protocol.ingress import TokenDelta
from tests.deployments.http.scripted import rounds
from tests.specdec.engine.pairs import Case, collect

MAX_MODEL_LEN = 1024
DEMO = Path(specdec.demo.__path__[0])


class EngineService:
    """Answers with the demo pair, or another model.

    Args:
        most_draft_tokens: Per round, for requests that name no number.
        target: Folder of the model that decides.
        draft: Folder of its draft model; without one drafts are looked up.
    """

    def __init__(
        self, most_draft_tokens: int = 4, *, target: Path = DEMO / "target", draft: Path | None = DEMO / "draft"
    ) -> None:
        self._engine = SpeculativeEngine.from_pretrained(
            ModelSource(str(target)),
            None if draft is None else ModelSource(str(draft)),
            ngram=NgramOptions(most_draft_tokens) if draft is None else None,
            options=BackendOptions(max_model_len=MAX_MODEL_LEN),
        )
        self._most_draft_tokens = most_draft_tokens
        self.opened: list[SequenceRequest] = []
        self.outputs: list[Tokens] = []

    def model_info(self) -> ModelInfo:
        """The target alone can be named."""
        engine = self._engine
        target = ServedModel("demo", MAX_MODEL_LEN, engine._vocab_size, engine._eos_token_ids)
        return ModelInfo(target, self._most_draft_tokens)

    async def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        """Generate it at once, and give it in small pieces."""
        self.opened.append(request)
        spec, count = request.spec, request.spec.num_speculative_tokens
        count = self._most_draft_tokens if count is None else count
        case = Case(tuple(request.prompt), spec.max_tokens, spec.sampling, spec.seed, count, spec.eos_token_ids)
        (output,) = collect(self._engine._service, [case])
        self.outputs.append(tuple(output.tokens))
        assert output.finish is not None
        for delta in rounds(output.tokens, 3, output.finish):
            yield delta

    def check_health(self) -> None:
        """It is always well."""

    async def check_ready(self) -> None:
        """It is always well."""
