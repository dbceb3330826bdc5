"""Values of one's own on top of an overlay, and the commands of ``docs/deploy-kubernetes.md`` in a clean clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from cluster.cli.main import main
from cluster.config.environment import DRAIN_VARIABLE
from tests.k8s.overlays import built, kubectl, of_kind, pods, ray_service

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/deploy-kubernetes.md").read_text()
FROM_A_LAPTOP = (
    (ROOT / "docs/deploy-ray.md")
    .read_text()
    .partition("\n## One file, from a laptop to a cluster\n")[2]
    .partition("\n## ")[0]
)


def indented(text: str) -> list[str]:
    """Each block of lines that are indented by four."""
    found = re.findall(r"(?:^ {4}.*\n)+", text, flags=re.MULTILINE)
    return ["".join(line.removeprefix("    ") for line in block.splitlines(keepends=True)) for block in found]


def test_the_patches_that_the_page_shows(tmp_path: Path) -> None:
    (shown,) = [block for block in indented(PAGE) if block.startswith("images:")]
    service = tmp_path / "service.yaml"
    service.write_text("target: my/target\ndraft: my/draft\ntracing: {exporter: file}\n")
    assert main(["render", str(service), "--overlay", "prod", "--out", str(tmp_path / "mine")]) == 0
    with (tmp_path / "mine" / "kustomization.yaml").open("a") as file:
        file.write(shown)
    spec = ray_service(tmp_path / "mine")["spec"]
    front, target, draft = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert target["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert draft["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40S"}
    assert (front["maxReplicas"], target["maxReplicas"]) == (5, 8)
    images = [group["template"]["spec"]["containers"][0]["image"] for group in (front, target)]
    assert images == ["registry.example.org/specdec:0.1.0rc1", "registry.example.org/specdec:0.1.0rc1-cuda"]
    args = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]
    assert args["target"] == {"model": "my/target"}
    assert args["actors"]["target"]["label_selector"] == {"role": "target"}


def test_variables_of_ones_own_make_another_cluster(tmp_path: Path) -> None:
    names = []
    for tracing in ({}, {"exporter": "file"}):
        service = tmp_path / "service.yaml"
        service.write_text(yaml.safe_dump({"demo": "plain", "tracing": tracing}))
        out = tmp_path / f"mine{len(names)}"
        assert main(["render", str(service), "--overlay", "dev", "--out", str(out)]) == 0
        head = ray_service(out)["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
        names += [source["configMapRef"]["name"] for source in head["spec"]["containers"][0]["envFrom"]]
    assert len(set(names)) == 2


def test_pods_have_the_time_that_their_streams_have(tmp_path: Path) -> None:
    service = tmp_path / "service.yaml"
    for drain_timeout_s, expected in ((0, ("60", 70)), (1800.5, ("1861", 1871))):
        service.write_text(yaml.safe_dump({"demo": "plain", "drain_timeout_s": drain_timeout_s}))
        out = tmp_path / f"mine{drain_timeout_s}"
        assert main(["render", str(service), "--overlay", "dev", "--out", str(out)]) == 0
        (environment,) = [one for one in of_kind(built(out), "ConfigMap") if DRAIN_VARIABLE in one["data"]]
        for _, pod in pods(out):
            assert (environment["data"][DRAIN_VARIABLE], pod["spec"]["terminationGracePeriodSeconds"]) == expected


def commands(text: str) -> list[str]:
    """The lines to type that need no cluster."""
    lines = [line for block in indented(text) for line in block.splitlines()]
    return [
        line for line in lines if re.match(r"(kubectl|specdec|cp|serve|helm) ", line) and "# on a cluster" not in line
    ]


def ran(clone: Path, *lines: str) -> str:
    """What lines that are typed in a clean clone print; each must end well."""
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", clone], check=True, timeout=240)
    programs = [str(Path(kubectl()).parent), str(Path(sys.executable).parent)]
    environment = os.environ | {"PYTHONPATH": str(clone), "PATH": os.pathsep.join([*programs, os.environ["PATH"]])}
    script = "\n".join(["set -e", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_that_need_no_cluster_run_in_a_clean_clone(tmp_path: Path) -> None:
    typed = commands(PAGE)
    assert len(typed) == 5
    printed = ran(tmp_path / "clone", *typed, "test $(kubectl kustomize mine | grep -c '^kind: ') -eq 13")
    assert "serveConfigV2" in printed


def test_one_file_goes_from_a_laptop_to_a_cluster_in_a_clean_clone(tmp_path: Path) -> None:
    (file,) = re.findall(r"^```yaml\n(.*?)^```", FROM_A_LAPTOP, flags=re.MULTILINE | re.DOTALL)
    serve, *typed = commands(FROM_A_LAPTOP)
    assert serve == "specdec serve --config service.yaml", "it loads models: what it would serve is printed here"
    assert len(typed) == 2
    write = f"cat > service.yaml <<'END'\n{file}END"
    printed = ran(
        tmp_path / "clone",
        write,
        "specdec config --config service.yaml",
        *typed,
        "cat files/serve.yaml",
        "kubectl kustomize mine",
    )
    assert printed.count("Qwen/Qwen3-8B") == 5
    assert "nvidia.com/gpu: 2" in printed
