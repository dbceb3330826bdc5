from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.app import AppArgs
from cluster.config.base import validated
from cluster.launch.placement import ActorShare, Devices, Placement, placement_of, with_pair_placed
from deployments import workers
from specdec.core.errors import InvalidParameterError
from specdec.engine.shares import equal_share

VLLM = {"model": "big", "engine": "vllm"}


def plan(devices: Devices, can_grow: bool = True, **keys: Any) -> Placement:
    return placement_of(validated(AppArgs, keys), devices, can_grow=can_grow)


def gpus(placement: Placement) -> tuple[float, float]:
    return placement.target.num_gpus, placement.draft.num_gpus


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
    placement = plan(Devices(num_gpus, num_cpus), can_grow=False)
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


def test_replicas_count():
    placement = plan(Devices(2, 8), replicas={"target": 1, "draft": 2})
    assert placement.target.num_gpus == 0.5
    ranges = {"target": {"min": 1, "max": 3}, "draft": {"min": 0, "max": 1}}
    assert plan(Devices(2, 8), replicas=ranges).target.num_gpus == 0.5, "there is room for the most of them"


def test_a_target_alone_has_the_gpu_to_itself():
    placement = plan(Devices(1, 4), target={"model": "big"}, draft={"method": "ngram"})
    assert placement.target.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    assert placement.remarks == ()


def test_explicit_options_stand_in_place_of_what_would_be_chosen():
    actors = {
        "target": {"num_gpus": 1, "num_cpus": 3.5, "accelerator_type": "H200", "label_selector": {"pool": "big"}},
        "draft": {"num_gpus": 0, "resources": {"small": 1}},
    }
    placement = plan(Devices(4, 8), actors=actors)
    assert placement.target.ray_actor_options == {
        "num_cpus": 3.5,
        "num_gpus": 1,
        "accelerator_type": "H200",
        "label_selector": {"pool": "big"},
    }
    assert placement.target.num_torch_threads == 3
    assert placement.draft.ray_actor_options == {"num_cpus": 1, "resources": {"small": 1}}


@pytest.mark.parametrize(
    ("target", "draft", "shared"),
    [(0.7, 0.3, "target 0.7, draft 0.3."), (1, 0.5, ": draft 0.5."), (1, 1, None), (1, 0, None)],
)
def test_fractions_of_a_gpu_that_are_asked_for_are_warned_of(target, draft, shared):
    actors = {"target": {"num_gpus": target}, "draft": {"num_gpus": draft}}
    remarks = " ".join(plan(Devices(2, 8), actors=actors).remarks)
    assert (shared in remarks and "no longer overlap" in remarks) if shared else not remarks


@pytest.mark.parametrize(
    ("devices", "keys", "expected"),
    [
        (Devices(1, 8), {}, 1.0),
        (Devices(1, 8), {"replicas": {"target": 2, "draft": 2}}, 0.5),
        (Devices(1, 8), {"actors": {"target": {"num_gpus": 0.6}, "draft": {"num_gpus": 0.3}}}, 0.9),
        (Devices(1, 8), {"draft": {"model": "d", "placement": "separate"}}, None),
        (Devices(1, 8), {"draft": {"model": "d", "device": "cpu"}}, None),
        (Devices(1, 8), {"speculation_mode": "outcomes"}, None),
        (Devices(2, 8), {}, None),
        (Devices(2, 8), {"replicas": {"draft": 3}}, None),
        (Devices(0, 8), {}, None),
        (Devices(0, 8), {"draft": {"model": "d", "placement": "same_process"}}, 0.0),
        (Devices(2, 8), {"draft": {"model": "d", "placement": "same_process"}}, 1.0),
    ],
)
def test_a_pair_has_one_process_where_it_has_one_gpu_or_is_told_to(devices, keys, expected):
    args = validated(AppArgs, {"target": {"model": "t"}, "draft": {"model": "d"}} | keys)
    placed = with_pair_placed(args, devices)
    assert placed.is_paired == (expected is not None)
    assert (placed is args) == (expected is None or args.is_paired)
    placement = placement_of(placed, devices, can_grow=False)
    if expected is not None:
        assert gpus(placement) == (expected, expected)
        assert "the draft model runs in the target's process" in placement.remarks[0]
        assert not placed.has_own_draft
        assert placed.has_draft_model
        assert with_pair_placed(placed, devices) is placed


