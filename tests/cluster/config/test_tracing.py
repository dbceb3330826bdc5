"""The exporter of traces: what Serve is told of it, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.config.app import FILE, Tracing
from cluster.config.environment import prepare_for_ray
from cluster.config.names import OTLP


def test_nothing_is_set_where_nothing_is_traced() -> None:
    assert Tracing().variables() == {}
    Tracing().check()


@pytest.mark.parametrize(("exporter", "path"), [("file", FILE), ("otlp", OTLP), ("os.path:join", "os.path:join")])
def test_exporters_have_short_names(exporter: str, path: str) -> None:
    assert Tracing(exporter=exporter, sampling_ratio=0.5).variables() == {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": path,
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "0.5",
    }


def test_the_collector_is_named_to_all_processes() -> None:
    environment = {"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"}
    prepare_for_ray(environment, Tracing(exporter="otlp", endpoint="http://a").variables())
    assert environment["OTEL_SERVICE_NAME"] == "mine"
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://a", "the key wins"


def test_serve_reads_these_variables_and_has_this_exporter() -> None:
    from ray.serve._private import constants

    assert constants.DEFAULT_TRACING_EXPORTER_IMPORT_PATH == FILE
    for name in Tracing(exporter="file").variables():
        assert hasattr(constants, name) or not name.startswith("RAY_")
