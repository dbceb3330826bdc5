"""Writes dashboards, rules and alerts beside this file: ``python -m k8s.monitoring``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from k8s.monitoring import resources, service, speculation
from k8s.monitoring.grafana import dashboard_json
from k8s.monitoring.rules import manifest, rules_file

BOARDS = (service.BOARD, speculation.BOARD, resources.BOARD)
FOLDER = Path(__file__).parent
HEAD = "# Written by: python -m k8s.monitoring\n"


def files() -> dict[Path, str]:
    """What is generated: the text of each file by its path."""
    texts = {FOLDER / "dashboards" / f"{board.name}.json": dashboard_json(board) for board in BOARDS}
    return texts | {FOLDER / "rules.yml": _yaml(rules_file()), FOLDER / "prometheusrule.yaml": _yaml(manifest())}


def _yaml(content: dict[str, Any]) -> str:
    return HEAD + yaml.safe_dump(content, sort_keys=False, width=118, allow_unicode=True)


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