def test_a_draft_model_shares_with_no_target():
    args = validated(AppArgs, {"replicas": {"target": 3, "draft": 2}})
    placement = placement_of(args, Devices(2, 8), has_target=False)
    assert placement.draft.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    assert placement.remarks == ()


def test_router_and_ingress_go_where_they_are_told_to():
    assert plan(Devices(4, 8)).router.ray_actor_options == {"num_cpus": 0}
    front = {"resources": {"front": 1}, "label_selector": {"pool": "front"}}
    placement = plan(Devices(4, 8), actors={"router": front, "ingress": front})
    for share in (placement.router, placement.ingress):
        assert share.ray_actor_options == {"num_cpus": 0, **front}


def test_serve_takes_the_options():
    from ray.serve.schema import RayActorOptionsSchema

    target = {"resources": {"a": 1}, "label_selector": {"b": "c"}, "num_gpus": 0.25}
    options = plan(Devices(1, 2), actors={"target": target, "draft": {"num_gpus": 0.5}}).target.ray_actor_options
    assert RayActorOptionsSchema.model_validate(options).num_gpus == 0.25


@pytest.mark.parametrize(
    ("keys", "num_gpus", "expected"),
    [
        ({"target": VLLM | {"engine_args": {"tensor_parallel_size": 2}}, "draft": "small"}, 4, (2, 1)),
        ({"target": VLLM | {"engine_args": {"tensor_parallel_size": 2}}, "draft": "small"}, 0, (0, 0)),
        ({"target": {"device_map": "auto"}}, 4, (3, 1)),
        ({"target": {"device_map": "auto"}, "replicas": {"target": 2, "draft": 2}}, 8, (3, 1)),
        ({"target": {"device_map": "auto"}}, 1, (0.5, 0.5)),
        ({"target": {"device_map": "auto"}, "actors": {"target": {"num_gpus": 2}}}, 4, (2, 1)),
        ({"target": {"device_map": {"": "cpu"}}}, 2, (0, 1)),
        ({"target": {"device_map": {"a": 0, "b": "cuda:1", "c": "cpu"}}}, 3, (2, 1)),
        ({"draft": {"device": "cpu"}, "demo": "plain"}, 1, (1, 0)),
        ({"draft": {"device": "cuda"}, "demo": "plain"}, 1, (0.5, 0.5)),
        ({"actors": {"draft": {"num_gpus": 0}}}, 1, (1, 0)),
        ({"actors": {"target": {"num_gpus": 0.8}, "draft": {"num_gpus": 0.2}}}, 1, (0.8, 0.2)),
        ({"actors": {"target": {"num_gpus": 0.8}}}, 2, (0.8, 1)),
    ],
)
def test_device_map_tensor_parallelism_and_num_gpus_are_one_arithmetic(keys, num_gpus, expected):
    assert gpus(plan(Devices(num_gpus, 16), can_grow=False, **keys)) == expected


TP4 = VLLM | {"engine_args": {"tensor_parallel_size": 4}}
ROLES, NO_GPU = ("target", "draft"), {"num_gpus": 0}
DRAFT, TARGET = "actors.draft.num_gpus", "actors.target.num_gpus"


