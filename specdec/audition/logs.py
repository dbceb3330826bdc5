"""Read logs of other servers as samples. Such logs are in OpenAI's format and hold text, not tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.audition.recording import Sample, placed_lines, sample_of
from specdec.core.errors import InvalidParameterError
from specdec.core.params import SamplingParams
from specdec.core.types import Finish
from specdec.core.validation import validated
from specdec.models.describe import describe_model
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.text.prompts import encode_chat, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = Mapping[str, Any]

_FORMS = "a sample, or an object with request and response, with messages, or with prompt and completion"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class AnswerReader:
    """Reads recordings and logs; a log's texts become tokens by the target's tokenizer and chat template.

    A log's line is an object with ``request`` and ``response``, the bodies of completions or chat completions; or with
    ``messages``, of which the assistant's last is the answer; or with ``prompt`` and ``completion``.

    Args:
        target: Whose tokens the answers are taken to be.
        temperature: Of answers whose line does not say; 1 is OpenAI's default.

    Raises:
        ModelLoadError: The target's configuration or tokenizer cannot be read.
    """

    def __init__(self, target: ModelSource, temperature: float = 1.0) -> None:
        self._target = target
        self._temperature = temperature
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def read(self, path: Path) -> Iterator[Sample]:
        """Read a file line by line; empty lines, and answers without a text (tool calls), are skipped.

        A folder is read as its ``*.jsonl`` files, by name.

        Raises:
            InvalidParameterError: A line is neither; the message names file, line and field.
            OSError: The file cannot be read.
        """
        for place, line in placed_lines(path):
            try:
                found = json.loads(line)
                if isinstance(found, dict) and found.keys() & {"messages", "request", "prompt"}:
                    yield from self._samples(found)
                else:
                    yield sample_of(line)
            except (ValueError, InvalidParameterError) as error:
                raise InvalidParameterError("file", f"{place}: {error}") from None

    def _samples(self, line: Json) -> Iterator[Sample]:
        request, answers = _parts(line)
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._target)
            self._model = describe_model(self._target)
        prompt = self._prompt(request)
        for text, reason in answers:
            if not text:
                continue
            output = encode_text(self._tokenizer, text, "response", add_special_tokens=False)
            finish: Finish = "length" if reason == "length" else "stop"
            if finish == "stop" and not request.get("stop") and self._model.eos_token_ids:
                output.append(self._eos())
            asked = request.get("max_completion_tokens") or request.get("max_tokens")
            room = asked if isinstance(asked, int) else self._model.max_model_len - len(prompt)
            yield Sample(
                prompt,
                tuple(output),
                max(room, len(output)),
                self._sampling(request),
                None,
                self._model.eos_token_ids,
                finish,
                owner=str(request.get("user") or ""),
            )

    def _prompt(self, request: Json) -> tuple[int, ...]:
        assert self._tokenizer is not None
        if "messages" in request:
            turns = [
                {**turn, "content": _text(turn.get("content"))} for turn in _objects("messages", request["messages"])
            ]
            return tuple(encode_chat(self._tokenizer, turns, tools=request.get("tools") or ()))
        prompt = request.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise ValueError("prompt must be a text")
        return tuple(encode_text(self._tokenizer, prompt))

    def _sampling(self, request: Json) -> SamplingParams:
        given: dict[str, Any] = {name: request[name] for name in _SAMPLING if request.get(name) is not None}
        return validated(SamplingParams(**({"temperature": self._temperature} | given)), self._model.vocab_size)

    def _eos(self) -> int:
        """The token that ends a turn, as far as the tokenizer can tell."""
        assert self._tokenizer is not None
        own = self._tokenizer.eos_token_id
        return own if isinstance(own, int) and own in self._model.eos_token_ids else self._model.eos_token_ids[0]


def _parts(line: Json) -> tuple[Json, list[tuple[str, str | None]]]:
    """A request, and its answers with their finish reasons.

    Raises:
        ValueError: The line has none of the forms.
    """
    match line:
        case {"request": dict(request), "response": {"choices": list(choices)}}:
            return request, [
                (_text(choice.get("message", choice).get("content", choice.get("text"))), choice.get("finish_reason"))
                for choice in _objects("choices", choices)
            ]
        case {"messages": [*_, {"role": "assistant", "content": content}]}:
            return {**line, "messages": line["messages"][:-1]}, [(_text(content), "stop")]
        case {"prompt": str(), "completion": str(text)}:
            return line, [(text, "stop")]
    raise ValueError(f"a line is {_FORMS}")


def _objects(name: str, value: Any) -> list[Json]:
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return value
    raise ValueError(f"{name} must be a list of objects")


def _text(content: Any) -> str:
    """The text of a message's content, which may come in parts; empty if there is none.

    Raises:
        ValueError: It has other parts than text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError("content must be a text, or a list of parts with text")
