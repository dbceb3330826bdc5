"""The exporter of traces: what Serve is told of it, and what is refused before anything starts."""

from __future__ import annotations

import sys

import pytest

from cluster.config.app import FILE, OTLP_LIBRARY, ServiceConfig, Tracing
from cluster.config.environment import prepare_for_ray
from cluster.config.files import load_config
from cluster.config.names import OTLP
from cluster.launch.local import LocalService
from specdec.core.errors import InvalidParameterError


def test_nothing_is_set_where_nothing_is_traced() -> None:
    assert Tracing().variables() == {}
    Tracing().check()


@pytest.mark.parametrize(("exporter", "path"), [("file", FILE), ("otlp", OTLP), ("os.path:join", "os.path:join")])
def test_exporters_have_short_names(exporter: str, path: str) -> None:
    assert Tracing(exporter=exporter, sampling_ratio=0.5).variables() == {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": path,
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "0.5",
    }


@pytest.mark.parametrize("exporter", ["no.such.module:f", "os.path:no_such_function", "os.path:sep"])
def test_an_exporter_that_is_not_there_is_refused_before_ray_starts(exporter: str) -> None:
    lines: list[str] = []
    service = LocalService(ServiceConfig(tracing=Tracing(exporter=exporter)), lines.append)
    with pytest.raises(InvalidParameterError, match=r"^tracing\.exporter: "):
        service.start_ray()
    assert lines == []


def test_otlp_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, OTLP_LIBRARY, None)
    with pytest.raises(InvalidParameterError, match=r"tracing\.exporter: .*; pip install 'specdec-serve\[otlp\]'"):
        Tracing(exporter="otlp").check()


@pytest.mark.parametrize(
    ("key", "value"),
    [("exporter", "jaeger"), ("exporter", "a.b:"), ("endpoint", "localhost:4318"), ("sampling_ratio", "1.5")],
)
def test_values_that_say_nothing_are_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidParameterError, match=rf"tracing\.{key}"):
        load_config(None, {f"tracing.{key}": value})


def test_an_endpoint_is_of_otlp_alone() -> None:
    with pytest.raises(InvalidParameterError, match=r"tracing\.endpoint: needs tracing\.exporter: otlp"):
        Tracing(exporter="file", endpoint="http://localhost:4318").check()


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
