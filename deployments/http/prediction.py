"""OpenAI's Predicted Outputs: a text that the answer is expected to be like, to draft from."""

from __future__ import annotations

from deployments.http.context import Api
from deployments.http.sampling import speculation_bound
from deployments.http.schemas.chat import ChatBody
from deployments.http.service import ServedModel
from specdec.core.tokens import NO_TOKENS, SharedTokens
from specdec.text.prompts import encode_text


async def predicted_tokens(api: Api, body: ChatBody, model: ServedModel) -> SharedTokens:
    """The tokens of a request's prediction, at most as many as a sequence may have; none where nothing is drafted.

    Raises:
        InvalidParameterError: The text cannot be encoded.
    """
    text = "" if body.prediction is None else body.prediction.text
    if not text or speculation_bound(body, model) == 0:
        return NO_TOKENS

    def work() -> SharedTokens:
        return SharedTokens(
            encode_text(api.tokenizer, text, "prediction", add_special_tokens=False)[: model.max_model_len]
        )

    return await api.encode(len(text), work)
