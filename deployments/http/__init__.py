"""The OpenAI-style HTTP API, over any token service."""

from deployments.http.app import create_app
from deployments.http.service import ModelInfo, SequenceRequest, ServedModel, TokenService
from deployments.http.settings import ApiSettings
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
