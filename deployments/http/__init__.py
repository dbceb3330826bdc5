"""The OpenAI-style HTTP API, over any token service."""

from deployments.http.app import create_app
from deployments.http.service import ApiSettings, ModelInfo, SequenceRequest, ServedModel, TokenService
from specdec.protocol.ingress import TokenDelta

__all__ = [
    "ApiSettings",
    "ModelInfo",
    "SequenceRequest",
    "ServedModel",
    "TokenDelta",
    "TokenService",
    "create_app",
]
