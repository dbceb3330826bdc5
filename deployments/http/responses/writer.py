"""The body of a response, and the events of one that is streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial

from deployments.http.context import Api
from deployments.http.errors import ApiError
from deployments.http.generation import Generation, SampleDelta
from deployments.http.job import Job
from deployments.http.logprobs import chat_entries
from deployments.http.messages import AssistantMessage, Json
from deployments.http.responses.kept import ConversationKeeper
from deployments.http.responses.output import Output
from deployments.http.schemas.responses import ResponsesBody
from deployments.http.schemas.responses_tools import FunctionChoice
from deployments.http.tally import answer_metrics
from deployments.http.writing import Event
from specdec.core.types import Finish

_LONG = 1 << 12
"""Characters."""


class ResponseWriter:
    """Writes one response.

    Args:
        api: Its parts.
        job: The chat completion that the response is made of.
        body: What was asked for.
        kept: The response is kept there; None keeps it nowhere.
    """

    end_mark = b""

    def __init__(self, api: Api, job: Job, body: ResponsesBody, kept: ConversationKeeper | None = None) -> None:
        self._job = job
        self._body = body
        self._output = Output(AssistantMessage(job.new_parser()), partial(chat_entries, api.texts))
        self._kept = kept
        # Whoever keeps responses lets no client name them: it could choose the name of another.
        self._id = f"resp_{job.arrival.label if kept is None else uuid.uuid4().hex}"
        self._finish: Finish | None = None
        self._end: Json | None = None
        self._num_events = 0

    @property
    def num_repeated(self) -> int:
        """What it was asked for, and its output; what has parts is not measured, and counts as long."""
        body = self._body
        has_parts = bool(body.tools) or (body.text is not None and body.text.format is not None)
        return len(body.instructions or "") + self._output.num_characters + (_LONG if has_parts else 0)

    def whole(self, choices: Sequence[SampleDelta], generation: Generation) -> Json:
        """The response, at its end."""
        (choice,) = choices
        self._output.read(choice)
        self._finish = choice.finish
        return self._ended(generation)

    def opening(self, generation: Generation) -> list[Event]:
        """A response without output."""
        response = self._response("in_progress")
        return [self._event({"type": f"response.{name}", "response": response}) for name in ("created", "in_progress")]

    def news(self, delta: SampleDelta, generation: Generation, num_sent: int) -> list[Event]:
        """What happens to its items."""
        self._finish = delta.finish
        return [self._event(event) for event in self._output.read(delta)]

    async def settle(self, generation: Generation) -> str:
        """Store the response; where that fails, the response says so."""
        if self._kept is None:
            return ""
        response = self._ended(generation)
        warning = await self._kept.keep(self._id, response, self.num_repeated)
        if warning:
            response |= {"store": False, "warning": warning}
        return warning

    def closing(self, generation: Generation) -> list[Event]:
        """The response, at its end."""
        response = self._ended(generation)
        return [self._event({"type": f"response.{response['status']}", "response": response})]

    def failed(self, error: ApiError) -> list[Event]:
        """The error, and the response as far as it has come."""
        told = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        response = self._response("failed", error={"code": "server_error", "message": str(error)})
        return [self._event(told), self._event({"type": "response.failed", "response": response})]

    def _event(self, data: Json) -> Event:
        event = Event(data | {"sequence_number": self._num_events}, data["type"])
        self._num_events += 1
        return event

    def _ended(self, generation: Generation) -> Json:
        """The response at its end: the same to whoever asks for it."""
        is_whole = self._finish == "stop"
        if self._end is None:
            self._end = self._response(
                "completed" if is_whole else "incomplete",
                completed_at=int(time.time()) if is_whole else None,
                incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
                usage=self._usage(generation),
                **self._metrics(generation),
            )
        return self._end

    def _response(self, status: str, **of_status: object) -> Json:
        """The response with what it was asked for."""
        body, job = self._body, self._job
        sampling = job.sequences[0].spec.sampling
        response: Json = {
            "id": self._id,
            "object": "response",
            "created_at": int(job.arrival.wall_s),
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": job.model.name,
            "output": self._output.written(),
            "usage": None,
            "system_fingerprint": job.fingerprint,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": _text_format(body)},
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "tools": [tool.model_dump() for tool in body.functions],
            "tool_choice": _tool_choice(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "truncation": body.truncation or "disabled",
            "previous_response_id": body.previous_response_id,
            "store": self._kept is not None,
            "background": False,
            "service_tier": "default",
        }
        return response | of_status

    def _usage(self, generation: Generation) -> Json:
        prompt, output = self._job.num_prompt_tokens, generation.num_completion_tokens
        cached = generation.num_cached_tokens
        return {
            "input_tokens": prompt,
            # Nothing is charged for what is cached for later.
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
            "total_tokens": prompt + output,
        }

    def _metrics(self, generation: Generation) -> Json:
        detail = self._body.per_request_spec_decode_metrics
        return answer_metrics(generation.tallies, self._job.num_speculative_tokens, detail)


def _text_format(body: ResponsesBody) -> Json:
    format_ = None if body.text is None else body.text.format
    if format_ is None or format_.type != "json_schema":
        return {"type": "text" if format_ is None else format_.type}
    return {
        "type": "json_schema",
        "name": format_.name,
        "schema": format_.json_schema,
        "strict": format_.strict,
        "description": format_.description,
    }


def _tool_choice(body: ResponsesBody) -> Json | str:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto"
