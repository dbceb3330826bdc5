"""By which names requests find a model."""

from __future__ import annotations

import pytest

from deployments.http.service import ModelInfo, ServedModel

ADAPTER = ServedModel("sql", 100, 50, parent="demo")
TARGET = ServedModel("demo", 100, 50, other_names=("default", "gpt-4"))
INFO = ModelInfo(TARGET, adapters={"sql": ADAPTER})


@pytest.mark.parametrize("name", ["demo", "default", "gpt-4"])
def test_each_name_of_the_target_finds_it_and_its_adapters(name: str) -> None:
    assert INFO.find(name) is TARGET
    assert INFO.find(f"{name}:sql") is ADAPTER


@pytest.mark.parametrize("name", ["gpt-5", "gpt-5:sql", "demo-draft", "sql:sql", "demo:", ":sql"])
def test_no_other_name_does(name: str) -> None:
    assert INFO.find(name) is None
