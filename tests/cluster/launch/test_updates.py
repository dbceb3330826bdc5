"""Which deployments get a successor beside them, and which in their place."""

from __future__ import annotations

import pytest

from cluster.config.replicas import Replicas, Updates
from cluster.launch.capacity import Node, plan_updates
from cluster.launch.placement import ActorShare

NO_ROOM = "no room for a second {0} beside the one that runs"


def plan(free: dict[str, float], replicas: dict[str, object] | None = None, **updates: str):
    gpu, none = ActorShare({"num_cpus": 4, "num_gpus": 1}), ActorShare({"num_cpus": 0})
    half = ActorShare({"num_cpus": 1, "num_gpus": 0.5, "accelerator_type": "L40S", "resources": {"bay": 1}})
    shares = {"target": gpu, "draft": half, "router": none, "ingress": none}
    nodes = [Node("n", free)]
    return plan_updates(Updates.model_validate(updates), Replicas.model_validate(replicas or {}), shares, nodes)


@pytest.mark.parametrize(
    ("free", "target", "draft"),
    [
        ({}, 0, 0),
        ({"CPU": 64}, 0, 0),
        ({"CPU": 64, "GPU": 1}, 100, 0),
        ({"CPU": 64, "GPU": 1, "bay": 1, "accelerator_type:L40S": 1}, 100, 0),  # the target takes it first
        ({"CPU": 64, "GPU": 1.5, "bay": 1, "accelerator_type:L40S": 1}, 100, 100),
        ({"CPU": 64, "GPU": 0.5, "bay": 1, "accelerator_type:L40S": 1}, 0, 100),
        ({"CPU": 64, "GPU": 1.5, "bay": 1}, 100, 0),
        ({"CPU": 3, "GPU": 2}, 0, 0),
    ],
)
def test_a_model_surges_where_there_is_room(free, target, draft):
    found = plan(free)
    assert found.surge_percent == {"target": target, "draft": draft, "router": 100, "ingress": 100}
    said = [part for part in ("target", "draft") if not found.surge_percent[part]]
    assert len(found.remarks) == len(said)
    for part, remark in zip(said, found.remarks, strict=True):
        assert NO_ROOM.format(part) in remark
        assert ("new requests wait" in remark) is (part == "target")


def test_what_is_said_counts():
    assert plan({}, target="surge", router="replace").surge_percent == {
        "target": 100,
        "draft": 0,
        "router": 0,
        "ingress": 100,
    }
    found = plan({"CPU": 64, "GPU": 8}, target="replace", draft="surge")
    assert (found.surge_percent["target"], found.surge_percent["draft"], found.remarks) == (0, 100, ())


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("count", [1, 3, 5, {"min": 1, "max": 7}])
def test_no_more_surge_than_there_is_room_for(num_gpus, count):
    percent = plan({"CPU": 64, "GPU": num_gpus}, {"target": count}, draft="replace").surge_percent["target"]
    most = count if isinstance(count, int) else count["max"]
    for running in range(1, most + 1):
        surge = (percent * running + 99) // 100  # as Serve rounds it
        assert 1 <= surge <= min(num_gpus, most)


BIG, SMALL = {"pool": "big"}, {"pool": "small"}


@pytest.mark.parametrize(
    ("free", "count", "selector", "percent"),
    [
        ([(2, BIG), (2, BIG)], 1, None, 0),  # four are free, and on no node all four
        ([(4, BIG), (2, BIG)], 1, None, 100),
        ([(4, BIG), (4, SMALL)], 2, None, 100),
        ([(4, BIG), (4, SMALL)], 2, SMALL, 50),
        ([(4, BIG)], 1, SMALL, 0),
        ([(4, BIG)], 1, {"pool": "!small"}, 100),
        ([(4, BIG)], 1, {"pool": "in(small, big)"}, 100),
        ([(4, BIG)], 1, {"pool": "!in(small, big)"}, 0),
        ([(4, {})], 1, {"pool": "!small"}, 100),
        ([(4, {})], 1, BIG, 0),
        ([(7, BIG), (3, BIG)], 2, None, 50),
    ],
)
def test_room_is_room_on_one_node_that_may_take_the_replica(free, count, selector, percent):
    options = {"num_gpus": 4} | ({"label_selector": selector} if selector else {})
    nodes = [Node(str(i), {"GPU": gpus}, labels) for i, (gpus, labels) in enumerate(free)]
    replicas = Replicas.model_validate({"target": count})
    assert plan_updates(Updates(), replicas, {"target": ActorShare(options)}, nodes).surge_percent["target"] == percent


def test_what_asks_for_labels_alone_needs_a_node_with_them():
    front = ActorShare({"num_cpus": 0, "label_selector": {"pool": "front"}})
    for labels, percent in (({"pool": "front"}, 100), ({}, 0)):
        found = plan_updates(Updates(), Replicas(), {"target": front}, [Node("n", {}, labels)])
        assert found.surge_percent == {"target": percent}
