"""Writes each overlay's ``serve.yaml``, and the pods' environment and grace: ``python -m k8s``."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.render import render
from cluster.launch.serve_config import GRACE, overlays

OF_PODS = {"environment.env": "base/environment.env", GRACE: f"components/pod/{GRACE}"}
"""What all overlays share, and where it stands."""


def files() -> dict[Path, str]:
    """What is generated: the text of each file by its path."""
    rendered = {folder: render(folder / "service.yaml", folder) for folder in sorted(overlays().iterdir())}
    texts = {folder / "serve.yaml": texts["serve.yaml"] for folder, texts in rendered.items()}
    shared = rendered[overlays() / "dev"]
    return texts | {Path(__file__).parent / path: shared[name] for name, path in OF_PODS.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
