"""Getting a pair's files before anything starts: a wrong name fails at once, and a download shows its progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cluster.config.app import CHAT_MODEL, AppArgs
from cluster.config.models import ModelConfig
from cluster.models.demos import check_made, demo_folder
from cluster.models.identity import model_dtype
from specdec.core.errors import InvalidParameterError

HUB_TIMEOUT_S = 10.0
"""How long the hub may take to say whether it has a model."""

A = TypeVar("A", bound=AppArgs)
M = TypeVar("M", bound=ModelConfig)

_NEEDED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a model on the hub that loading reads."""
_NOT_NEEDED = ("consolidated*.safetensors",)
"""The same weights once more, for another library."""


def fetch_models(args: A, report: Callable[[str], None]) -> A:
    """Have the files of both models on this machine.

    Args:
        args: What is to be served.
        report: Is given a line before each download; the hub's own library draws the progress.

    Returns:
        The same, with the commit of a model on the hub as its revision: every process, one that starts again later
        among them, loads that one, whatever a branch has become meanwhile.

    Raises:
        InvalidParameterError: A folder does not exist or holds no model, or the hub does not give the model; or the
            draft is to be that of another application.
    """
    if args.draft.application is not None:
        raise InvalidParameterError(
            "draft.application",
            f"draft.application: {args.draft.application} is for Serve's own configuration: name a draft model",
        )
    if args.draft.has_heads and args.draft.heads is None:
        check_made("heads")
    if args.is_demo and args.demo != "plain":
        check_made(args.demo)
        return _chat_demo(args) if args.demo == "chat" else args
    both = (("target", args.target), ("draft", args.draft))
    pinned: dict[str, Any] = {role: _pinned(role, model, report) for role, model in both if model.model is not None}
    return args.model_copy(update=pinned)


def _pinned(role: str, model: M, report: Callable[[str], None]) -> M:
    commit = None if model.model is None else _fetch(f"{role}.model", model.model, model, report)
    return model if commit is None else model.model_copy(update={"revision": commit})


def _chat_demo(args: A) -> A:
    """The chat demo as any other pair of folders."""
    draft = args.draft
    if draft.method == "model":
        draft = draft.model_copy(update={"method": "ngram+model"})
    if "model" in draft.methods:
        own = {"model": str(demo_folder("chat-draft")), "dtype": model_dtype(args, draft)}
        draft = draft.model_copy(update=own)
    chat = {"model": str(demo_folder("chat-target")), "dtype": model_dtype(args, args.target)}
    target = args.target.model_copy(update=chat)
    named = args.served_model_name or (CHAT_MODEL,)
    return args.model_copy(update={"demo": "plain", "target": target, "draft": draft, "served_model_name": named})


def check_models(args: AppArgs, warn: Callable[[str], None]) -> None:
    """Refuse models that no machine could load, and download nothing.

    Args:
        args: What is to be served, maybe by other machines.
        warn: Is given a line where that is unknown: no such folder here, or the hub does not say.

    Raises:
        InvalidParameterError: A folder is here and holds no model, or the hub says that there is no such model.
    """
    for role, model in (("target", args.target), ("draft", args.draft)):
        if model.model is not None:
            _check(f"{role}.model", model.model, model, warn)


def _check(key: str, name: str, model: ModelConfig, warn: Callable[[str], None]) -> None:
    if _is_folder(key, name):
        return
    if _is_path(name):
        warn(f"{key}: there is no folder {name} here; every machine with a replica needs it")
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=model.revision), str):
            return
        token = model.token.get_secret_value() if model.token else None
        HfApi().model_info(name, revision=model.revision, token=token, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise InvalidParameterError(key, f"{key}: there is no model {name} on the hub: {reason}") from None
    except Exception as error:  # no network, say: whatever it is, it does not tell that there is no such model
        warn(f"{key}: {name} cannot be looked at from here: {' '.join(str(error).split())}")


def _is_path(name: str) -> bool:
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1


def _is_folder(key: str, name: str) -> bool:
    """Whether a folder is here; raises where it holds no model."""
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidParameterError(key, f"{key}: the folder {name} has no config.json")
    return folder.is_dir()


def _fetch(key: str, name: str, model: ModelConfig, report: Callable[[str], None]) -> str | None:
    """The commit of a model on the hub; None for a folder."""
    if _is_folder(key, name):
        return None
    if _is_path(name):
        raise InvalidParameterError(key, f"{key}: there is no folder {name}")
    from huggingface_hub import snapshot_download

    report(f"getting {name}, from the hub or its cache on this machine")
    token = model.token.get_secret_value() if model.token else None
    try:
        folder = snapshot_download(
            name, revision=model.revision, token=token, allow_patterns=list(_NEEDED), ignore_patterns=list(_NOT_NEEDED)
        )
    except Exception as error:  # a lost connection is the HTTP client's own kind of error
        reason = " ".join(str(error).split())
        raise InvalidParameterError(key, f"{key}: cannot get {name}: {reason}") from None
    return Path(folder).name
