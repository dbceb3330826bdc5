"""A real Prometheus beside a running service, with the configurations and rules of ``specdec render --monitoring``."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from deployments.monitoring import files
from tests.integration.running import RunningService, eventually, free_port

FACTOR = 10
"""By so much every window and every ``for`` of the rules is shorter here than in earnest."""
PERIOD = "1s"
"""Between two scrapes, and between two evaluations of the rules."""
STOP_S = 30.0
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

RAY, PAGE = "prometheus.yml", "prometheus-laptop.yml"
"""The two configurations: Ray's exporters, and the service's own page."""


class Prometheus:
    """Asks a Prometheus by its HTTP interface.

    Args:
        url: Where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now, without those that are no number."""
        found = self._get("query", query=expression)["result"]
        return [series for series in found if not math.isnan(float(series["value"][1]))]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {one["labels"]["alertname"] for one in self._get("alerts")["alerts"] if one["state"] == "firing"}

    def _get(self, what: str, **arguments: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{what}?{urlencode(arguments)}", timeout=30) as answer:
            return json.load(answer)["data"]


@contextmanager
def watched(service: RunningService, name: str, folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus by one of the configurations, with shorter times, on this machine's own address.

    Args:
        service: Whose metrics it scrapes.
        name: ``RAY`` or ``PAGE``.
        folder: For its configuration and its data.
    """
    config = yaml.safe_load(files()[name])
    config["global"] = {"scrape_interval": PERIOD, "evaluation_interval": PERIOD}
    (job,) = config["scrape_configs"]
    job.pop("file_sd_configs", None)
    job["static_configs"] = [{"targets": [_address(service, name)]}]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text(shorter(files()["rules.yml"]))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
        try:
            prometheus = Prometheus(f"http://{address}")
            eventually(lambda: bool(_targets_up(prometheus)), 60, f"it scrapes; see {folder}/log")
            yield prometheus
        finally:
            process.terminate()
            process.wait(STOP_S)


def shorter(rules: str) -> str:
    """The rules with every window and every ``for`` shorter by the factor."""

    def seconds(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, int(found[2]) * SECONDS[found[3]] // FACTOR)}s{found[4]}"

    return re.sub(r"(\[|for: )(\d+)([smhd])(\]|\n)", seconds, rules)


def _address(service: RunningService, name: str) -> str:
    if name == PAGE:
        return service.url.removeprefix("http://")
    return next(found[1] for found in (re.search(r"http://(\S+)/metrics", line) for line in service.lines) if found)


def _targets_up(prometheus: Prometheus) -> list[dict[str, Any]]:
    try:
        return prometheus.query("up == 1")
    except OSError:
        return []
