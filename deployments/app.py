"""The application, its deployments bound to each other, and the drafters that several applications may share.

No postponed annotations here: Serve makes the builder's argument by the class that its annotation is.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from cluster.config.app import AppArgs
from cluster.config.base import refused_key
from cluster.config.environment import api_keys, check_ray
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET
from cluster.config.replicas import ReplicaRange, scaling
from cluster.launch.capacity import plan_updates, ray_nodes
from cluster.launch.placement import ActorShare, placement_of, ray_devices, with_pair_placed
from cluster.models.download import check_models
from cluster.models.identity import fingerprints
from cluster.models.sources import configured_pair, draft_source, read_template, target_source
from cluster.models.vllm import check_engine, runtime_env
from deployments.ingress import OpenAIIngress, model_info
from deployments.metrics.families import Part
from deployments.operate.adapters import configured_adapters
from deployments.router import SpeculationRouter
from deployments.transport.discovery import HEALTH_OPTIONS, pinned_options
from deployments.workers import DraftServer, TargetServer
from specdec.models.loading import load_tokenizer
from specdec.structured.parsing.selection import AnswerForms

logger = logging.getLogger("ray.serve")

_MOST_REQUESTS = 100_000
"""Serve's own limit of a replica of the ingress, never reached: that of ``limits`` is, whose refusals are OpenAI's."""


def build_app(args: AppArgs) -> Application:
    """Build the application, for ``serve.run`` and for ``import_path`` in Serve's own YAML.

    Args:
        args: What to serve; Serve makes it of the ``args`` of its YAML, and refuses what does not fit.

    Raises:
        SpecdecError: No replica could serve that. Serve then leaves the version before as it is.
    """
    return _build_app(args, is_local=False)


def _build_app(args: AppArgs, *, is_local: bool) -> Application:
    check_ray(args.access.allow_unauthenticated_ray)
    check_files(args)
    engine = check_engine(args)
    if engine is not None:
        logger.info(engine)
    devices = ray_devices()
    if is_local:
        args = with_pair_placed(args, devices)
    placement, nodes = placement_of(args, devices, can_grow=not is_local), ray_nodes()
    parts: list[Part] = (
        ["target", "draft", "router", "ingress"] if args.has_own_draft else ["target", "router", "ingress"]
    )
    updates = plan_updates(args.updates, args.replicas, placement, nodes, parts)
    surge = updates.surge_percent
    for remark in (*placement.remarks, *updates.remarks):
        logger.info(remark)
    environment = runtime_env(args)
    workers = [_worker(TargetServer, "target", args, placement.target, surge["target"], environment=environment)]
    if args.has_own_draft:
        workers.append(_worker(DraftServer, "draft", args, placement.draft, surge["draft"]))
    router = serve.deployment(SpeculationRouter, name=ROUTER).options(
        **replica_options(args.replicas.router, "router"),
        ray_actor_options=placement.router.ray_actor_options,
        max_surge_percent=surge["router"],
        **pinned_options(args.drain_timeout_s),
    )
    ingress = serve.deployment(OpenAIIngress, name=INGRESS).options(
        **replica_options(args.replicas.ingress, "ingress"),
        ray_actor_options=placement.ingress.ray_actor_options,
        max_surge_percent=surge["ingress"],
        max_ongoing_requests=_MOST_REQUESTS,
        max_queued_requests=-1,
        **HEALTH_OPTIONS,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return ingress.bind(args, router.bind(args, *workers))


def build_local_app(args: AppArgs) -> Application:
    """Build the application for one machine, where no node can come, as ``specdec serve`` does."""
    return _build_app(args, is_local=True)


class DraftPoolArgs(AppArgs):
    """Arguments of the pool's builder: those of an application whose target has the vocabulary, and whom it serves."""

    applications: tuple[str, ...] = Field(
        min_length=1, description="names of the applications that it drafts for, each of which names it as a pool"
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> "DraftPoolArgs":
        if not self.has_own_draft:
            raise refused_key("draft.model", "draft.model: a pool needs a draft model of its own")
        return self

    def app_args(self) -> AppArgs:
        """The part that a drafter takes."""
        return AppArgs.model_validate(self.model_dump(exclude_unset=True, exclude={"applications"}))


def build_draft_pool(pool: DraftPoolArgs) -> Application:
    """Build an application of drafters alone, without a route; takes and raises what :func:`build_app` does."""
    args = pool.app_args()
    check_ray(args.access.allow_unauthenticated_ray)
    check_files(args)
    placement, nodes = placement_of(args, ray_devices(), has_target=False), ray_nodes()
    updates = plan_updates(args.updates, args.replicas, placement, nodes, ["draft"])
    for remark in (*placement.remarks, *updates.remarks):
        logger.info(remark)
    return _worker(DraftServer, "draft", args, placement.draft, updates.surge_percent["draft"], pool.applications)


def check_files(args: AppArgs) -> None:
    """Refuse files that no replica could use; of those that are not on this machine it can only warn.

    Raises:
        SpecdecError: A file or a model that is here cannot be used, or the hub has no such model.
    """
    check_models(args, logger.warning)
    for file in filter(None, (args.access.api_keys_file, args.chat_template)):
        if not Path(file).exists():
            logger.warning("there is no file %s here; every machine with an ingress needs it", file)
        elif file == args.chat_template:
            read_template(file)
        else:
            api_keys(file)
    target, draft = target_source(args), draft_source(args)
    if not all(Path(source.path).expanduser().is_dir() for source in (target, draft) if source is not None):
        return
    info = model_info(args, fingerprints(args))
    if all(Path(path).expanduser().is_dir() for one in args.lora.adapters for path in (one.path, one.draft) if path):
        configured_adapters(args, info.target)
    AnswerForms(load_tokenizer(target), args.tool_parser, args.reasoning_tags)
    if draft is not None:
        configured_pair(args, target, draft)


def replica_options(count: int | ReplicaRange, part: Part) -> dict[str, Any]:
    """A deployment's options for a number of replicas, or for a range within which Serve follows the load."""
    options = scaling(count, part)
    if "autoscaling_config" in options:
        with warnings.catch_warnings():  # the variables that are to stand in place of a key are not read yet
            warnings.simplefilter("ignore", DeprecationWarning)
            options["autoscaling_config"] = AutoscalingConfig.model_validate(options["autoscaling_config"])
    return options


def _worker(
    cls: type[Any],
    part: Part,
    args: AppArgs,
    share: ActorShare,
    surge_percent: int,
    *more: Any,
    environment: Mapping[str, Any] = MappingProxyType({}),
    name: str = "",
) -> Application:
    ray_options = share.ray_actor_options | ({"runtime_env": dict(environment)} if environment else {})
    deployment = serve.deployment(cls, name=name or (TARGET if part == "target" else DRAFT)).options(
        **replica_options(getattr(args.replicas, part), part),
        ray_actor_options=ray_options,
        max_surge_percent=surge_percent,
        **pinned_options(args.drain_timeout_s),
    )
    return deployment.bind(args, share.num_torch_threads, share.num_gpus, *more)
