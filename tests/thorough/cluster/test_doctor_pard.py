"""``specdec doctor`` and the admission, on drafts that were taught to give several tokens in a pass, and others."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.config.app import AppArgs
from cluster.models.demos import demo_folder
from deployments.app import check_files
from specdec.core.errors import ModelLoadError

NO_PARD = r"gives a token a pass: its config\.json names no mask token \(pard_token or ptd_token_id\)"
SMALL = ("--target-kv-cache-memory", "16MiB", "--draft-kv-cache-memory", "16MiB", "--max-model-len", "256")


@pytest.fixture
def pard(tmp_path: Path) -> Path:
    shutil.copytree(demo_folder("draft"), tmp_path / "pard")
    file = tmp_path / "pard" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": 4000, "spd_type": "pard"}))
    return tmp_path / "pard"


def configured(draft: Path, *, parallel_drafting: bool) -> AppArgs:
    drafting = {"model": str(draft), "parallel_drafting": parallel_drafting}
    return AppArgs.model_validate({"target": {"model": str(demo_folder("target"))}, "draft": drafting})


def diagnosed(capsys: pytest.CaptureFixture[str], draft: Path, *flags: str) -> tuple[int, str]:
    pair = ("--target", str(demo_folder("target")), "--draft", str(draft))
    return main(["doctor", *pair, *SMALL, *flags]), " ".join(capsys.readouterr().out.split())


def test_a_draft_that_is_no_pard_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    plain = demo_folder("draft")
    with pytest.raises(ModelLoadError, match=f"{plain} {NO_PARD}"):
        check_files(configured(plain, parallel_drafting=True))
    code, text = diagnosed(capsys, plain, "--draft-parallel-drafting")
    assert code == 2
    assert f"problem {plain} gives a token a pass: its config.json names no mask token" in text


def test_a_pard_is_served_and_named_where_it_drafts_token_by_token(
    pard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_files(configured(pard, parallel_drafting=True))
    code, text = diagnosed(capsys, pard, "--draft-parallel-drafting")
    assert code == 0
    assert f"{pard} names no para_num; drafts of up to 16 take several passes" in text
    code, text = diagnosed(capsys, pard)
    assert code == 0
    assert f"{pard} was taught to give several tokens in a pass, and gives one without draft.parallel_drafting" in text