@pytest.mark.parametrize(
    ("keys", "devices", "key", "words"),
    [
        pytest.param({"target": TP4, "draft": "d"}, (4, 16), DRAFT, "or to 0 to run it on a CPU", id="a"),
        pytest.param(
            {"target": TP4, "draft": "d", "actors": {"target": {"num_gpus": 1}}},
            (4, 16),
            TARGET,
            "runs on 4 by target.engine_args.tensor_parallel_size: 4: set both to one number",
            id="b-f",
        ),
        pytest.param({}, (0, 0), TARGET, "set it to the GPUs of one replica, or to 0 to run it on a CPU", id="d"),
        pytest.param({}, (0, 64), TARGET, "so whether the target is to wait for one is not known", id="d-cpus"),
        pytest.param(
            {"actors": {"target": {"num_gpus": 1}}}, (0, 4), DRAFT, "is to wait for one is not known", id="d2"
        ),
        pytest.param(
            {"target": TP4, "draft": "d", "actors": {"target": {"num_gpus": 4}}}, (4, 16), DRAFT, "is left", id="e"
        ),
        ({"target": VLLM, "draft": "d", "actors": {"target": {"num_gpus": 2}}}, (4, 16), TARGET, "spreads it"),
        ({"actors": {"target": {"num_gpus": 2}}}, (4, 16), TARGET, "target.device_map: auto spreads it"),
        ({"actors": {"target": {"num_gpus": 1.5}}}, (4, 16), TARGET, "whole ones"),
        ({"target": {"device": "cpu"}, "actors": {"target": {"num_gpus": 1}}}, (4, 16), TARGET, "set it to 0"),
        ({"target": {"device": "cuda"}, "actors": {"target": {"num_gpus": 0}}}, (4, 16), TARGET, "needs a GPU"),
        ({"target": {"device": "cuda:1"}}, (4, 16), "target.device", "say cuda"),
        ({"target": {"device_map": "cuda:1"}}, (4, 16), "target.device_map", "say cuda"),
        ({"target": VLLM | {"engine_args": {"tensor_parallel_size": "4"}}}, (4, 16), "target.engine_args", "whole"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_key_to_set(keys, devices, key, words):
    with pytest.raises(InvalidParameterError) as caught:
        plan(Devices(*devices), **keys)
    assert caught.value.parameter == key
    assert str(caught.value).startswith(f"{key}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "devices", "key"),
    [
        ({"target": TP4, "draft": {"model": "d", "device": "cpu"}}, (2, 16), TARGET),
        ({"target": {"device": "cuda"}}, (0, 16), TARGET),
        ({"actors": {"draft": {"num_gpus": 1}, "target": {"num_gpus": 1}}}, (1, 16), TARGET),
        ({"actors": {"target": {"num_cpus": 2, **NO_GPU}, "draft": NO_GPU}}, (0, 2), "actors.draft.num_cpus"),
        (
            {"actors": {"target": {"num_cpus": 4, **NO_GPU}, "draft": {"num_cpus": 1, **NO_GPU}}},
            (0, 2),
            "actors.target.num_cpus",
        ),
    ],
)
def test_what_one_machine_lacks_is_refused_and_on_a_cluster_waited_for(keys, devices, key):
    with pytest.raises(InvalidParameterError) as caught:
        plan(Devices(*devices), can_grow=False, **keys)
    assert caught.value.parameter == key
    actors = keys.get("actors", {})
    if "num_gpus" in key:
        keys = keys | {"actors": {"draft": {"num_gpus": 0}} | actors}
        assert "replicas wait until nodes come" in " ".join(plan(Devices(*devices), **keys).remarks)
    else:
        assert plan(Devices(*devices), **keys)


def test_a_model_is_on_a_cpu_where_no_gpu_can_come_or_where_it_is_said():
    for placement in (plan(Devices(0, 4), can_grow=False), plan(Devices(0, 4), actors=dict.fromkeys(ROLES, NO_GPU))):
        assert (gpus(placement), placement.remarks) == ((0, 0), ())


@pytest.mark.parametrize(
    ("node_gpus", "num_targets", "num_drafts", "each"),
    [
        ((4, 4), 1, 1, 4),
        ((4, 4), 1, 2, 3),  # Ray may put a draft on each node: 4 would then wait for ever
        ((4, 4), 1, 5, 2),
        ((8, 2, 2), 1, 1, 7),
        ((8, 8), 2, 2, 6),
        ((4, 4, 4), 2, 2, 3),
        ((4, 4), 1, 7, 1),
    ],
)
@pytest.mark.parametrize("are_said", [False, True])
def test_a_spread_model_finds_room_on_one_node_wherever_the_drafts_are(
    node_gpus, num_targets, num_drafts, each, are_said
):
    actors = {"actors": {"draft": {"num_gpus": 1}}} if are_said else {}
    replicas = {"target": num_targets, "draft": num_drafts}
    devices = Devices(sum(node_gpus), 64, node_gpus)
    assert gpus(plan(devices, target={"device_map": "auto"}, replicas=replicas, **actors)) == (each, 1)

    def worst(size: int) -> int:
        """Targets that find room in the worst places of the drafts."""
        places = itertools.combinations_with_replacement(range(len(node_gpus)), num_drafts)
        left = ([have - where.count(node) for node, have in enumerate(node_gpus)] for where in places)
        return min(sum(free // size for free in nodes) for nodes in left if min(nodes) >= 0)

    assert worst(each) >= num_targets
    assert worst(each + 1) < num_targets


def test_a_replica_without_a_gpu_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [workers._gpu_share(n) for n in (4.0, 1.0, 0.25)] == [1, 1, 0.25]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert workers._gpu_share(0.0) == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


ASKED = st.sampled_from([None, None, 0, 0.25, 0.5, 0.75, 1, 2, 4])
MODELS = st.sampled_from(
    [
        {},
        {},
        {"device": "cpu"},
        {"device": "cuda"},
        {"device_map": "auto"},
        {"device_map": {"a": 0, "b": 1}},
        {"device_map": {"a": 0, "b": "cpu"}},
    ]
)
TARGETS = st.one_of(
    MODELS,
    st.integers(1, 4).map(lambda size: {"engine": "vllm", "engine_args": {"tensor_parallel_size": size}}),
)


@settings(max_examples=300, deadline=None)
@given(
    num_gpus=st.integers(0, 6),
    num_cpus=st.integers(0, 8),
    target=TARGETS,
    draft=MODELS,
    asked=st.tuples(ASKED, ASKED),
    cpus=st.tuples(*[st.sampled_from([None, None, 1, 3])] * 2),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    can_grow=st.booleans(),
)
def test_every_plan_fits_and_every_refusal_names_a_key(
    num_gpus, num_cpus, target, draft, asked, cpus, counts, can_grow
):
    """On one node: no model has a CPU while it may have a GPU, no GPU is anybody's but its owner's, and all fit."""
    keys = {
        "target": {"model": "t"} | target,
        "draft": {"model": "d"} | draft,
        "replicas": {"target": counts[0], "draft": counts[1]},
        "actors": {
            role: {name: value for name, value in (("num_gpus", gpu), ("num_cpus", cpu)) if value is not None}
            for role, gpu, cpu in zip(("target", "draft"), asked, cpus, strict=True)
        },
    }
    try:
        placement = plan(Devices(num_gpus, num_cpus), can_grow=can_grow, **keys)
    except InvalidParameterError as error:
        refusal = error
    else:
        check(placement, keys, counts, None if can_grow else (num_gpus, num_cpus), num_gpus, can_grow)
        return
    assert str(refusal).startswith(f"{refusal.parameter}: ")
    assert refusal.parameter.split(".")[0] in ("actors", "target", "draft")


def check(
    placement: Placement,
    keys: Any,
    counts: tuple[int, int],
    bound: tuple[int, int] | None,
    num_gpus: int,
    can_grow: bool,
) -> None:
    shares: dict[str, ActorShare] = {"target": placement.target, "draft": placement.draft}
    for role, share in shares.items():
        model, said = keys[role], keys["actors"][role].get("num_gpus")
        is_on_cpu = said == 0 or model.get("device") == "cpu"
        assert share.num_gpus < 1 or share.num_gpus == int(share.num_gpus)
        if num_gpus or can_grow or said or model.get("device") == "cuda":
            assert (share.num_gpus == 0) == is_on_cpu, role
        assert said in (None, share.num_gpus)
        size = model.get("engine_args", {}).get("tensor_parallel_size", 1)
        needed = 2 if model.get("device_map") == {"a": 0, "b": 1} else size
        assert share.num_gpus in (0, needed) or (needed == 1 and (share.num_gpus <= 1 or "device_map" in model))
    if bound is not None:
        pairs = list(zip(shares.values(), counts, strict=True))
        assert fit([share.num_gpus for share, count in pairs for _ in range(count)], bound[0])
        assert sum(share.ray_actor_options["num_cpus"] * count for share, count in pairs) <= bound[1] + 1e-6


def fit(parts: list[float], num_gpus: int) -> bool:
    """Whether the parts can be dealt to the GPUs, whole ones apart, so that no GPU has more than one in all."""
    left = num_gpus - sum(int(part) for part in parts if part >= 1)
    return left >= 0 and dealt(sorted((part for part in parts if 0 < part < 1), reverse=True), (1.0,) * left)


def dealt(parts: list[float], rooms: tuple[float, ...]) -> bool:
    if not parts:
        return True
    for room in {room for room in rooms if room >= parts[0] - 1e-6}:
        at = rooms.index(room)
        if dealt(parts[1:], (*rooms[:at], room - parts[0], *rooms[at + 1 :])):
            return True
    return False
