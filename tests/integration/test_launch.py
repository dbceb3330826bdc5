"""``specdec serve`` from its start to its end, on a small application."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from cluster.config.environment import RAY_SETTINGS


def test_it_serves_until_ctrl_c_and_leaves_nothing_behind(start):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        service = start("--log-format", "json")
        service.read_until("Ctrl-C stops it.")
        (url,) = re.findall(r"curl (http://127\.0\.0\.1:\d+)/v1/completions", service.output)
        assert re.search(r"\[ *\d+\.\d s\] Ray is up: \d+ cores", service.output)
        (logs,) = re.findall(r"logs: (\S+/logs/serve)\n", service.output)
        assert "TargetServer: starting (loads the model)" in service.output
        assert "TargetServer: ready" in service.output
        told = [(name, value) for name, value in RAY_SETTINGS.items() if name.startswith("RAY_SERVE_")]
        for name, value in [*told, ("RAY_AUTH_MODE", "token")]:
            with urllib.request.urlopen(f"{url}/environment?name={name}", timeout=10) as answer:
                assert answer.read().decode() == value
        lines = [line for log in Path(logs).glob("replica_*.log") for line in log.read_text().splitlines()]
        messages = [json.loads(line)["message"] for line in lines]
        assert any("Finished initializing" in message for message in messages)
        assert not [message for message in messages if "/environment" in message], "no line for each call of Serve's"
        names = {process.name() for process in service.processes()}
        assert {"raylet", "gcs_server", "ray::ProxyActor"} <= names

        os.killpg(service.process.pid, signal.SIGINT)
        assert service.end() == 0, service.output
        assert service.output.splitlines()[-1].endswith("stopped")
        assert "Traceback" not in service.output
        assert service.processes() == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_sigterm_while_ray_starts_stops_what_was_started(start):
    service = start()
    service.read_until("starting Ray")
    deadline_s = time.monotonic() + 60
    while not service.processes() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    service.process.terminate()
    assert service.end() == 0, service.output
    assert service.processes() == []


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_2(start, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    service = start("--target", str(tmp_path / "broken"))
    service.read_until("specdec serve: ")
    assert service.end() == 2
    assert "specdec serve: the weights are broken; logs: " in service.output
    assert "Traceback" not in service.output
    assert service.processes() == []


def test_a_folder_that_does_not_exist_is_refused_before_ray_starts(start):
    service = start("--target", "./missing")
    service.read_until("specdec serve: target.model: there is no folder ./missing")
    assert service.end() == 2
    assert "Ray" not in service.output
