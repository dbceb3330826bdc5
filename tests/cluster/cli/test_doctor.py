"""``specdec doctor`` plans the memory of a GPU as the service does."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import cluster.cli.doctor
from cluster.cli import main
from cluster.cli.doctor import PROBLEM, Gpu, Hardware, Line, steps_line
from cluster.config.app import AppArgs
from cluster.models.demos import demo_folder
from specdec.core.errors import MemoryPlanError
from specdec.engine import build
from specdec.models.loading import ModelSource
from specdec.models.memory import least_memory

DRAFT = str(demo_folder("draft"))
APART = {"placement": "separate"}


@pytest.mark.parametrize(
    ("num_gpus", "args", "expected"),
    [
        (1, {"draft": APART}, [("target", "auto", 0.5), ("draft", "auto", 0.5)]),
        (1, {"replicas": {"draft": 2}, "draft": APART}, [("target", "auto", 1 / 3), ("draft", "auto", 1 / 3)]),
        (
            1,
            {"actors": {"target": {"num_gpus": 0.8}, "draft": {"num_gpus": 0.2}}, "draft": APART},
            [("target", "auto", 0.8), ("draft", "auto", 0.2)],
        ),
        (2, {}, [("target", "auto", 1.0), ("draft", "cuda:1", 1.0)]),
        (
            2,
            {"target": {"device": "cuda:0"}, "draft": {"device": "cuda:0"}},
            [("target", "cuda:0", 1.0), ("draft", "cuda:1", 1.0)],
        ),
        (2, {"draft": {"device": "cpu"}}, [("target", "auto", 1.0), ("draft", "cpu", 1.0)]),
    ],
)
def test_each_model_has_the_share_of_the_service(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, args: dict[str, Any], expected: list[tuple[str, str, float]]
) -> None:
    """There need be no GPU: what is asked of the builder is noted, and the models are not loaded."""
    asked = []

    def noted(source: Any, options: Any, progress: Any) -> None:
        asked.append((Path(source.path).name, source.device, options.device_share))
        raise MemoryPlanError("only noted")

    monkeypatch.setattr(build, "build_target", noted)
    lines = examined(monkeypatch, num_gpus, args)
    assert asked == expected
    assert [line.text for line in lines if line.about == PROBLEM] == ["only noted"] * len(expected)


def examined(monkeypatch: pytest.MonkeyPatch, num_gpus: int, args: dict[str, Any]) -> list[Line]:
    machine = Hardware({}, 8, 1 << 40, 1 << 40, (Gpu("a GPU", 1 << 36, 1 << 36),) * num_gpus)
    monkeypatch.setattr(cluster.cli.doctor, "this_machine", lambda: machine)
    roles = {role: {"model": str(demo_folder(role))} | args.get(role, {}) for role in ("target", "draft")}
    return list(cluster.cli.doctor.examine(AppArgs.model_validate(args | roles)))


@pytest.mark.parametrize(
    ("args", "has_pair"),
    [
        ({}, True),
        ({"draft": APART}, False),
        ({"speculation_mode": "overlap"}, False),
        ({"draft": {"device": "cpu"}}, False),
    ],
)
def test_both_models_in_one_process_have_caches_for_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], has_pair: bool
) -> None:
    """On the only GPU; and it is said."""
    asked = list[float]()

    def noted(source: Any, options: Any, progress: Any) -> None:
        asked.append(options.device_share)
        raise MemoryPlanError("only noted")

    monkeypatch.setattr(build, "build_target", noted)
    lines = examined(monkeypatch, 1, args)
    assert (any("target's process" in line.text for line in lines) and asked[0] > 0.5 > asked[1]) == has_pair
    if has_pair:
        both = [least_memory(ModelSource(str(demo_folder(role))), on_gpu=True) for role in ("target", "draft")]
        lengths = [
            (share * (1 << 36) - one.weights_bytes) / one.bytes_per_token
            for share, one in zip(asked, both, strict=True)
        ]
        assert sum(asked) == pytest.approx(1)
        assert lengths[0] == pytest.approx(lengths[1])


def test_a_draft_whose_step_is_no_shorter_is_called_too_slow() -> None:
    assert steps_line(0.2) == "the draft's step takes 0.20 of the target's"
    assert "too slow to help: take a smaller draft" in steps_line(1.0)


def test_a_target_that_cannot_be_strict_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "no_strict_reason", lambda _: "it expands what it caches")
    assert main(["doctor", "--exactness", "strict", "--draft-method", "ngram"]) == 2
    (problem,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("problem"))
    assert re.fullmatch(r"problem +exactness: strict is not possible with .*: it expands what it caches", problem)


def test_a_model_that_the_hub_does_not_give_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_args: object, **_options: object) -> str:
        raise LocalEntryNotFoundError("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(cluster.cli.doctor, "examine", lambda *_args: pytest.fail("loaded"))
    assert main(["doctor", "some/target"]) == 2
    *_, problem, verdict = capsys.readouterr().out.splitlines()
    assert problem == "problem    target.model: cannot get some/target: the hub cannot be reached"
    assert verdict == "verdict    cannot be served"
