"""Further drafters in the configuration: read, refused, placed and deployed."""

from __future__ import annotations

import pytest

from cluster.config.files import load_config
from cluster.launch.placement import Devices, placement_of
from cluster.launch.serve_config import serve_config
from cluster.models.download import fetch_models
from specdec.core.errors import InvalidParameterError

PAIR = {"target.model": "t", "draft.model": "d"}
GPU_AND_CPU = [
    {"name": "gpu", "model": "g", "device": "cuda", "other_vocabulary": True},
    {"name": "cpu", "model": "c", "device": "cpu", "replicas": 2, "actor": {"num_cpus": 3}},
]


def configured(**more):
    return load_config(None, PAIR | more)


def test_each_is_deployed_as_if_it_were_the_draft():
    args = configured(drafters=GPU_AND_CPU, max_num_seqs=7).app_args()
    gpu, cpu = map(args.of_drafter, args.drafters)
    assert (gpu.draft.model, gpu.draft.other_vocabulary, gpu.replicas.draft) == ("g", True, 1)
    assert (cpu.draft.model, cpu.draft.other_vocabulary, cpu.replicas.draft) == ("c", False, 2)
    assert gpu.target == cpu.target == args.target
    assert (cpu.max_num_seqs, cpu.drafters) == (7, ())
    assert args.drafter_names == ("drafter", "gpu", "cpu")
    assert configured(**{"draft.placement": "same_process"}).app_args().drafter_names == ()


def test_a_list_of_names_and_models_is_enough():
    assert [(one.name, one.model) for one in configured(drafters="a=x, b=y").drafters] == [("a", "x"), ("b", "y")]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"drafters": "cpu"}, "on a command line name=model"),
        ({"drafters": "a=m,a=n"}, "names a twice"),
        ({"drafters": "drafter=m"}, "not target, nor drafter"),
        ({"drafters": "CPU=m"}, "small letters"),
        ({"drafters": [{"model": "m"}]}, "each needs a name"),
        ({"drafters": [{"name": "x"}]}, "x must have a model or a pool"),
        (
            {"drafters": [{"name": "x", "model": "m", "method": "ngram+model"}]},
            "lookup and heads draft in the",
        ),
        ({"drafters": [{"name": "x", "method": "eagle3", "heads": "h"}]}, "joined in draft.method"),
        ({"drafters": [{"name": "x", "model": "m", "tree_tokens": 4}]}, "x drafts by a model"),
        ({"drafters": [{"name": "x", "model": "m", "placement": "same_process"}]}, "x drafts in a process of its own"),
        ({"drafters": [{"name": "x", "pool": "p", "model": "m"}]}, "pool and model exclude each other"),
        ({"drafters": [{"name": "x", "pool": "p", "replicas": 2, "actor": {}}]}, "pool and actor, replicas exclude"),
        ({"drafters": [{"name": name, "pool": "p"} for name in "xy"]}, "one pool twice"),
        ({"drafters": [{"name": "x", "pool": "p"}], "draft.model": None, "draft.pool": "p"}, "that of draft again"),
        ({"drafters": [{"name": "x", "model": "m", "devic": "cpu"}]}, "did you mean 'device'"),
        ({"drafters": ",".join(f"d{i}=m" for i in range(8))}, "at most 7"),
        ({"drafters": "c=m", "draft.placement": "same_process"}, "in a process of its own"),
        ({"drafters": "c=m", "draft.model": None, "draft.method": "ngram"}, "in a process of its own"),
        ({"drafters": "c=m", "lora.models": "both"}, "without adapters"),
        ({"drafters": "c=m", "target.model": None, "draft.model": None}, "give target too"),
    ],
)
def test_what_is_refused_is_named(more, says):
    given = {key: value for key, value in (PAIR | more).items() if value is not None}
    with pytest.raises(InvalidParameterError, match=says):
        load_config(None, given)


