"""The text: Python's standard library and some installed packages under permissive licences.

Each file is cleaned, judged, compared with those before it, and falls to training or to the held-out tenth by a hash
of its path relative to its package, so that the split does not depend on the machine or on what else is installed.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|0BSD|Zlib|CC0)", re.IGNORECASE)
RESTRICTED = re.compile(r"\b(A?GPL|LGPL|MPL|Mozilla|EUPL|CDDL|EPL|CC-BY|Proprietary|NVIDIA)", re.IGNORECASE)
PACKAGES = (
    *("transformers", "accelerate", "huggingface_hub", "networkx", "openai", "pydantic", "fastapi", "starlette"),
    *("aiohttp", "httpx", "anyio", "websockets", "google-auth", "google-api-core", "filelock", "attrs", "click"),
)
"""What this project's own dependencies bring and reads well: self-similar library code rather than tables or maths."""

SKIPPED_FOLDERS = re.compile(
    r"(_?tests?|_?testing|idle_test|lib2to3|turtledemo|ensurepip|site-packages|encodings|pydoc_data"
    r"|_?vendor(ed)?|third_?party(_files)?|_?generated|benchmarks)$"
)
SKIPPED_FILES = re.compile(r"(_pb2|_pb2_grpc|conftest)\.py$|^(test_|_sysconfigdata)|_test\.py$")
GENERATED = re.compile(r"(auto-?\s?generated|generated (by|from|automatically)|do not (edit|modify))", re.IGNORECASE)

MIN_NUM_CHARS, MAX_NUM_CHARS = 400, 150_000
MAX_LINE_CHARS = 400
MAX_DIGIT_SHARE = 0.12
MAX_LITERAL_ITEMS = 150
MAX_KNOWN_LINE_SHARE = 0.7
MIN_TELLING_LINE_CHARS = 24
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class Package:
    """One source of files: its name, its licence as its metadata states it, and the files (path in package, path)."""

    name: str
    license: str
    files: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One cleaned file."""

    package: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file belongs to the held-out tenth."""
        return is_held_out(self.package, self.path)


def is_held_out(package: str, path: str) -> bool:
    """Whether a file is held out; depends on nothing but the package's name and the path relative to the package."""
    digest = hashlib.sha256(f"{package}/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def license_of(meta: metadata.PackageMetadata) -> str:
    """The licence that a distribution's metadata names: expression, classifiers, or the first line of the field."""
    classifiers = [c.rsplit("::", 1)[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    expression, field = (meta[key] or "" for key in ("License-Expression", "License"))
    return expression or "; ".join(classifiers) or field.strip().split("\n")[0][:80]


def is_permissive(license_text: str) -> bool:
    """Whether a licence allows use with no more than attribution."""
    return bool(PERMISSIVE.search(license_text)) and not RESTRICTED.search(license_text)


def standard_library() -> Package:
    """The running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = tuple((path.relative_to(root).as_posix(), path) for path in sorted(root.rglob("*.py")))
    return Package("python", "PSF-2.0", tuple(f for f in files if "site-packages" not in f[0]))


def installed_packages(names: Iterable[str] = PACKAGES) -> list[Package]:
    """Those of the named distributions that are installed and whose metadata states a permissive licence, by name."""
    found: dict[str, Package] = {}
    wanted = {name.lower() for name in names}
    for dist in metadata.distributions():
        name, license_text = dist.metadata["Name"].lower(), license_of(dist.metadata)
        if name not in wanted or not is_permissive(license_text):
            continue
        sources = [f for f in dist.files or [] if f.suffix == ".py" and len(f.parts) > 1 and ".." not in f.parts]
        located = ((f.as_posix(), Path(str(dist.locate_file(f)))) for f in sources)
        found[name] = Package(name, license_text, tuple(sorted((f, path) for f, path in located if path.is_file())))
    return [found[name] for name in sorted(found) if found[name].files]


def clean(text: str) -> str | None:
    """The file's code without its licence header and with docstrings cut to their first line; None: not wanted.

    Unwanted are files that do not parse, generated ones, and those made of data: huge literals, long lines, digits.
    """
    if not MIN_NUM_CHARS <= len(text) <= MAX_NUM_CHARS or GENERATED.search(text[:2000]):
        return None
    try:
        text = _shorten_docstrings(_without_header(text.replace("\r\n", "\n").expandtabs(4)))
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = text.split("\n")
    digit_share = sum(c.isdigit() for c in text) / max(1, len(text))
    if len(text) < MIN_NUM_CHARS or max(map(len, lines)) > MAX_LINE_CHARS or digit_share > MAX_DIGIT_SHARE:
        return None
    if not text.isascii() and sum(ord(c) > 127 for c in text) > len(text) / 200:
        return None
    return None if any(_is_table(node) for node in ast.walk(tree)) else text


def documents(packages: Iterable[Package], max_package_chars: int) -> Iterator[Document]:
    """Cleaned files of the packages, near copies of earlier files left out.

    A package's files come in the order of their paths' hashes, and it adds at most ``max_package_chars`` characters.
    """
    known: set[int] = set()
    for package in packages:
        num_chars = 0
        for path, file in sorted(package.files, key=lambda f: hashlib.sha256(f[0].encode()).digest()):
            if num_chars >= max_package_chars:
                break
            text = None if _is_skipped(path) else clean(file.read_text("utf-8", errors="replace"))
            if text is None or _is_known(text, known):
                continue
            num_chars += len(text)
            yield Document(package.name, path, text)


def _is_skipped(path: str) -> bool:
    *folders, name = path.split("/")
    return any(map(SKIPPED_FOLDERS.match, folders)) or bool(SKIPPED_FILES.search(name))


def _is_known(text: str, known: set[int]) -> bool:
    """Whether most telling lines stood in earlier files; adds the file's lines to ``known`` unless so."""
    stripped = (line.strip() for line in text.split("\n"))
    lines = {_line_hash(line) for line in stripped if len(line) >= MIN_TELLING_LINE_CHARS}
    if lines and len(lines & known) > MAX_KNOWN_LINE_SHARE * len(lines):
        return True
    known |= lines
    return not lines


def _line_hash(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "big")


def _is_table(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        return len(node.values) > MAX_LITERAL_ITEMS
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return len(node.elts) > MAX_LITERAL_ITEMS
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and len(node.value) > 4000


def _without_header(text: str) -> str:
    """The text without the comments and blank lines above its first line of code."""
    lines = text.lstrip("\ufeff").split("\n")
    start = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))
    return "\n".join(line.rstrip() for line in lines[start:])


def _shorten_docstrings(text: str) -> str:
    """Every docstring of several lines cut to its first; raises SyntaxError where the text does not parse."""
    lines = text.split("\n")
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, owners)]
    for node in sorted((n for n in found if n), key=lambda n: n.lineno, reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        summary = next((line.strip() for line in str(node.value).split("\n") if line.strip()), "")
        if first == last or lines[last][node.end_col_offset :].strip():
            continue
        prefix = "r" if "\\" in summary else ""
        summary = summary.replace('"""', "'''").removesuffix('"')
        indent = lines[first].encode()[: node.col_offset].decode()
        lines[first : last + 1] = [f'{indent}{prefix}"""{summary}"""']
    return "\n".join(lines)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.Constant | None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None
