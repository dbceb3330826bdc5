"""What ``specdec serve`` tells of its start, and whose fault a failed one is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.config.app import ServiceConfig
from cluster.launch import local as launch
from cluster.launch.local import LocalService, describe, first_failure, last_line
from cluster.launch.supervise import OwnProcesses


def test_readiness_is_asked_for_directly_whatever_proxy_the_environment_names(monkeypatch):
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(launch, "HTTP_TIMEOUT_S", 5.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        LocalService(ServiceConfig(port=server.server_port), lambda line: None)._wait_for_http()
        server.shutdown()


def test_own_processes_are_those_started_since():
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    before = subprocess.Popen(command)
    own = OwnProcesses()
    after = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.Popen({command}).wait()"])
    try:
        deadline_s = time.monotonic() + 30
        while len(own.alive()) < 2 and time.monotonic() < deadline_s:
            own.note()
        assert {process.pid for process in own.alive()} > {after.pid}
        after.kill()
        after.wait()
        assert own.stop(0.0) == 1
        assert own.alive() == []
        assert before.poll() is None
    finally:
        for process in (before, after):
            process.kill()
            process.wait()


class Deployment:
    def __init__(self, message, status="UPDATING"):
        self.message, self.status = message, status


class Application:
    def __init__(self, status, *messages):
        self.status = status
        self.message = "the application's own"
        self.deployments = {str(index): Deployment(message) for index, message in enumerate(messages)}


REFUSED = "x\nspecdec.core.errors.ModelLoadError: y"


@pytest.mark.parametrize(
    ("application", "failure"),
    [
        (None, None),
        (Application("DEPLOYING", "", "taking long"), None),
        (Application("RUNNING", ""), None),
        (Application("DEPLOYING", "", REFUSED), REFUSED),
        (Application("DEPLOY_FAILED", "", "RuntimeError: z"), "RuntimeError: z"),
        (Application("DEPLOY_FAILED", ""), "the application's own"),
        (Application("UNHEALTHY", "gone"), "gone"),
    ],
)
def test_an_error_of_the_users_ends_the_start_at_once(application, failure):
    assert first_failure(application) == failure


@pytest.mark.parametrize(
    ("states", "message", "words"),
    [
        ({"RUNNING": 1}, "", "ready"),
        ({"RUNNING": 1}, "of the past", "ready"),
        ({"STARTING": 1}, "", "starting"),
        ({"STARTING": 1}, "no node has that", "starting: no node has that"),
        ({"RUNNING": 1, "STARTING": 1, "STOPPING": 1}, "slow", "starting (1 of 2): slow"),
        ({"RUNNING": 2}, "", "ready (2 of 2)"),
    ],
)
def test_a_deployment_in_a_few_words(states, message, words):
    deployment = Deployment(message)
    deployment.replica_states = states
    assert describe(deployment) == words


def test_a_deployment_may_need_no_replica():
    for status, words in (("UPDATING", "starting (loads the model)"), ("HEALTHY", "none is needed now")):
        deployment = Deployment("", status)
        deployment.replica_states = {"STOPPING": 1}
        assert describe(deployment, loads_model=True) == words


SERVES = "Deployment 'TargetServer' in application 'specdec' has 1 replicas that have taken more than 30s to "
UNSCHEDULED = (
    f"{SERVES}be scheduled. This may be due to waiting for the cluster to auto-scale or for a runtime environment to "
    "be installed. Resources required for each replica: {'CPU': 1.0}, total resources available: {}. "
    "Use `ray status` for more details."
)


@pytest.mark.parametrize(
    ("states", "message", "words"),
    [
        ({"STARTING": 1}, "", "starting (loads the model)"),
        ({"RUNNING": 1, "STARTING": 1}, "", "starting (1 of 2, loads the model)"),
        ({"RUNNING": 1}, "", "ready"),
        (
            {"STARTING": 1},
            UNSCHEDULED,
            "starting (loads the model): its process is still being started after 30 s or waits for room; "
            "it asks for {'CPU': 1.0}",
        ),
        (
            {"STARTING": 1},
            f"{SERVES}initialize.\nThis may be caused by a slow __init__ or reconfigure method.",
            "starting (loads the model): takes more than 30 s",
        ),
        ({"STARTING": 1}, "x\nRuntimeError: y", "starting (loads the model): RuntimeError: y"),
    ],
)
def test_slow_replicas_are_told_in_words_of_our_own_and_failed_ones_in_theirs(states, message, words):
    deployment = Deployment(message)
    deployment.replica_states = states
    assert describe(deployment, loads_model=True) == words


@pytest.mark.parametrize(
    ("message", "words"), [("", ""), (UNSCHEDULED, ""), ("x\nRuntimeError: y", ": RuntimeError: y")]
)
def test_who_says_what_it_does_is_there_whatever_serve_thinks(message, words):
    deployment = Deployment(message)
    deployment.replica_states = {"STARTING": 1}
    stage = "loading x: 3.1 of 7.5 GB"
    assert describe(deployment, loads_model=True, stage=stage) == f"starting ({stage}){words}"


def test_the_last_line_names_the_error():
    message = (
        "The deployment failed 3 times:\nTraceback:\n  File x\nspecdec.core.errors.ModelLoadError: no folder\nRetrying."
    )
    assert last_line(message) == "specdec.core.errors.ModelLoadError: no folder"
    assert last_line("nothing here") == "nothing here"


def test_serve_is_imported_only_when_the_application_has_been(monkeypatch):
    imported = []

    def preload():
        time.sleep(0.3)
        imported.append("application")

    class StartedError(Exception):
        pass

    def start(**options):
        raise StartedError(*imported)

    service = LocalService(ServiceConfig(), lambda line: None)
    service._preloading = threading.Thread(target=preload)
    service._preloading.start()
    monkeypatch.setattr("ray.serve.start", start)
    with pytest.raises(StartedError, match="application"):
        service.deploy()
