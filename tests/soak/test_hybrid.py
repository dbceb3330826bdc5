"""A hybrid pair whose state slots and blocks are short holds nothing after many requests."""

from __future__ import annotations

from cluster.models.demos import demo_folder
from tests.integration.mixed import SCARCE, check_mixed_requests
from tests.integration.running import RunningService


def test_after_mixed_requests_a_hybrid_draft_holds_nothing_either() -> None:
    folder = str(demo_folder("hybrid"))
    pair = ("--target", folder, "--draft", folder, "--target-dtype", "float32", "--draft-dtype", "float32")
    drafts = ("--speculation-mode", "outcomes", "--num-speculative-tokens", "4", "--num-branches", "4")
    service = RunningService(*pair, *drafts, *SCARCE, "--draft-kv-cache-memory", "64MiB")
    try:
        check_mixed_requests(service, folder, 200)
    finally:
        assert service.stop() == 0
