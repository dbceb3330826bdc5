"""The OpenAI-style HTTP API, over any token service."""

from deployments.openai.app import create_app
from deployments.openai.service import (
    ModelInfo,
    SequenceRequest,
    ServedModel,
    TokenDelta,
    TokenService,
)
from deployments.openai.settings import ApiSettings

__all__ = [
    "ApiSettings",
    "ModelInfo",
    "SequenceRequest",
    "ServedModel",
    "TokenDelta",
    "TokenService",
    "create_app",
]
