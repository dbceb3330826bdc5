"""The builders of the service's application and of its draft model's.

No postponed annotations here: Serve makes the builder's argument by the class that its annotation is.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from cluster.config.app import AppArgs
from cluster.config.environment import api_keys, check_ray
from cluster.config.names import (
    APPLICATION_NAME,
    DRAFT,
    DRAFT_APPLICATION,
    DRAFT_APPLICATION_NAME,
    INGRESS,
    ROUTER,
    TARGET,
)
from cluster.config.replicas import ReplicaRange, scaling
from cluster.launch.applications import of_draft, of_service
from cluster.launch.capacity import plan_updates, ray_nodes
from cluster.launch.placement import ActorShare, Placement, placement_of, ray_devices, with_pair_placed
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
from specdec.core.errors import InvalidParameterError
from specdec.models.loading import load_tokenizer
from specdec.structured.parsing.selection import AnswerForms

logger = logging.getLogger("ray.serve")

_MOST_REQUESTS = 100_000
"""Serve's own limit of a replica of the ingress, never reached: that of ``limits`` is, whose refusals are OpenAI's."""


def build_app(args: AppArgs) -> Application:
    """Build the service's application, for ``serve.run`` and for ``import_path`` in Serve's own YAML.

    Args:
        args: What to serve; Serve makes it of the ``args`` of its YAML, and refuses what does not fit.

    Raises:
        SpecdecError: No replica could serve that. Serve then leaves the version before as it is.
    """
    if args.has_own_draft:
        raise InvalidParameterError(
            "draft.model",
            f"draft.model: the draft model is an application of its own ({DRAFT_APPLICATION}): name that one here as "
            "draft.application",
        )
    check_ray(args.access.allow_unauthenticated_ray)
    check_files(args)
    return _service(args, placement_of(args, ray_devices()))


def build_draft(args: dict[str, Any]) -> Application:
    """Build the draft model's application: refuses nothing, as KubeRay waits until all applications run.

    Args:
        args: Keys of :class:`AppArgs` that a drafter goes by; whom it serves is in its ``user_config``
            (:func:`cluster.launch.applications.draft_args`). What is wrong is said by the replica.
    """
    return drafts_for(args, {})


def drafts_for(args: dict[str, Any], user_config: Mapping[str, Any]) -> Application:
    """Build the same with a ``user_config``, where no Serve YAML says it."""
    devices, problem = ray_devices(), ""
    try:
        draft = args.get("draft", {})
        has_model = isinstance(draft, str) or draft.get("model") is not None
        # A configuration with a draft model needs a target, and which one it is decides nothing here.
        parsed = AppArgs.model_validate({**args, "target": {"model": "unknown"}} if has_model else args)
        share = placement_of(parsed, devices, has_target=False).draft
    except Exception as error:
        problem = f"the draft model's application cannot be as its args say: {error!s}"
        logger.error(problem)
        parsed, share = AppArgs(), ActorShare({"num_cpus": 0})
    return _draft(parsed, args, share, user_config, problem)


def build_local(args: AppArgs) -> dict[str, Application]:
    """Build all applications for one machine, where no node can come, as ``specdec serve`` does; by their names.

    Raises:
        SpecdecError: They cannot be served here.
    """
    check_ray(args.access.allow_unauthenticated_ray)
    check_files(args)
    devices = ray_devices()
    args = with_pair_placed(args, devices)
    placement = placement_of(args, devices, can_grow=False)
    applications = {APPLICATION_NAME: _service(of_service(args), placement)}
    if args.has_own_draft:
        fixed, config = of_draft(args)
        applications[DRAFT_APPLICATION_NAME] = _draft(args, fixed, placement.draft, config)
    return applications


def _service(args: AppArgs, placement: Placement) -> Application:
    engine = check_engine(args)
    if engine is not None:
        logger.info(engine)
    shares = {"target": placement.target, "router": placement.router, "ingress": placement.ingress}
    updates = plan_updates(args.updates, args.replicas, shares, ray_nodes())
    surge = updates.surge_percent
    for remark in (*placement.remarks, *updates.remarks):
        logger.info(remark)
    share, environment = placement.target, runtime_env(args)
    target = serve.deployment(TargetServer, name=TARGET).options(
        **replica_options(args.replicas.target, "target"),
        ray_actor_options=share.ray_actor_options | ({"runtime_env": environment} if environment else {}),
        max_surge_percent=surge["target"],
        **pinned_options(args.drain_timeout_s),
    )
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
    return ingress.bind(args, router.bind(args, target.bind(args, share.num_torch_threads, share.num_gpus)))


def _draft(
    args: AppArgs, given: dict[str, Any], share: ActorShare, user_config: Mapping[str, Any], problem: str = ""
) -> Application:
    updates = plan_updates(args.updates, args.replicas, {"draft": share}, ray_nodes())
    for remark in updates.remarks:
        logger.info(remark)
    draft = serve.deployment(DraftServer, name=DRAFT).options(
        **replica_options(args.replicas.draft, "draft"),
        ray_actor_options=share.ray_actor_options,
        max_surge_percent=updates.surge_percent["draft"],
        user_config=dict(user_config) or None,
        **pinned_options(args.drain_timeout_s),
    )
    return draft.bind(given, share.num_torch_threads, share.num_gpus, problem)


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
