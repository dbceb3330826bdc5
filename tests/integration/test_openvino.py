"""A service whose models run by OpenVINO: drafts change no token, a killed target breaks no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.models.demos import demo_folder
from tests.integration.kills import Streams, compared_under_kill
from tests.integration.running import RunningService, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    pytest.importorskip("openvino")
    config: Path = tmp_path_factory.mktemp("openvino") / "service.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "target": {"model": str(demo_folder("target")), "engine": "openvino"},
                "draft": {"model": str(demo_folder("draft")), "engine": "openvino", "quantization": "int8"},
                "replicas": {"target": 2},
                "num_speculative_tokens": 3,
            }
        )
    )
    running = RunningService("--config", str(config))
    yield running
    assert running.stop() == 0


def texts_of(service: RunningService, **fields: object) -> tuple[str, ...]:
    with Streams(service.url, service.model, count=4, max_tokens=60, fields=fields).running() as finish:
        return tuple(stream.text for stream in finish())


def test_drafts_change_no_token(service: RunningService) -> None:
    plain = texts_of(service, num_speculative_tokens=0)
    assert any(plain)
    before = service.count("spec_decode_num_accepted_tokens")

    def has_accepted() -> bool:
        assert texts_of(service) == plain
        return service.count("spec_decode_num_accepted_tokens") > before

    eventually(has_accepted, 120, "a draft token is accepted")


def test_a_killed_target_changes_no_stream(service: RunningService) -> None:
    compared = compared_under_kill(service, "target")
    assert not compared.broken
    assert compared.is_exact
