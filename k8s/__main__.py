"""Writes each overlay's ``serve.yaml``, and the pods' environment: ``python -m k8s``."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.render import render
from cluster.launch.serve_config import overlays

ENVIRONMENT = Path(__file__).parent / "base" / "environment.env"


def files() -> dict[Path, str]:
    """What is generated: the text of each file by its path."""
    rendered = {folder: render(folder / "service.yaml", folder) for folder in sorted(overlays().iterdir())}
    texts = {folder / "serve.yaml": texts["serve.yaml"] for folder, texts in rendered.items()}
    return texts | {ENVIRONMENT: rendered[overlays() / "dev"]["environment.env"]}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
