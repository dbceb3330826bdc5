"""What the project is run by: workflows, hooks, versions and hashes agree with the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import specdec
from tests.mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SLICES = subprocess.run([ROOT / ".ci/slices"], capture_output=True, text=True, check=True, timeout=30).stdout
SLICES = [line.split()[0] for line in SLICES.splitlines()]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def steps(workflow: Path) -> list[tuple[dict, dict]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [(job, step) for job in jobs for step in job["steps"]]


def values(job: dict, name: str) -> list[str]:
    """What a name of a job's matrix stands for."""
    matrix = job["strategy"]["matrix"]
    return matrix.get(name) or [row[name] for row in matrix["include"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    called = set()
    for job, step in steps(workflow):
        for target in re.findall(r"make ([a-z-]*(?:\$\{\{ matrix\.\w+ \}\})?)", step.get("run", "")):
            fixed, _, name = target.partition("${{ matrix.")
            called |= {fixed + value for value in values(job, name.removesuffix(" }}"))} if name else {fixed}
    assert called
    assert called <= TARGETS


def test_every_slice_runs_at_night() -> None:
    (job,) = [job for job, step in steps(ROOT / ".github/workflows/nightly.yml") if ".ci/slices" in step.get("run", "")]
    assert values(job, "slice") == SLICES


@pytest.mark.parametrize("folder", ["soak", "clients", "image"])
def test_every_long_test_is_in_a_slice(folder: str) -> None:
    script = re.sub(r"#.*", "", (ROOT / ".ci/slices").read_text())
    listed: set[str] = set()
    for names in re.findall(rf"tests/{folder}/test_(\w+|{{[\w,]+}})\.py", script):
        listed |= set(names.strip("{}").split(","))
    assert listed == {path.stem.removeprefix("test_") for path in (ROOT / "tests" / folder).glob("test_*.py")}


def test_a_slice_without_its_program_counts_as_skipped(tmp_path: Path) -> None:
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    command = [ROOT / ".ci/slices", "monitoring"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 77
    *_, reason, closing = done.stdout.splitlines()
    assert reason == "slice monitoring: promtool prometheus not found (apt install prometheus)"
    assert closing == "0 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize(
    ("slices", "code", "closing"),
    [
        ("echo 4 passed in 1s", 0, ["slice first: ran", "14 passed, 0 failed, 1 skipped"]),
        ("echo 3 passed, 1 failed in 1s; exit 1", 1, ["slice first: ran", "13 passed, 1 failed, 1 skipped"]),
        (
            'if [ "$1" = first ]; then echo 1 skipped; exit 77; fi; echo 2 passed in 1s',
            0,
            ["slice second: ran", "12 passed, 0 failed, 2 skipped"],
        ),
    ],
)
def test_ci_runs_the_next_slice_in_place_of_one_that_is_skipped(
    tmp_path: Path, slices: str, code: int, closing: list[str]
) -> None:
    """On stand-ins of the Makefile and the slices; the sum of all closing lines comes last."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    listed = 'if [ "$1" = --in-turn ]; then printf "first\\nsecond\\n"; exit; fi\n'
    (tmp_path / ".ci/slices").write_text(f"#!/usr/bin/env bash\n{listed}{slices}\n")
    (tmp_path / ".ci/slices").chmod(0o755)
    tests = "test:\n\t@echo 9 passed, 1 skipped, 3 warnings in 1s\ntest-faults:\n\t@echo 1 passed in 1s\n"
    (tmp_path / "Makefile").write_text(f"check:\n\t@echo checked\n{tests}")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "--quiet"], *[["commit", "--quiet", "--allow-empty", "--message=a"]] * 2):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, timeout=30)
    done = subprocess.run([".ci/run"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (code, closing), done.stdout + done.stderr


def test_make_passes_over_a_python_that_does_not_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    stand_ins = {
        "old": "exit 1",
        "broken": "echo not installed >&2; exit 127",
        "good": 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; touch "$3/bin/python"; fi',
    }
    for name, does in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)

    def make(*names: str) -> subprocess.CompletedProcess[str]:
        python = f"PYTHON={' '.join(str(tmp_path / name) for name in names)}"
        command = ["make", "--silent", ".venv/bin/python", python]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    refused = make("old", "broken")
    assert refused.returncode == 2
    assert "No Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip" in refused.stderr
    assert f"by the name {tmp_path}/old {tmp_path}/broken." in refused.stderr
    done = make("old", "broken", "good")
    assert done.stdout == f"[setup] .venv, made with {tmp_path}/good\n", done.stderr
    assert (tmp_path / ".venv/bin/python").exists()


def test_the_pythons_of_the_makefile_are_those_of_the_package() -> None:
    (versions,) = re.findall(r"^VERSIONS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert versions.split() == re.findall(r"Python :: (3\.\d+)", pyproject)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_version(workflow: Path) -> None:
    used = [step["uses"] for _, step in steps(workflow) if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", action)] == []


def test_a_release_pushes_nothing_before_every_variant_was_built_and_examined() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    build = [step.get("with", {}) for step in jobs["built"]["steps"]]
    assert [options for options in build if options.get("push")] == []
    variants = jobs["built"]["strategy"]["matrix"]["variant"]
    assert "specdec:${{ matrix.variant }} doctor" in str(jobs["built"]["steps"])
    assert values(jobs["image"], "variant") == variants
    publishing = {name for name, job in jobs.items() if re.search("docker push|pypi-publish", str(job))}
    assert {name: jobs[name]["needs"] for name in publishing} == {"image": "built", "wheel": "built"}


def test_the_lock_has_the_versions_of_the_constraints_and_hashes_for_all() -> None:
    constrained = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    entries = re.split(r"\n(?=\w)", (ROOT / "requirements.lock").read_text())[1:]
    locked = dict(re.match(r"([\w.-]+)==([^\s;]+)", entry).groups() for entry in entries)
    shared = constrained.keys() & locked.keys()
    assert {"torch", "transformers", "ray"} <= shared
    assert {name: locked[name] for name in shared} == {name: constrained[name] for name in shared}, "run: make lock"
    for path in ROOT.glob("requirements*.lock"):
        entries = re.split(r"\n(?=\w)", path.read_text())[1:]
        assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_a_release_needs_one_version_everywhere(tmp_path: Path) -> None:
    """The check of a tag, on a copy of the files that it reads: the right one passes, and each other file fails it."""
    for name in (".ci/release-check", "specdec/__init__.py", "Dockerfile", "k8s/examples/dev/rayservice.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "CHANGELOG.md").write_text(f"## [{specdec.__version__.partition('rc')[0]}] - 2026-11-27\n")

    def check(tag: str) -> tuple[int, str]:
        command = ["bash", ".ci/release-check", tag]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout + done.stderr

    tag = f"v{specdec.__version__}"
    assert check(tag) == (0, f"{tag} can be released\n")
    assert check(specdec.__version__)[0] == 1
    for name in ("specdec/__init__.py", "Dockerfile", "k8s/examples/dev/rayservice.yaml", "CHANGELOG.md"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(specdec.__version__, "9").replace("## [", "## [9."))
        code, said = check(tag)
        assert (code, name in said) == (1, True), said
        (tmp_path / name).write_text(text)


def test_links_of_the_readme_are_absolute_on_the_package_index(tmp_path: Path) -> None:
    """As the release workflow builds it."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "specdec").mkdir()
    shutil.copy(ROOT / "specdec/__init__.py", tmp_path / "specdec")
    variables = {"GITHUB_REPOSITORY": "someone/specdec", "GITHUB_REF_NAME": "v1"}
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | variables, check=True, timeout=120)
    (metadata,) = tmp_path.glob("*.egg-info/PKG-INFO")
    text = metadata.read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "](https://github.com/someone/specdec/blob/v1/docs/api.md#clients)" in text
    assert "![The page" in text
    assert "](https://github.com/someone/specdec/raw/v1/docs/images/ui.png)" in text
    assert "Project-URL: Source, https://github.com/someone/specdec" in text


def test_each_mutant_changes_one_place_and_has_a_finder() -> None:
    """Who moves the line mends its mutant, and whoever deletes the finder names another."""
    places = {one.name: (ROOT / one.file).read_text().count(one.old) for one in MUTANTS}
    assert {name: count for name, count in places.items() if count != 1} == {}
    assert len(places) == len(MUTANTS)
    assert [one.name for one in MUTANTS if one.old == one.new] == []
    tests = {name for one in MUTANTS for name in one.finder}
    functions = {name for name in tests if "::" in name}
    assert [file for file in tests if not (ROOT / file.partition("::")[0]).exists()] == []
    lacking = [
        name
        for name in functions
        if f"def {name.partition('::')[2]}(" not in (ROOT / name.partition("::")[0]).read_text()
    ]
    assert lacking == []
