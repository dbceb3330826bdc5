from __future__ import annotations

import pytest

from cluster.config import Actors
from cluster.placement import Devices, plan_placement
from cluster.replicas import Replicas
from specdec.engine.shares import equal_share


@pytest.mark.parametrize(
    ("num_gpus", "num_cpus", "gpus_each", "cpus_each"),
    [
        (0, 1, None, 0.5),
        (0, 2, None, 1),
        (0, 64, None, 1),
        (1, 1, 0.5, 0.5),
        (1, 16, 0.5, 1),
        (2, 16, 1, 1),
        (8, 96, 1, 1),
    ],
)
def test_one_target_and_one_draft(num_gpus, num_cpus, gpus_each, cpus_each):
    placement = plan_placement(Devices(num_gpus, num_cpus))
    for share in (placement.target, placement.draft):
        assert share.ray_actor_options.get("num_gpus") == gpus_each
        assert share.ray_actor_options["num_cpus"] == cpus_each
        assert share.num_torch_threads == 1
        assert share.gpu_share == (gpus_each or 1)
    assert placement.router.ray_actor_options == placement.ingress.ray_actor_options == {"num_cpus": 0}
    is_shared = gpus_each == 0.5, cpus_each == 0.5
    assert len(placement.remarks) == sum(is_shared)
    assert (
        "replica: target 0.5, draft 0.5. Processes on one GPU take turns" in " ".join(placement.remarks)
    ) == is_shared[0]


@pytest.mark.parametrize(
    ("available", "num_workers", "share"),
    [(4, 4, 1), (3, 4, 1 / 2), (2, 6, 1 / 3), (1, 3, 1 / 3), (5, 3, 1), (0, 2, 0), (0.5, 1, 0)],
)
def test_a_worker_never_spans_two_devices_and_all_find_a_place(available, num_workers, share):
    assert equal_share(available, num_workers) == share
    if share:
        assert int(available) * int(1 / share + 1e-9) >= num_workers


def test_a_worker_asks_for_a_core_where_no_node_is_up_yet():
    assert plan_placement(Devices(0, 0)).target.ray_actor_options == {"num_cpus": 1}


def test_replicas_count():
    placement = plan_placement(Devices(2, 8), Replicas(target=1, draft=2))
    assert placement.target.ray_actor_options["num_gpus"] == 0.5
    ranges = Replicas.model_validate({"target": {"min": 1, "max": 3}, "draft": {"min": 0, "max": 1}})
    placement = plan_placement(Devices(2, 8), ranges)
    assert placement.target.ray_actor_options["num_gpus"] == 0.5, "there is room for the most of them"


def test_a_target_alone_has_the_gpu_to_itself():
    placement = plan_placement(Devices(1, 4), has_draft=False)
    assert placement.target.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    assert placement.remarks == ()


def test_explicit_options_stand_in_place_of_what_would_be_chosen():
    actors = Actors.model_validate(
        {
            "target": {"num_gpus": 2, "num_cpus": 3.5, "accelerator_type": "H200", "label_selector": {"pool": "big"}},
            "draft": {"num_gpus": 0, "resources": {"small": 1}},
        }
    )
    placement = plan_placement(Devices(4, 8), actors=actors)
    assert placement.target.ray_actor_options == {
        "num_cpus": 3.5,
        "num_gpus": 2,
        "accelerator_type": "H200",
        "label_selector": {"pool": "big"},
    }
    assert placement.target.num_torch_threads == 3
    assert placement.draft.ray_actor_options == {"num_cpus": 1, "resources": {"small": 1}}


@pytest.mark.parametrize(
    ("target", "draft", "shared"),
    [(0.7, 0.3, "target 0.7, draft 0.3."), (1, 0.5, ": draft 0.5."), (1, 1, None), (2, 0, None)],
)
def test_fractions_of_a_gpu_that_are_asked_for_are_warned_of(target, draft, shared):
    actors = Actors.model_validate({"target": {"num_gpus": target}, "draft": {"num_gpus": draft}})
    remarks = " ".join(plan_placement(Devices(2, 8), actors=actors).remarks)
    assert (shared in remarks and "no longer overlap" in remarks) if shared else not remarks


def test_a_pool_of_drafts_shares_with_no_target():
    placement = plan_placement(Devices(2, 8), Replicas(target=3, draft=2), has_target=False)
    assert placement.draft.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    assert placement.remarks == ()


def test_router_and_ingress_go_where_they_are_told_to():
    assert plan_placement(Devices(4, 8)).router.ray_actor_options == {"num_cpus": 0}
    front = {"resources": {"front": 1}, "label_selector": {"pool": "front"}}
    placement = plan_placement(Devices(4, 8), actors=Actors.model_validate({"router": front, "ingress": front}))
    for share in (placement.router, placement.ingress):
        assert share.ray_actor_options == {"num_cpus": 0, **front}


def test_serve_takes_the_options():
    from ray.serve.schema import RayActorOptionsSchema

    actors = Actors.model_validate({"target": {"resources": {"a": 1}, "label_selector": {"b": "c"}, "num_gpus": 0.25}})
    options = plan_placement(Devices(0, 2), actors=actors).target.ray_actor_options
    assert RayActorOptionsSchema.model_validate(options).num_gpus == 0.25
