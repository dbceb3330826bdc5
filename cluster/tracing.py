"""Where spans of requests go: a section of the configuration, in Serve's terms."""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import Field

from cluster.strict import StrictModel
from specdec.errors import InvalidParameterError

OTLP = "deployments.tracing:otlp"
OTLP_LIBRARY = "opentelemetry.exporter.otlp.proto.http"


class Tracing(StrictModel):
    """OpenTelemetry traces; a Serve configuration of one's own sets the same under ``tracing_config``."""

    exporter: str | None = Field(
        None,
        pattern=r"^(file|otlp|[^\W\d][\w.]*:[^\W\d]\w*)$",
        description="where OpenTelemetry traces of requests go: file (beside Serve's logs), otlp (a collector, over "
        "HTTP; needs specdec[otlp]), or package.module:function that returns span processors; none: no traces",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="the collector of otlp, as in http://localhost:4318; else OpenTelemetry's own variables say",
    )
    sampling_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests that are traced; a client's traceparent decides for its own"
    )

    def check(self) -> None:
        """Refuse an exporter that no process could load, and an endpoint that none would use.

        Raises:
            InvalidParameterError: It is not there, or is not ``otlp`` where there is an endpoint.
        """
        if self.endpoint is not None and self.exporter != "otlp":
            raise InvalidParameterError("tracing.endpoint", "tracing.endpoint: needs tracing.exporter: otlp")
        if self.exporter in (None, "file"):
            return
        module, _, function = (OTLP if self.exporter == "otlp" else str(self.exporter)).partition(":")
        try:
            if self.exporter == "otlp":
                importlib.import_module(OTLP_LIBRARY)
            elif not callable(getattr(importlib.import_module(module), function)):
                raise TypeError(f"{function} is no function")
        except (ImportError, AttributeError, TypeError) as error:
            hint = "; install specdec[otlp]" if self.exporter == "otlp" else ""
            raise InvalidParameterError("tracing.exporter", f"tracing.exporter: {error}{hint}") from None

    def serve_config(self) -> dict[str, Any] | None:
        """Serve's ``tracing_config``; None leaves it to Serve's own variables."""
        if self.exporter is None:
            return None
        path = {"file": "", "otlp": OTLP}.get(self.exporter, self.exporter)
        return {"enabled": True, "exporter_import_path": path, "sampling_ratio": self.sampling_ratio}
