"""Both models by OpenVINO: each text is the target's own, and the same as by transformers' layers in float32."""

from __future__ import annotations

import pytest

from tests.sizes import some
from tests.specdec.engine.features import Feature, assert_texts_are_its_own, demo

FEATURES: tuple[Feature, ...] = (
    *("drafts", "branches", "preemption", "prefix reuse"),
    *("grammars", "prompt lookup", "hooks", "pair"),
)


@pytest.mark.parametrize("feature", some([*FEATURES], 4))
def test_each_text_is_the_targets_own(feature: Feature) -> None:
    pytest.importorskip("openvino")
    target, draft = (demo(role, engine="openvino") for role in ("target", "draft"))
    texts = assert_texts_are_its_own(target, draft, feature)
    if feature == "drafts":
        assert texts == assert_texts_are_its_own(demo("target"), draft, feature)
