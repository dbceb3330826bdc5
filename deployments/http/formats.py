"""The bodies of answers: completions and chat completions, whole and in chunks.

Log probabilities in OpenAI's two shapes, and those of prompts in vLLM's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from deployments.http.api import Api
from deployments.http.errors import ApiError
from deployments.http.generation import Generation, SampleDelta, ShownToken
from deployments.http.job import Job
from deployments.http.schemas.chat import ChatBody, CompletionBody
from deployments.http.tally import how_it_came
from deployments.http.writing import AssistantMessage, Event, Json, UsageNames, Writer
from specdec.audition.recording import object_of
from specdec.core.types import PromptLogprobs, TokenLogprobs
from specdec.text.detokenizer import TokenTexts

_LOWEST = -9999.0
"""What OpenAI writes for an impossible token; JSON has no infinity."""


class TokenNames(Protocol):
    """How single tokens are written."""

    def text(self, token: int) -> str:
        """The token's name."""
        ...

    def utf8(self, token: int) -> bytes:
        """The token's bytes."""
        ...


class TokenIdNames:
    """Tokens by their ids, as vLLM writes them: ``token_id:7``; no two have the same name.

    Args:
        texts: Give their bytes.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def text(self, token: int) -> str:
        """The token's id."""
        return f"token_id:{token}"

    def utf8(self, token: int) -> bytes:
        """The token's bytes."""
        return self._texts.utf8(token)


def completion_logprobs(
    texts: TokenNames, tokens: Sequence[int], entries: PromptLogprobs, offsets: Sequence[int], num_top: int
) -> dict[str, Any]:
    """The ``logprobs`` object of a completion.

    Args:
        texts: How tokens are written.
        tokens: The tokens; those of the prompt too, where it is echoed.
        entries: One per token; None becomes null.
        offsets: For each token, the number of characters of the choice's text before it.
        num_top: Alternatives asked for; with 0 there are none to list.
    """
    top = [
        None if entry is None else _top_by_text(texts, token, entry, num_top)
        for token, entry in zip(tokens, entries, strict=True)
    ]
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top if num_top else None,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: PromptLogprobs, num_top: int
) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of a choice: for each prompt token, null or a mapping by token id, its own first."""
    return [
        None if entry is None else _by_id(texts, token, entry, num_top)
        for token, entry in zip(tokens, entries, strict=True)
    ]


def chat_logprobs(texts: TokenNames, delta: SampleDelta) -> dict[str, Any] | None:
    """The ``logprobs`` object of a chat completion."""
    return None if delta.logprobs is None else {"content": chat_entries(texts, delta.logprobs), "refusal": None}


def chat_entries(texts: TokenNames, shown: Sequence[ShownToken]) -> list[dict[str, Any]]:
    """For each token an object, as in chat completions."""
    entries = []
    for one in shown:
        top = [_chat_entry(texts, other, logprob) for other, logprob in one.entry.top]
        entries.append(_chat_entry(texts, one.token, one.entry.logprob) | {"top_logprobs": top})
    return entries


def _chat_entry(texts: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.utf8(token))}


def _top_by_text(texts: TokenNames, token: int, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two with the same text the more likely stands."""
    top: dict[str, float] = {}
    for other, logprob in (*entry.top[:num_top], (token, entry.logprob)):
        top.setdefault(texts.text(other), _finite(logprob))
    return top


