"""The edits and commands of ``docs/deploy-kubernetes.md``; the commands in a clean clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from cluster.launch.serve_config import laid_over
from tests.k8s.examples import ray_service
from tests.k8s.test_examples import what_is_wrong

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/deploy-kubernetes.md").read_text()
FROM_A_LAPTOP = (
    (ROOT / "docs/deploy-ray.md")
    .read_text()
    .partition("\n## One file, from a laptop to a cluster\n")[2]
    .partition("\n## ")[0]
)


def fenced(text: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_edit_that_the_page_shows_is_one_that_kuberay_takes() -> None:
    (shown,) = fenced(PAGE)
    edited = laid_over(ray_service("prod"), yaml.safe_load(shown))
    assert what_is_wrong(edited) == []
    options = edited["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100
    assert edited["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"], "KubeRay asks for it"
    assert "serveService" not in edited["spec"]


def commands(text: str) -> list[str]:
    """The lines to type that need no cluster."""
    lines = [line.removeprefix("    ") for line in text.splitlines() if line.startswith("    ")]
    return [
        line for line in lines if re.match(r"(kubectl|specdec|cp|serve|helm) ", line) and "# on a cluster" not in line
    ]


def ran(clone: Path, *lines: str) -> str:
    """What lines that are typed in a clean clone print; each must end well."""
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", clone], check=True, timeout=240)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(clone), "PATH": path}
    script = "\n".join(["set -e", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_that_need_no_cluster_run_in_a_clean_clone(tmp_path: Path) -> None:
    typed = commands(PAGE)
    assert len(typed) == 3
    printed = ran(tmp_path / "clone", *typed, "cat rayservice.yaml")
    assert printed.count("image: registry.example.org/specdec:") == 4


def test_one_file_goes_from_a_laptop_to_a_cluster_in_a_clean_clone(tmp_path: Path) -> None:
    (file,) = fenced(FROM_A_LAPTOP)
    serve, *typed = commands(FROM_A_LAPTOP)
    assert serve == "specdec serve --config service.yaml", "it loads models: what it would serve is printed here"
    assert len(typed) == 4
    write = f"cat > service.yaml <<'END'\n{file}END"
    printed = ran(
        tmp_path / "clone",
        write,
        "specdec config --config service.yaml",
        *typed,
        "cat serve.yaml rayservice.yaml",
    )
    assert printed.count("Qwen/Qwen3-8B") == 5
    assert printed.count("nvidia.com/gpu: 1") == 2
