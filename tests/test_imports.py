"""What import-linter does not see: modules that are named by strings, and what a command imports when it starts."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = re.compile(r"(specdec|cluster|deployments|tests|benchmarks|examples)(\.\w+)+:\w+")
ORDER = ("specdec", "cluster", "deployments", "tests", "benchmarks", "examples")


def named() -> Iterator[tuple[str, str]]:
    """Each package, and what its strings name as ``module:object``."""
    for package in ORDER[:3]:
        for file in (ROOT / package).rglob("*.py"):
            strings = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
            yield from ((package, one) for one in strings if isinstance(one, str) and NAMES.fullmatch(one))


def test_modules_that_strings_name_exist_and_are_not_above() -> None:
    found = list(named())
    assert len(found) > 4
    for package, name in found:
        module, _, attribute = name.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None, name
        assert spec.origin is not None, name
        assert re.search(rf"\b{attribute}\b", Path(spec.origin).read_text()), name
        assert module.split(".")[0] in ORDER[:3], name
        assert package != "specdec" or module.startswith("specdec."), name


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("cluster.cli", {"torch", "ray", "transformers", "fastapi"}),
        ("deployments.operate.status", {"torch", "transformers"}),  # a process each for /health and /metrics
        ("deployments.http.store", {"torch", "ray", "transformers", "fastapi"}),  # the process that is the store
    ],
)
def test_what_is_a_small_process_imports_no_heavy_library(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_one_module_of_cluster_names_those_of_deployments() -> None:
    pattern = re.compile(r"deployments(\.\w+)+(:\w+)?")
    named_in = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "cluster").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    assert named_in == {"cluster/config/names.py"}
