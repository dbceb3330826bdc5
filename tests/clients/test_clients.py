"""Programs of others against the service as ``make serve`` starts it; behind ``make test-clients``."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import specdec.demo
from tests.clients.fuzz import PROGRAMS, by_status, fuzz
from tests.deployments.http.test_hostile_bodies import JSON, RAW, paths_of
from tests.integration.running import RunningService, eventually, nothing_held

pytestmark = pytest.mark.timeout(900)
logger = logging.getLogger(__name__)

NUM_REQUESTS = 150
"""Of guidellm, at each endpoint."""


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService()
    yield running
    assert running.stop() == 0


def test_thousands_of_made_up_requests_cause_no_server_error(service: RunningService) -> None:
    answers = fuzz(service, examples=250, seed=1, timeout_s=600)
    statuses = by_status(answers)
    logger.warning("%d answers, by status: %s", answers.total(), statuses)
    assert all(200 <= status < 500 for status in statuses), answers
    assert answers.total() >= 2000
    generating = ("POST /v1/completions", "POST /v1/chat/completions")
    assert all(answers[path, 200] >= 0.1 * sum(answers[path, status] for status in statuses) for path in generating)
    eventually(lambda: nothing_held(service), 60, "no sequence and no block is held")


@pytest.mark.parametrize("name", RAW)
def test_a_hostile_body_is_answered(service: RunningService, name: str) -> None:
    body = RAW[name].replace(b'"model": "demo"', f'"model": "{service.model}"'.encode())
    for path in paths_of(body):
        answer = httpx2.post(f"{service.url}{path}", content=body, headers=JSON, timeout=60)
        assert answer.status_code < 500, answer.text
        assert answer.is_success or set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_has_all_its_requests_served(service: RunningService, path: str, tmp_path: Path) -> None:
    tokenizer = f"{specdec.demo.__path__[0]}/target"
    command = [PROGRAMS / "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={service.url},model={service.model},request_format={path}"]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--profile", "kind=concurrent,streams=4"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--output", f"kind=json,path={tmp_path}/report.json"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    logger.warning("guidellm at %s: %s", path, totals)
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
