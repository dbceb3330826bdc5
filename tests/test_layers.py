"""The borders between the packages, and the rules of style that a machine can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN_IMPORTS = {
    "specdec": {"cluster", "deployments", "k8s", "ray", "fastapi", "starlette"},
    "cluster": {"deployments", "k8s"},
    "deployments": {"k8s"},
}
NOT_SHIPPED = {"tests", "benchmarks", "examples"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

SOURCES = sorted(
    path for package in ("specdec", "cluster", "deployments", "k8s") for path in (ROOT / package).rglob("*.py")
)
TESTS = sorted(path for folder in NOT_SHIPPED for path in (ROOT / folder).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it, with imports by name through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def environment_uses(tree: ast.AST) -> Iterator[int]:
    """Lines that read or set the environment through ``os``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES and ast.unparse(node.value) == "os":
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ENVIRONMENT_NAMES)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_go_to_the_left_only(path):
    package = path.relative_to(ROOT).parts[0]
    found = {module.partition(".")[0] for module in imported_modules(ast.parse(path.read_text()))}
    assert not found & FORBIDDEN_IMPORTS.get(package, set())
    assert not found & NOT_SHIPPED


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_only_settings_touch_the_environment(path):
    if path.name != "settings.py":
        assert list(environment_uses(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name)
def test_a_file_is_a_page_per_idea(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    too_long = [found for found in functions(ast.parse(text)) if found[1] > MAX_FUNCTION_LINES]
    assert too_long == []


def test_the_walk_finds_what_it_looks_for():
    text = (
        "import os, ray.serve\nfrom cluster.config import x\ndef f():\n    importlib.import_module('deployments.app')\n"
    )
    text += "    return os.environ['A'], os.getenv('B')\nfrom os import environ\n"
    tree = ast.parse(text)
    assert set(imported_modules(tree)) == {"os", "ray.serve", "cluster.config", "deployments.app"}
    assert sorted(environment_uses(tree)) == [5, 5, 6]
    assert list(functions(tree)) == [("f", 3)]


def test_importing_a_package_imports_no_heavy_library():
    import subprocess
    import sys

    code = (
        "import sys, cluster.cli; print([m for m in ('torch', 'ray', 'transformers', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
