"""Command-line flags made from the configuration's keys, so that each flag has its YAML key and each key its flag."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterator
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml

from cluster.config import ServiceConfig
from cluster.strict import StrictModel, allowed_range, submodel

SHORT_NAMES = {"target.model": "target", "draft.model": "draft"}


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest known flag when it refuses one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """End the program with one line and exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of ``args``; an unknown flag ends the program with exit code 2."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            chosen = getattr(found, "parser", self)
            chosen.refuse(rest[0])
        return found

    def refuse(self, argument: str) -> NoReturn:
        """End the program because of an argument nobody knows."""
        known = [flag for action in self._actions for flag in action.option_strings]
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0) if argument.startswith("-") else []
        self.error(f"unknown argument {argument}" + (f"; the nearest known one is {near[0]}" if near else ""))


def config_keys(model: type[StrictModel] = ServiceConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and field of every leaf of the configuration."""
    for name, field in model.model_fields.items():
        section = submodel(model, name)
        if section is None:
            yield prefix + name, field
        else:
            yield from config_keys(section, f"{prefix}{name}.")


def flag_of(path: str) -> str:
    """The flag of a dotted key: ``target.dtype`` is ``--target-dtype``, ``target.model`` is ``--target``."""
    return "--" + SHORT_NAMES.get(path, path).replace(".", "-").replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add a flag for each key of the configuration, or for those named in ``only`` (keys or whole sections)."""
    group = parser.add_argument_group("configuration", "each flag is a key of the YAML file, given in brackets")
    for path, field in config_keys():
        if only is not None and path not in only and path.partition(".")[0] not in only:
            continue
        group.add_argument(
            flag_of(path),
            dest=path,
            default=argparse.SUPPRESS,
            metavar=_metavar(path, field.annotation),
            type=_reader(field.annotation),
            help=_help(path, field),
        )


def config_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration keys that were given as flags, with their values as they came."""
    given = vars(arguments)
    return {path: given[path] for path, _ in config_keys() if path in given}


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _metavar(path: str, annotation: Any) -> str:
    choices = _choices(annotation)
    return "{" + ",".join(choices) + "}" if choices else path.rpartition(".")[2].upper()


def _reader(annotation: Any) -> Any:
    """Mappings are written as YAML on the command line; everything else is left to the configuration's own checks."""
    return yaml.safe_load if "dict[" in str(annotation) else str


def _help(path: str, field: Any) -> str:
    allowed = allowed_range(field)
    default = field.get_default(call_default_factory=True)
    tail = f"; default {default}" if default not in (None, {}, ()) else ""
    return f"{field.description}{f' ({allowed})' if allowed else ''}{tail} [{path}]".replace("%", "%%")