def _by_id(texts: TokenTexts, token: int, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = {token: (entry.logprob, entry.rank)}
    for rank, (other, logprob) in enumerate(entry.top[:num_top], 1):
        ranked.setdefault(other, (logprob, rank))
    return {
        str(one): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(one)}
        for one, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class ChoicesWriter(Writer):
    """Writes answers of choices: what stands around them is the same in every chunk of an answer.

    Attributes:
        prefix: Of the answer's id.
        kinds: The ``object`` of a whole answer, and of a chunk.
        beside_choices: Fields of a choice that belong to the answer, since all choices have one prompt.
    """

    end_mark = b"data: [DONE]\n\n"
    names = UsageNames("prompt_tokens", "completion_tokens")
    prefix: str
    kinds: tuple[str, str]
    beside_choices: tuple[str, ...] = ()

    def __init__(self, api: Api, job: Job) -> None:
        super().__init__(api, job)
        head = {"id": f"{self.prefix}-{job.context.label}", "created": int(job.context.wall_s)}
        self._head = head | self._versions()
        self._token_names = TokenIdNames(api.texts) if job.body.return_tokens_as_token_ids else api.texts

    @abstractmethod
    def choice_opening(self, index: int) -> Json | None:
        """The choice that a stream begins with, before any token."""

    @abstractmethod
    def choice_chunk(self, delta: SampleDelta) -> Json:
        """A choice with what is new in it."""

    @abstractmethod
    def choice_whole(self, delta: SampleDelta) -> Json:
        """A choice with all there is."""

    def whole(self, choices: Sequence[SampleDelta], generation: Generation) -> Json:
        """A whole answer."""
        body = self._body(self.kinds[0], [self.choice_whole(choice) for choice in choices])
        return body | {"usage": self._usage(generation)} | self._metrics(generation)

    def opening(self, generation: Generation) -> list[Event]:
        """The beginning of each choice that has one."""
        openings = (self.choice_opening(index) for index in range(len(self._job.sequences)))
        return [self._chunk(opening, generation, 0) for opening in openings if opening is not None]

    def news(self, delta: SampleDelta, generation: Generation, num_sent: int) -> list[Event]:
        """One chunk."""
        return [self._chunk(self.choice_chunk(delta), generation, num_sent)]

    def closing(self, generation: Generation) -> list[Event]:
        """The chunk without choices that ends a stream, if it was asked for."""
        metrics = self._metrics(generation)
        if not metrics and not self._job.body.wants_usage_chunk:
            return []
        usage = self._usage(generation) if self._job.body.wants_usage_chunk else None
        return [Event(self._body(self.kinds[1], []) | {"usage": usage} | metrics)]

    def failed(self, error: ApiError) -> list[Event]:
        """The error."""
        return [Event(error.body)]

    def _chunk(self, choice: Json, generation: Generation, num_sent: int) -> Event:
        """A chunk; its usage is that so far where it is wanted, or null where a later one has it."""
        body = self._body(self.kinds[1], [choice])
        if self._job.body.wants_continuous_usage:
            return Event(body | {"usage": self._usage(generation, num_sent)})
        return Event(body | ({"usage": None} if self._job.body.wants_usage_chunk else {}))

    def _body(self, kind: str, choices: list[Json]) -> Json:
        first = [choice for choice in choices if choice["index"] == 0]
        beside = {key: choice[key] for choice in first for key in self.beside_choices if key in choice}
        choices = [
            {key: value for key, value in choice.items() if key not in self.beside_choices} for choice in choices
        ]
        return {**self._head, "object": kind, "model": self._job.model.name, "choices": choices, **beside}

    def _ending(self, delta: SampleDelta) -> Json:
        """How the choice ended, and what else was asked for of its tokens and of its prompt."""
        body = self._job.body
        ending: Json = {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
        if delta.notes is not None:
            offsets = {"text_offset": [shown.offset for shown in delta.logprobs]} if delta.logprobs is not None else {}
            ending["specdec"] = how_it_came(delta.notes, delta.plan) | offsets
        if delta.recording is not None:
            ending["recording"] = object_of(delta.recording)
        if body.return_token_ids:
            ending["token_ids"] = list(delta.token_ids)
        if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            tokens = self._prompt(delta.index)
            entries = prompt_logprobs(self._api.texts, tokens, delta.prompt_logprobs, body.prompt_logprobs)
            ending["prompt_logprobs"] = entries
        return ending

    def _prompt(self, index: int) -> Sequence[int]:
        """The prompt of a choice."""
        return self._job.prompts[index // self._job.num_samples]

    def _prompt_token_ids(self, index: int) -> Json:
        return {"prompt_token_ids": list(self._prompt(index))} if self._job.body.return_token_ids else {}


class CompletionWriter(ChoicesWriter):
    """Writes the answer of ``/v1/completions``."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, api: Api, job: Job) -> None:
        super().__init__(api, job)
        assert isinstance(job.body, CompletionBody)
        self._request = job.body

    def choice_opening(self, index: int) -> Json | None:
        """The prompt's tokens, and its echo, unless that comes with its log probabilities."""
        echo = "" if self._request.echoes_logprobs else self._echo(index)
        if not echo and not self._request.return_token_ids:
            return None
        return self._choice(SampleDelta(index, echo, ())) | self._prompt_token_ids(index)

    def choice_chunk(self, delta: SampleDelta) -> Json:
        """New text."""
        begins = self._request.echoes_logprobs and delta.prompt_logprobs is not None
        return self._choice(delta) | ({"text": self._echo(delta.index) + delta.text} if begins else {})

    def choice_whole(self, delta: SampleDelta) -> Json:
        """All text."""
        text = {"text": self._echo(delta.index) + delta.text}
        return self._choice(delta) | self._prompt_token_ids(delta.index) | text

    def _choice(self, delta: SampleDelta) -> Json:
        choice = {"index": delta.index, "text": delta.text, "logprobs": self._logprobs(delta)}
        return choice | self._ending(delta)

    def _logprobs(self, delta: SampleDelta) -> Json | None:
        if delta.logprobs is None:
            return None
        tokens = tuple(shown.token for shown in delta.logprobs)
        entries: PromptLogprobs = tuple(shown.entry for shown in delta.logprobs)
        start = len(self._echo(delta.index))
        offsets = tuple(start + shown.offset for shown in delta.logprobs)
        if self._request.echoes_logprobs and delta.prompt_logprobs is not None:
            tokens = tuple(self._prompt(delta.index)) + tokens
            entries = delta.prompt_logprobs + entries
            offsets = self._job.echoes[delta.index // self._job.num_samples].offsets + offsets
        return completion_logprobs(self._token_names, tokens, entries, offsets, self._request.logprobs or 0)

    def _echo(self, index: int) -> str:
        return self._job.echoes[index // self._job.num_samples].text if self._request.echo else ""


class ChatWriter(ChoicesWriter):
    """Writes the answer of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    beside_choices = ("prompt_token_ids", "prompt_logprobs")

    def __init__(self, api: Api, job: Job) -> None:
        super().__init__(api, job)
        self._messages = [AssistantMessage(job.new_parser()) for _ in job.sequences]
        # As OpenAI does it: who names a function knows that it is called.
        self._names_function = isinstance(job.body, ChatBody) and job.body.choice == "named"

    def choice_opening(self, index: int) -> Json | None:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        opening = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return opening | self._prompt_token_ids(index)

    def choice_chunk(self, delta: SampleDelta) -> Json:
        """What is new in the message."""
        message = self._messages[delta.index]
        new = message.read(delta.text, delta.finish)
        return self._choice(delta, {"delta": message.delta(new)}, message)

    def choice_whole(self, delta: SampleDelta) -> Json:
        """The whole message."""
        message = self._messages[delta.index]
        message.read(delta.text, delta.finish)
        return self._choice(delta, {"message": message.whole()}, message) | self._prompt_token_ids(delta.index)

    def _choice(self, delta: SampleDelta, said: Json, message: AssistantMessage) -> Json:
        logprobs = chat_logprobs(self._token_names, delta)
        choice = {"index": delta.index, **said, "logprobs": logprobs} | self._ending(delta)
        calls = delta.finish == "stop" and message.calls and not self._names_function
        return choice | ({"finish_reason": "tool_calls"} if calls else {})
