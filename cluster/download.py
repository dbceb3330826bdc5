"""Getting a pair's files before anything starts: a wrong name fails at once, and a download shows its progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.config import AppArgs, ModelConfig
from specdec.errors import InvalidParameterError

_NEEDED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a model on the hub that loading reads."""


def fetch_models(args: AppArgs, report: Callable[[str], None]) -> None:
    """Have the files of both models on this machine.

    Args:
        args: What is to be served.
        report: Is given a line before each download; the hub's own library draws the progress.

    Raises:
        InvalidParameterError: A folder does not exist or holds no model, or the hub does not give the model.
    """
    for role, model in (("target", args.target), ("draft", args.draft)):
        if model.model is not None:
            _fetch(f"{role}.model", model.model, model, report)


def _fetch(key: str, name: str, model: ModelConfig, report: Callable[[str], None]) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidParameterError(key, f"{key}: the folder {name} has no config.json")
        return
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InvalidParameterError(key, f"{key}: there is no folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    report(f"getting {name}, from the hub or its cache on this machine")
    token = model.token.get_secret_value() if model.token else None
    try:
        snapshot_download(name, revision=model.revision, token=token, allow_patterns=list(_NEEDED))
    except (OSError, ValueError, HFValidationError) as error:  # all the hub's errors are of these kinds
        reason = " ".join(str(error).split())
        raise InvalidParameterError(key, f"{key}: cannot get {name}: {reason}") from None
