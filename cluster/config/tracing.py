"""Where spans of requests go: a section of the configuration, and its variables."""

from __future__ import annotations

import importlib

from pydantic import Field

from cluster.config.base import StrictModel
from specdec.core.errors import InvalidParameterError

FILE = "ray.serve._private.tracing_utils:default_tracing_exporter"
OTLP = "deployments.metrics.spans:otlp"
OTLP_LIBRARY = "opentelemetry.exporter.otlp.proto.http"


class Tracing(StrictModel):
    """OpenTelemetry traces; a Serve configuration of one's own needs the variables in every pod's environment."""

    exporter: str | None = Field(
        None,
        pattern=r"^(file|otlp|[^\W\d][\w.]*:[^\W\d]\w*)$",
        description="where OpenTelemetry traces of requests go: file (beside Serve's logs), otlp (a collector, over "
        "HTTP; needs the extra otlp), or package.module:function that returns span processors; none: no traces",
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
            hint = "; pip install 'specdec-serve[otlp]'" if self.exporter == "otlp" else ""
            raise InvalidParameterError("tracing.exporter", f"tracing.exporter: {error}{hint}") from None

    def variables(self) -> dict[str, str]:
        """What Serve and OpenTelemetry read from the environment of every process; nothing where nothing is traced.

        Serve's ``tracing_config`` says the same, but its proxies are not told of that (2.60), and without their spans
        it does not see a client's ``traceparent``.
        """
        if self.exporter is None:
            return {}
        variables = {
            "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": {"file": FILE, "otlp": OTLP}.get(self.exporter, self.exporter),
            "RAY_SERVE_TRACING_SAMPLING_RATIO": str(self.sampling_ratio),
        }
        return variables if self.endpoint is None else variables | {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint}
