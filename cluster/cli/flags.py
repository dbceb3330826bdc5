"""Command-line flags made from the configuration's keys, so that each flag has its YAML key and each key its flag."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from cluster.cli.vllm_flags import ALIASES, add_vllm_flags, advice, vllm_overrides
from cluster.config.base import allowed_range, choices
from cluster.config.files import config_keys, text_reader
from specdec.core.errors import InvalidParameterError

SHORT_NAMES = {"target.model": "target", "draft.model": "draft"}

COMMON = (
    "target.model",
    "draft.model",
    "demo",
    "host",
    "port",
    "served_model_name",
    "max_model_len",
    "num_speculative_tokens",
    "log_level",
)
"""The keys that help shows first."""

LISTS = ("served_model_name",)
"""Keys whose flag takes several words."""

_NEAR = 0.6
"""How alike two flags must be for one to be suggested in place of the other, from 0 to 1."""


class _Help(argparse.Action):
    """Prints a parser's help and ends the program."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print it."""
        if values not in (None, "all"):
            parser.error(f"--help takes no value but all, not {values}")
        print(parser.format_help(whole=values == "all"), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest known flag when it refuses one.

    ``--help`` shows one screen, ``--help=all`` every flag.

    Attributes:
        further: Flags that only ``--help=all`` shows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "add_help": False, **kwargs})
        self.further: list[argparse.Action] = []
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="all", help="show this help; --help=all: every option"
        )

    def format_help(self, *, whole: bool = False) -> str:
        """The help; without ``whole`` the flags in ``further`` are left out."""
        if whole or not self.further:
            return super().format_help()
        texts = [(action, action.help) for action in self.further]
        try:
            for action, _ in texts:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in texts:
                action.help = text

    def error(self, message: str) -> NoReturn:
        """End the program with one line and exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of ``args``; an unknown flag ends the program with exit code 2."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:  # "-hf" would be read as "-h" with a value
            if not word.startswith("--") and advice(word):
                self.refuse(word)
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            chosen = getattr(found, "parser", self)
            chosen.refuse(rest[0])
        return found

    def refuse(self, argument: str) -> NoReturn:
        """End the program because of an argument nobody knows."""
        known = [flag for action in self._actions for flag in action.option_strings]
        name = argument.partition("=")[0]
        hint = advice(name)
        # Dashes, which all share, would make strangers alike.
        near = difflib.get_close_matches(name.lstrip("-"), [flag.lstrip("-") for flag in known], n=1, cutoff=_NEAR)
        if hint is None and argument.startswith("--") and near:
            hint = f"did you mean --{near[0]}?"
        self.error(f"unknown argument {argument}" + (f"; {hint}" if hint else ""))


def flag_of(path: str) -> str:
    """The flag of a dotted key: ``target.dtype`` is ``--target-dtype``, ``target.model`` is ``--target``."""
    return "--" + SHORT_NAMES.get(path, path).replace(".", "-").replace("_", "-")


def add_service_flags(parser: Parser) -> None:
    """Add what says which service: the model, a file, every key of it, and vLLM's flags."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the target model: hub id or local folder")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    add_config_flags(parser)
    parser.further += add_vllm_flags(parser)


def add_config_flags(parser: Parser, only: Collection[str] | None = None) -> None:
    """Add a flag for each key of the configuration, or for those named in ``only`` (keys or whole sections).

    The common ones stand in a group of their own, the others in a group per section of the YAML file.
    """
    keys = sorted(config_keys(), key=lambda key: COMMON.index(key[0]) if key[0] in COMMON else len(COMMON))
    groups: dict[str, Any] = {}
    for path, field in keys:
        section = path.partition(".")[0]
        if only is not None and path not in only and section not in only:
            continue
        title = "common options" if path in COMMON else section if "." in path else "further options"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        action = _add_flag(groups[title], path, field)
        if path not in COMMON:
            parser.further.append(action)


def _add_flag(group: Any, path: str, field: Any) -> argparse.Action:
    if field.annotation is bool:
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    else:
        kind = {"metavar": _metavar(path, field.annotation), "type": text_reader(field.annotation)}
    if path in LISTS:
        kind["nargs"] = "+"
    names = [flag_of(path), *([ALIASES[path]] if path in ALIASES else [])]
    kind |= {"dest": path, "default": argparse.SUPPRESS, "help": _help(path, field)}
    action: argparse.Action = group.add_argument(*names, **kind)
    return action


def config_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration keys that were given as flags, with their values as they came.

    Raises:
        InvalidParameterError: The first word and ``--target`` name two models.
    """
    given = vars(arguments)
    overrides = vllm_overrides(arguments) | {path: given[path] for path, _ in config_keys() if path in given}
    model = given.get("model")
    if model is not None and model.lower() in ("true", "false"):
        raise InvalidParameterError("model", f"MODEL: {model} is no model; flags that are on or off take no value")
    if model is not None and overrides.setdefault("target.model", model) != model:
        raise InvalidParameterError(
            "target.model", f"target.model: named twice, by MODEL ({model}) and by --target: leave one out"
        )
    return overrides


def _metavar(path: str, annotation: Any) -> str:
    allowed = choices(annotation)
    return "{" + ",".join(allowed) + "}" if allowed else path.rpartition(".")[2].upper()


def _help(path: str, field: Any) -> str:
    allowed = allowed_range(field)
    default = field.get_default(call_default_factory=True)
    tail = f"; default {default}" if default not in (None, {}, ()) else ""
    return f"{field.description}{f' ({allowed})' if allowed else ''}{tail} [{path}]".replace("%", "%%")
