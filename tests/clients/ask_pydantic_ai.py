"""``pydantic-ai``: agents over either API, and single requests where a call is forced."""

from __future__ import annotations

from typing import Any

from asked import KEY, MOST_TOKENS, NUM_TOKENS, RESULT, TEXT, Order, Weather, tell
from pydantic_ai import Agent, NativeOutput, ToolDefinition
from pydantic_ai.direct import model_request_stream_sync, model_request_sync
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED: Any = [ModelRequest.user_text_prompt(TEXT)]
TOOLS = ModelRequestParameters(
    function_tools=[ToolDefinition(name="Weather", parameters_json_schema=Weather.model_json_schema())]
)
SHORT: Any = {"temperature": 0, "max_tokens": NUM_TOKENS}
LONG: Any = {"temperature": 0, "max_tokens": MOST_TOKENS, "parallel_tool_calls": False}


class NativeOutputs:
    """``OpenAIChatModel``: an object by ``response_format``."""

    kind: Any = OpenAIChatModel
    output: Any = NativeOutput(Order)

    def __init__(self, base_url: str, model: str) -> None:
        self._model = self.kind(model, provider=OpenAIProvider(base_url=base_url, api_key=KEY))
        self._writer: Any = Agent(self._model, output_type=self.output, model_settings=LONG, retries=0)

    def order(self) -> Order:
        return self._writer.run_sync(TEXT).output

    def streamed_order(self) -> Order:
        return self._writer.run_stream_sync(TEXT).get_output()


class Chat(NativeOutputs):
    """``OpenAIChatModel``: an object by a tool, as it is by default."""

    output = Order

    def text(self) -> str:
        return Agent(self._model, model_settings=SHORT).run_sync(TEXT).output

    def pieces(self) -> list[str]:
        stream = Agent(self._model, model_settings=SHORT).run_stream_sync(TEXT)
        return list(stream.stream_text(delta=True, debounce_by=None))

    def call(self) -> tuple[str, str]:
        (call,) = self._ask(ASKED, "required").tool_calls
        return call.tool_name, call.args_as_json_str()

    def streamed_call(self) -> tuple[str, str]:
        settings = LONG | {"tool_choice": "required"}
        with model_request_stream_sync(
            self._model, ASKED, model_settings=settings, model_request_parameters=TOOLS
        ) as stream:
            for _ in stream:
                pass
            (call,) = stream.response.tool_calls
        return call.tool_name, call.args_as_json_str()

    def loop(self) -> str | None:
        answer = self._ask(ASKED, "required")
        (call,) = answer.tool_calls
        result = ToolReturnPart(call.tool_name, RESULT, call.tool_call_id)
        return self._ask([*ASKED, answer, ModelRequest([result])], "none").text

    def _ask(self, messages: list[ModelMessage], choice: str) -> ModelResponse:
        settings = LONG | {"tool_choice": choice}
        return model_request_sync(self._model, messages, model_settings=settings, model_request_parameters=TOOLS)


class NativeOutputsOfResponses(NativeOutputs):
    """``OpenAIResponsesModel``: an object by ``text.format``."""

    kind = OpenAIResponsesModel


class Responses(Chat):
    """``OpenAIResponsesModel``."""

    kind = OpenAIResponsesModel


tell(["pydantic-ai-slim", "openai"], Chat, NativeOutputs, Responses, NativeOutputsOfResponses)