def test_a_pools_drafters_are_another_applications():
    args = configured(drafters=[{"name": "tail", "pool": "drafts"}, *GPU_AND_CPU]).app_args()
    assert args.pools == {"tail": "drafts"}
    assert args.drafter_names == ("drafter", "tail", "gpu", "cpu")
    assert [drafter.name for drafter in args.deployed_drafters] == ["gpu", "cpu"]
    placement = placement_of(args, Devices(num_gpus=3, num_cpus=16))
    assert (placement.drafters.keys(), placement.target.num_gpus) == ({"gpu", "cpu"}, 1), "it takes none of the GPUs"
    both = load_config(None, {"target.model": "t", "draft.pool": "others", "drafters": [{"name": "tail", "pool": "p"}]})
    assert both.pools == {"drafter": "others", "tail": "p"}


@pytest.mark.parametrize("refuse", [lambda config: fetch_models(config, print), serve_config])
@pytest.mark.parametrize(
    ("pool", "key"),
    [({"drafters": [{"name": "tail", "pool": "p"}]}, "drafters.tail.pool"), ({"draft": {"pool": "p"}}, "draft.pool")],
)
def test_one_application_alone_has_no_pool(refuse, pool, key):
    given = {"target.model": "t", "draft.model": "d"} if "drafters" in pool else {"target.model": "t"}
    with pytest.raises(InvalidParameterError) as refused:
        refuse(load_config(None, given | pool))
    assert str(refused.value).startswith(f"{key}: ")


def test_each_has_a_share_of_its_own():
    placement = placement_of(configured(drafters=GPU_AND_CPU), Devices(num_gpus=3, num_cpus=16))
    assert [placement.target.num_gpus, placement.draft.num_gpus] == [1, 1]
    assert {name: share.num_gpus for name, share in placement.drafters.items()} == {"gpu": 1, "cpu": 0}
    assert placement.drafters["cpu"].num_torch_threads == 3


def test_no_room_for_one_names_its_key():
    drafters = [{"name": "cpu", "model": "c", "device": "cpu", "actor": {"num_gpus": 1}}]
    with pytest.raises(InvalidParameterError, match=r"drafters\.cpu\.actor\.num_gpus: 1"):
        placement_of(configured(drafters=drafters), Devices(num_gpus=3, num_cpus=16))


def test_a_serve_configuration_has_a_deployment_for_each():
    config = serve_config(configured(drafters=GPU_AND_CPU, **{"actors.target.num_gpus": 1}))
    deployments = [one["name"] for one in config["applications"][0]["deployments"]]
    assert {"DraftServer", "DraftServer-gpu", "DraftServer-cpu"} <= set(deployments)
    assert config["applications"][-1]["args"]["drafters"] == ["gpu", "cpu"]
    with pytest.raises(InvalidParameterError, match="a cluster would show it"):
        serve_config(configured(drafters=[{"name": "x", "model": "m", "token": "hf_x"}]))


def test_replicas_change_without_an_update_where_further_drafters_are_placed_too():
    placed = {"num_cpus": 1, "num_gpus": 1}
    further = {"name": "x", "model": "m", "actor": placed}
    more = {"actors.target": placed, "actors.draft": placed, "replicas.target": 2}
    fixed = serve_config(configured(drafters=[further], **more))["applications"][0]["args"]
    assert "replicas" not in fixed
    fixed = serve_config(configured(drafters=[further | {"actor": {}}], **more))["applications"][0]["args"]
    assert fixed["replicas"] == {"target": 2}, "its share depends on it"


def test_beside_a_separate_draft_each_further_drafter_says_which_devices_it_takes():
    more = {"separate_draft": True, "actors.target.num_gpus": 1, "actors.draft.num_gpus": 1}
    with pytest.raises(InvalidParameterError, match=r"set drafters\.x\.actor\.num_gpus"):
        serve_config(configured(drafters=[{"name": "x", "model": "m"}], **more))
    for own in ({"actor": {"num_gpus": 1}}, {"device": "cpu"}):
        main, draft, *_ = serve_config(configured(drafters=[{"name": "x", "model": "m", **own}], **more))[
            "applications"
        ]
        assert ("drafters" in main["args"], "drafters" in draft["args"]) == (True, False)
