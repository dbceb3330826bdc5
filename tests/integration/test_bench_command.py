"""``python -m benchmarks.modes`` as it is typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.modes.__main__ import main
from benchmarks.modes.prompts import CODE_LONG, PROMPTS, prompts_of
from benchmarks.modes.services import Services, is_healthy
from cluster.config.app import ServiceConfig
from cluster.launch.local import LaunchError
from specdec.core.errors import InvalidParameterError

STAND_IN = "benchmarks.backends:stand_in:target=2,draft=0.2,acceptance=0.8"
Capture = pytest.CaptureFixture[str]


def bench(*flags: str) -> int:
    return main(flags)


def test_offline_on_scripted_tokens(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "figures.json"
    work = (
        "--streams",
        "1,3",
        "--temperatures",
        "0,1",
        "--rounds",
        "1",
        "--max-tokens",
        "12",
        "--prompts",
        "code,mixed",
    )
    assert bench("--offline", "--backend", STAND_IN, *work, "--json", str(path)) == 0
    text = capsys.readouterr().out
    assert f"Not real: backend: {STAND_IN}" in text
    body = json.loads(path.read_text())
    kinds = {(row["prompts"], row["temperature"], row["num_streams"], row["variant"]) for row in body["rows"]}
    assert len(kinds) == len(body["rows"]) == 2 * 2 * 2 * 2
    assert all(row["has_equal_texts"] and row["num_emulated_steps"] for row in body["rows"])


def test_offline_on_the_demo_pair(capsys: Capture) -> None:
    memory = ("--target-kv-cache-memory", "64MiB", "--draft-kv-cache-memory", "64MiB", "--max-model-len", "256")
    work = ("--streams", "2", "--rounds", "1", "--max-tokens", "8", "--num-speculative-tokens", "0,2")
    assert bench("--offline", *memory, *work) == 0
    text = capsys.readouterr().out
    assert "target: llama, 12 layers" in text
    assert "Not real" not in text
    assert text.count("| yes |") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--demo", "other"], "demo: must be 'plain', 'hybrid' or 'chat'"),
        (["--streams", "0"], "streams takes whole numbers of at least 1"),
        (["--num-speculative-tokens", "x"], "num_speculative_tokens takes whole numbers"),
        (["--temperatures", "-1"], "temperatures takes numbers from 0 to 2, separated by commas, not -1"),
        (["--temperatures", "0,nan"], "temperatures takes numbers from 0 to 2, separated by commas, not 0,nan"),
        (["--temperatures", "5"], "temperatures takes numbers from 0 to 2, separated by commas, not 5"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--warmup-rounds", "-1"], "warmup_rounds must be at least 0"),
        (["--prompts", "songs"], "'songs' is none of code, code-long, prose, mixed"),
        (["--modes", "fast"], "'fast' is none of"),
        (["--offline", "--modes", "overlap"], "--offline runs in turn"),
        (["--url", "http://127.0.0.1:9", "--modes", "overlap"], "a running service has the mode it has"),
        (["--backend", "fast"], "backend: must be 'package.module:name'"),
        (["--offline", "--backend", "no.such:thing"], "backend: cannot import no.such:thing: ModuleNotFoundError"),
        (
            ["--offline", "--backend", "benchmarks.backends:stand_in:speed=2"],
            "backend: benchmarks.backends:stand_in:speed=2: got an unexpected keyword argument 'speed'",
        ),
        (["--offline", "--url", "http://127.0.0.1:9"], "offline and url exclude each other"),
    ],
)
def test_bad_flags_are_one_line_before_anything_starts(flags: list[str], message: str, capsys: Capture) -> None:
    assert bench(*flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_prompts_are_of_several_lengths() -> None:
    assert len({len(prompts) for prompts in PROMPTS.values()}) > 1
    assert min(map(len, CODE_LONG)) > 50 * min(map(len, PROMPTS["code"]))
    assert prompts_of("prose", 6)[4:] == prompts_of("prose", 2)
    with pytest.raises(InvalidParameterError):
        prompts_of("songs", 1)


def fail(config: ServiceConfig) -> int:
    """A service that ends at once."""
    return 2


def hold(config: ServiceConfig) -> int:
    """A service that answers everything, until it is told to stop."""
    os.execvp("python", ["python", "-c", _SERVER, str(config.port)])
    return 0


_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_service_that_ends_is_reported() -> None:
    message = "service for overlap ended while it started, with exit code 2"
    with pytest.raises(LaunchError, match=message) as caught, Services({"overlap": ServiceConfig()}, fail):
        pass
    assert caught.value.is_users


def test_services_run_side_by_side_and_are_stopped() -> None:
    with Services({"overlap": ServiceConfig(), "sequential": ServiceConfig()}, hold) as services:
        urls = services.urls
        assert set(urls) == {"overlap", "sequential"}
        assert len(set(urls.values())) == 2
        assert all(map(is_healthy, urls.values()))
    assert not any(map(is_healthy, urls.values()))


_BENCH = """
import time
from benchmarks.modes.services import Services
from cluster.config.app import ServiceConfig
from tests.integration.test_bench_command import hold
if __name__ == "__main__":
    with Services({"overlap": ServiceConfig()}, hold) as services:
        print(services.urls["overlap"], flush=True)
        time.sleep(300)
"""


def test_services_are_stopped_when_the_bench_is_told_to_end(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(_BENCH)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert is_healthy(url)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not is_healthy(url)
