"""The application: four deployments, bound to each other.

No postponed annotations here: Serve makes the builder's argument by the class that its annotation is.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.config import AppArgs
from cluster.placement import ActorShare, plan_placement, ray_devices
from cluster.settings import check_ray
from deployments.ingress import OpenAIIngress
from deployments.names import DRAFT, INGRESS, ROUTER, TARGET
from deployments.router import SpeculationRouter
from deployments.transport.options import pinned_options
from deployments.workers import DraftServer, TargetServer

logger = logging.getLogger("ray.serve")

_MOST_REQUESTS = 100_000
"""Serve's own limit of a replica of the ingress, never reached: that of ``limits`` is, whose refusals are OpenAI's."""


def build_app(args: AppArgs) -> Application:
    """Build the application, for ``serve.run`` and for ``import_path`` in Serve's own YAML.

    Args:
        args: What to serve; Serve makes it of the ``args`` of its YAML, and refuses what does not fit.
    """
    check_ray(args.access.allow_unauthenticated_ray)
    placement = plan_placement(ray_devices(), args.replicas, args.actors, has_draft=args.has_draft)
    for remark in placement.remarks:
        logger.info(remark)
    workers = [_worker(TargetServer, TARGET, args, args.replicas.target, placement.target)]
    if args.has_draft:
        workers.append(_worker(DraftServer, DRAFT, args, args.replicas.draft, placement.draft))
    router = serve.deployment(SpeculationRouter, name=ROUTER).options(
        num_replicas=args.replicas.router,
        ray_actor_options=placement.router.ray_actor_options,
        **pinned_options(args.drain_timeout_s),
    )
    ingress = serve.deployment(OpenAIIngress, name=INGRESS).options(
        num_replicas=args.replicas.ingress,
        ray_actor_options=placement.ingress.ray_actor_options,
        max_ongoing_requests=_MOST_REQUESTS,
        max_queued_requests=-1,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return ingress.bind(args, router.bind(args, *workers))


def _worker(cls: type[Any], name: str, args: AppArgs, num_replicas: int, share: ActorShare) -> Application:
    deployment = serve.deployment(cls, name=name).options(
        num_replicas=num_replicas, ray_actor_options=share.ray_actor_options, **pinned_options(args.drain_timeout_s)
    )
    return deployment.bind(args, share.num_torch_threads, share.gpu_share)
