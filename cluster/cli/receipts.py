"""What ``specdec replay`` and ``specdec audit`` have in common: files of receipts, keys, and the model at hand."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import Parser, add_config_flags
from cluster.config.app import ServiceConfig
from specdec.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from specdec.receipts.audit import Own
    from specdec.receipts.format import Opened
    from specdec.receipts.signing import PublicKey

CONFIG_KEYS = (
    "demo",
    *(f"target.{name}" for name in ("model", "revision", "token", "dtype", "device", "device_map", "quantization")),
    "target.kv_cache_memory",
    "max_model_len",
    "block_size",
    "max_num_batched_tokens",
    "logits_processors",
    "exactness",
    "strict_tile_tokens",
    "receipts",
    "log_level",
)


def add_common_arguments(parser: Parser) -> None:
    """The flags that both commands have."""
    parser.add_argument("--url", metavar="URL", help="ask this service instead of loading the model")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the API key for --url")
    parser.add_argument(
        "--public-key",
        metavar="FILE.pem",
        help="check signatures with this key; default: that of receipts.key_file, else none is checked",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="the service's configuration; flags win over it")
    add_config_flags(parser, only=CONFIG_KEYS)


def public_key(arguments: argparse.Namespace, config: ServiceConfig) -> PublicKey | None:
    """The key that signatures are checked with; None where they are not."""
    from specdec.receipts.signing import load_signing_key, read_public_key

    if arguments.public_key is not None:
        return read_public_key(read_text(arguments.public_key, "public_key"), "--public-key")
    return None if config.receipts.key_file is None else load_signing_key(config.receipts.key_file).public


def read_text(file: str, name: str) -> str:
    """A file's text.

    Raises:
        InvalidParameterError: It cannot be read.
    """
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(name, f"{file}: {error}") from None


def objects(file: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file: one, a list of them, or one a line.

    Raises:
        InvalidParameterError: It holds something else.
    """
    text = read_text(file, "receipt")
    try:
        whole = json.loads(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InvalidParameterError("receipt", f"{file} is no JSON: {error}") from None
    if not all(isinstance(one, dict) for one in found):
        raise InvalidParameterError("receipt", f"{file} must hold receipts, or answers with a receipt")
    yield from found


def own_model(config: ServiceConfig) -> Own:
    """What this process would answer with."""
    from cluster.models.receipts import target_contract
    from cluster.models.sources import target_source
    from specdec.checkpoint.fingerprint import content_hashes
    from specdec.receipts.audit import Own

    source = target_source(config)
    return Own(*content_hashes(source.path, source.revision, source.token), target_contract(config))


def open_answer(value: dict[str, Any], key: PublicKey | None) -> tuple[Opened, dict[int, tuple[int, ...]]]:
    """A receipt, alone or in its answer, and the token ids that the answer shows by choice."""
    from specdec.receipts.format import opened

    if "receipt" not in value:
        return opened(value, key), {}
    choices = value.get("choices") or ()
    shown = {one["index"]: tuple(one["token_ids"]) for one in choices if one.get("token_ids") is not None}
    return opened(value["receipt"], key), shown


def progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)
