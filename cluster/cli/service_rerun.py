"""A receipt's request, sent once more to a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from specdec.core.errors import InvalidParameterError, ServiceUnavailableError
from specdec.core.grammar import Grammar
from specdec.core.types import Tokens
from specdec.receipts.contract import contract_difference
from specdec.receipts.format import Receipt, opened

_GRAMMARS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Kinds that a request can name, and how it does."""
_TIMEOUT_S = 600.0


class ServiceRerun:
    """Generates in a service.

    Args:
        url: Of the service, without ``/v1``.
        api_key_file: File with an API key; None sends none.
    """

    def __init__(self, url: str, api_key_file: str | None = None) -> None:
        headers = {}
        if api_key_file is not None:
            try:
                headers["Authorization"] = f"Bearer {Path(api_key_file).read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidParameterError("api_key_file", f"--api-key-file: {error}") from None
        self._url, self._headers = url.rstrip("/"), headers

    def outputs(self, receipt: Receipt) -> list[tuple[Tokens, list[float]]]:
        """One request for all choices; its own receipt must name the same model and numerics.

        Raises:
            InvalidParameterError: It does not, or the request cannot be said in an API's words.
            ServiceUnavailableError: The service does not answer.
        """
        answer = self.ask(request_of(receipt) | {"receipt": True, "return_token_ids": True, "logprobs": 0})
        new = opened(answer["receipt"]).receipt
        if new.model != receipt.model:
            raise InvalidParameterError("receipt", f"the service has another model: {new.model}, not {receipt.model}")
        difference = contract_difference(new.contract, receipt.contract)
        if difference:
            raise InvalidParameterError("receipt", f"numeric_contract: {difference}", "numeric_contract")
        if (new.sampling, new.prompts) != (receipt.sampling, receipt.prompts):
            raise InvalidParameterError("receipt", "the service understands the request otherwise: replay it offline")
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [(tuple(one["token_ids"]), one["logprobs"]["token_logprobs"]) for one in choices]

    def logprob(self, receipt: Receipt, tokens: Tokens) -> float:
        """Drawn as the only token: a prompt that fills the context is refused."""
        body = {"model": receipt.model.name, "prompt": list(tokens[:-1]), "max_tokens": 1, "logprobs": 0}
        answer = self.ask(body | {"allowed_token_ids": [tokens[-1]]})
        return float(answer["choices"][0]["logprobs"]["token_logprobs"][0])

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a completion request; raises like :meth:`outputs`."""
        try:
            answer = httpx.post(f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=_TIMEOUT_S)
            found: dict[str, Any] = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServiceUnavailableError(f"{self._url}: {type(error).__name__}: {error}") from None
        if answer.status_code != 200:
            raise InvalidParameterError("receipt", f"{self._url}: {found.get('error', {}).get('message', found)}")
        return found


def request_of(receipt: Receipt) -> dict[str, Any]:
    """The body of a completion request that a receipt tells of, with its prompts as token ids.

    Raises:
        InvalidParameterError: No request says the same; it names the field.
    """
    sampling, first = receipt.sampling, receipt.choices[0]
    num_samples, rest = divmod(len(receipt.choices), len(receipt.prompts))
    if rest or any(choice.max_tokens != first.max_tokens for choice in receipt.choices):
        raise InvalidParameterError("max_tokens", "its choices have different limits: replay it offline")
    if sampling.bad_words:
        raise InvalidParameterError("bad_words", "bad_words are told as tokens: replay it offline")
    body: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in (
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "temperature"),
            *("top_k", "top_p", "min_p", "ignore_eos"),
        )
    }
    body |= {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias}} if sampling.logit_bias else {}
    for name in ("allowed_token_ids", "stop_token_ids"):
        if getattr(sampling, name):
            body[name] = list(getattr(sampling, name))
    body |= {} if sampling.grammar is None else {"structured_outputs": _structured(sampling.grammar)}
    body |= {"stop": list(receipt.stop)} if receipt.stop else {}
    prompts = [list(prompt) for prompt in receipt.prompts]
    return body | {
        "model": receipt.model.name,
        "prompt": prompts,
        "n": num_samples,
        "max_tokens": first.max_tokens,
        "seed": receipt.seed,
    }


def _structured(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"json_object": True}
    if grammar.kind not in _GRAMMARS:
        raise InvalidParameterError("grammar", f"a grammar of the kind {grammar.kind}: replay it offline")
    return {_GRAMMARS[grammar.kind]: grammar.text}
