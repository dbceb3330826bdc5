"""The documents: as short as they should be, and true where a machine can tell."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.flags import flag_of
from cluster.cli.keys import keys_table
from cluster.cli.main import build_parser
from cluster.cli.vllm_flags import ALIASES, INSTEAD, add_vllm_flags
from cluster.config.app import ServiceConfig
from cluster.config.base import keys_of, validated
from cluster.config.files import config_keys
from cluster.config.live import LIVE_KEYS
from cluster.config.names import DRAFT_APPLICATION
from cluster.launch.applications import draft_args
from cluster.models.demos import demo_folder
from deployments.metrics.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

MOST_WORDS_OF_A_KEY = 15
MOST_BYTES_OF_A_PICTURE = 200_000
FLAGS_OF_OTHERS = (
    *("--build-arg", "--device", "--matmul-precision", "--read-only", "--secret", "--set", "--steps"),
    "--stop-timeout",
)
"""Of docker, helm and scripts, that begin a code span."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_words(path: Path) -> int:
    """Words with a letter or a digit in them: bars of tables are none."""
    return sum(re.search(r"\w", word) is not None for word in path.read_text().split())


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Commands of ours in indented blocks and in code spans, as words."""
    spans = re.findall(r"`((?:specdec|make) [a-z][^`]*)`", text)
    indented = re.findall(r"^ {4}((?:specdec|make) .*)$", text, flags=re.MULTILINE)
    ours = [re.split(r" [>|] ", " ".join(span.split()))[0] for span in spans + indented if "..." not in span]
    found = [shlex.split(command) for command in ours]
    return [words for words in found if words[0] == "make" or len(words) > 2]


def test_the_table_of_keys_is_that_of_the_configuration() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    assert "\n".join(keys_table()) in text, "run: make tables"


def test_a_key_is_described_in_fifteen_words_at_most() -> None:
    long = {path for path, field in config_keys() if len((field.description or "").split()) > MOST_WORDS_OF_A_KEY}
    assert long == set()


def test_the_readme_is_as_short_as_it_should_be() -> None:
    assert num_words(ROOT / "README.md") <= 1_200


def test_the_measured_rows_of_the_readme_are_copied() -> None:
    section = (ROOT / "README.md").read_text().split("\n## How fast\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 4
    assert "\n".join(rows) in (ROOT / "docs/measurements.md").read_text()


@pytest.mark.parametrize(
    ("file", "section", "columns"),
    [
        ("README.md", "Beside the others", slice(2, None)),
        ("docs/for-vllm-users.md", "What differs", slice(1, 2)),
        ("docs/for-dynamo-users.md", "What differs", slice(1, 2)),
    ],
)
def test_claims_of_other_servers_have_a_source_and_a_date(file: str, section: str, columns: slice) -> None:
    text = (ROOT / file).read_text()
    rows = [line for line in text.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [cell for row in rows[2:] for cell in row.strip("|").split(" | ")[columns]]
    assert len(cells) > 5
    assert [cell for cell in cells if "](https://" not in cell] == []
    assert re.search(r"read\s+on\s+2\d{3}-\d\d-\d\d", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{name(path)}: {target}"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=name)
def test_commands_can_be_given(path: Path) -> None:
    parser = build_parser()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, *words in commands(path.read_text()):
        if program == "make":
            assert words[0] in targets, f"{name(path)}: make {words[0]}"
        elif not any(word.isupper() or "[" in word for word in words):
            parser.parse_args(words)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_that_need_what_tests_lack_say_so(path: Path) -> None:
    """Ours are parsed above."""
    typed = re.findall(r"^ {4}((?:docker|helm|kubectl|python|ray|serve) .*)$", path.read_text(), flags=re.MULTILINE)
    assert [line for line in typed if not re.search(r" # (on a cluster|needs (a GPU|Docker))$", line)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_configurations_are_accepted(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    for block in blocks(path.read_text(), "yaml"):
        keys = yaml.safe_load(block)
        if "applications" in keys:
            check_applications(keys)
        elif "spec" not in keys:  # else a part of a RayService
            validated(ServiceConfig, keys)


def check_applications(keys: dict[str, Any]) -> None:
    """Serve takes them, and each builder its arguments."""
    from ray.serve.schema import ServeDeploySchema

    for application in ServeDeploySchema.model_validate(keys).applications:
        build = pkgutil.resolve_name(application.import_path)
        args, *_ = inspect.get_annotations(build).values()
        if application.import_path == DRAFT_APPLICATION:
            (deployment,) = application.deployments
            draft_args(application.args, deployment.user_config)
        else:
            args.model_validate(application.args)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_compiles(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        compile(block, name(path), "exec")


@pytest.mark.parametrize("index", [0, 1])
def test_the_librarys_examples_run(index: int) -> None:
    example = blocks((ROOT / "docs/library.md").read_text(), "python")[index]
    for role in ("target", "draft"):
        example = example.replace(f"path/to/{role}", str(demo_folder(role)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "library.md", "exec"), {})
    assert printed.getvalue().count("\n") > (2 if index == 0 else 0)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_modules_that_are_run_exist(path: Path) -> None:
    named = re.findall(r"python -m ((?:tests|benchmarks|examples|cluster)\.[.\w]*)", path.read_text())
    assert [module for module in named if importlib.util.find_spec(module) is None] == []


def test_flags_that_documents_name_exist() -> None:
    actions = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    commands = [command for action in actions for command in action.choices.values()]
    known = {flag for command in commands for action in command._actions for flag in action.option_strings}
    known |= {flag_of(key) for key, _ in config_keys()} | set(ALIASES.values())
    known |= {flag for action in add_vllm_flags(argparse.ArgumentParser()) for flag in action.option_strings}
    text = "".join(path.read_text() for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "measurements.md"))
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert "--speculative-config" in named
    assert named - known - set(INSTEAD) == set(FLAGS_OF_OTHERS)


def test_pictures_are_small_and_shown() -> None:
    pictures = sorted((ROOT / "docs/images").iterdir())
    assert [path.name for path in pictures if path.stat().st_size >= MOST_BYTES_OF_A_PICTURE] == []
    text = "".join(path.read_text() for path in DOCUMENTS)
    assert [path.name for path in pictures if f"images/{path.name})" not in text] == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=name)
def test_keys_that_are_named_exist(path: Path) -> None:
    known = {key for key, _ in keys_of(ServiceConfig)} | {f"replicas.{role}.max" for role in ("target", "draft")}
    sections = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)(?::[^`]*)?`", path.read_text())
    assert [key for key in named if key not in known and not key.endswith(".py")] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_are_named_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":  # it speaks of earlier versions, too
        return
    named = re.findall(
        r"`((?:specdec|cluster|deployments|tests|benchmarks|examples|k8s|docs)/[\w./-]+)`", path.read_text()
    )
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_clients_are_listed_at_the_versions_that_are_tested() -> None:
    table = (ROOT / "docs/api.md").read_text().split("\n## Clients\n")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `([^`]+)` \| (\d[\d.]*) \|", table, flags=re.MULTILINE))
    files = [ROOT / f"tests/clients/{name}.txt" for name in ("requirements", "openai3", "openai2")]
    tested = [line.partition(">=") for file in files for line in file.read_text().splitlines() if ">=" in line]
    lowest = {name: version for name, _, rest in reversed(tested) for version in [rest.split(",")[0]]}
    assert listed
    assert [name for name, version in listed.items() if not f"{lowest.get(name)}.".startswith(f"{version}.")] == []


def test_metrics_that_documents_name_exist() -> None:
    known = {family.series for family in FAMILIES} | {"specdec_scrape_failures_total"}
    named = {span for path in DOCUMENTS for span in re.findall(r"`(specdec_[a-z_]+)`", path.read_text())}
    assert len(named) > 20
    assert {one for one in named if re.sub(r"_(bucket|sum|count)$", "", one) not in known} == set()


def test_the_keys_that_restart_nothing_are_listed() -> None:
    sentence = (ROOT / "docs/configuration.md").read_text().split("These keys restart nothing")[1].split(". ")[0]
    assert re.findall(r"`([a-z_.]+)`", sentence)[1:] == list(LIVE_KEYS)
