"""The documents: as short as they should be, and true where a machine can tell."""

from __future__ import annotations

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
from cluster.config.app import ServiceConfig
from cluster.config.base import validated
from cluster.config.files import config_keys
from cluster.config.live import LIVE_KEYS
from cluster.models.demos import demo_folder
from deployments.metrics.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Commands of ours in indented blocks and in code spans, as words."""
    spans = re.findall(r"`((?:specdec|make) [a-z][^`]*)`", text)
    indented = re.findall(r"^ {4}((?:specdec|make) .*)$", text, flags=re.MULTILINE)
    found = [shlex.split(" ".join(span.split())) for span in spans + indented if "..." not in span]
    return [words for words in found if words[0] == "make" or len(words) > 2]


def test_the_table_of_keys_is_that_of_the_configuration() -> None:
    text = (ROOT / "cluster/README.md").read_text()
    assert "\n".join(keys_table()) in text, "run: python -m cluster.cli.keys cluster/README.md"


def test_the_measured_rows_of_the_readme_are_copied() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    measured = (ROOT / "benchmarks/README.md").read_text()
    assert "\n".join(rows) in measured


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
def test_configurations_are_accepted(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    for block in blocks(path.read_text(), "yaml"):
        keys = yaml.safe_load(block)
        if "applications" in keys:
            check_applications(keys)
        else:
            validated(ServiceConfig, keys)


def check_applications(keys: dict[str, Any]) -> None:
    """Serve takes them, and each builder its arguments."""
    from ray.serve.schema import ServeDeploySchema

    for application in ServeDeploySchema.model_validate(keys).applications:
        build = pkgutil.resolve_name(application.import_path)
        args, *_ = inspect.get_annotations(build).values()
        args.model_validate(application.args)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_compiles(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        compile(block, name(path), "exec")


@pytest.mark.parametrize("index", [0, 1])
def test_the_librarys_examples_run(index: int) -> None:
    example = blocks((ROOT / "specdec/README.md").read_text(), "python")[index]
    for role in ("target", "draft"):
        example = example.replace(f"path/to/{role}", str(demo_folder(role)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "specdec/README.md", "exec"), {})
    assert printed.getvalue().count("\n") > (2 if index == 0 else 0)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_modules_that_are_run_exist(path: Path) -> None:
    named = re.findall(r"python -m ((?:tests|benchmarks|examples|cluster)\.[.\w]*)", path.read_text())
    assert [module for module in named if importlib.util.find_spec(module) is None] == []


def test_flags_that_documents_name_exist() -> None:
    known = {flag_of(key) for key, _ in config_keys()}
    text = "".join((ROOT / path).read_text() for path in ("README.md", "specdec/README.md", "deployments/README.md"))
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert named <= known | {"--config"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_are_named_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":  # it speaks of earlier versions, too
        return
    named = re.findall(r"`((?:specdec|cluster|deployments|tests|benchmarks|examples|k8s)/[\w./-]+)`", path.read_text())
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_clients_are_listed_at_the_versions_that_are_tested() -> None:
    table = (ROOT / "deployments/README.md").read_text().split("\n## Clients\n")[1].split("\n## ")[0]
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
    sentence = (ROOT / "cluster/README.md").read_text().split("These keys restart nothing")[1].split(". ")[0]
    assert re.findall(r"`([a-z_.]+)`", sentence)[1:] == list(LIVE_KEYS)
