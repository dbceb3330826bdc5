"""``/v1/admin/quantization``: another quantization for a service that runs.

Where ``specdec serve`` runs the service, the application is deployed again with another key, and Serve replaces its
replicas as for any update of the configuration: new ones load the original weights, old ones drain, and fingerprints
keep the two apart. Elsewhere the service is what its configuration says, and that is where the key is changed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI
from ray import serve

from cluster.config.app import AppArgs
from cluster.config.base import validated
from cluster.config.files import merged
from cluster.config.names import DEPLOYMENTS, DRAFT, LOCAL_APPLICATION
from cluster.launch.local import load_builder, serves_log
from cluster.models.identity import fingerprints
from deployments.http.api import ApiOf, ContextOf
from deployments.http.errors import INVALID, ApiError
from deployments.http.schemas.fields import Body
from deployments.http.strict_json import StrictJsonRoute
from specdec.core.errors import SpecdecError
from specdec.core.types import Quantization

_UNDER_WAY = frozenset({"NOT_STARTED", "DEPLOYING", "DELETING"})
"""Serve's words for an application that changes; after an update that failed nothing changes any more."""


class QuantizationBody(Body):
    """How the models' weights are to be held; what is absent stays as it is."""

    target: Quantization | None = None
    draft: Quantization | None = None


def add_quantization_routes(app: FastAPI, args: AppArgs, *, is_local: bool = False) -> None:
    """Tell how the models are quantized, and let administrators change it.

    Args:
        app: Gets the routes.
        args: What the service was deployed with.
        is_local: Whether ``specdec serve`` has deployed it, so that it may be deployed again from here.
    """
    router = APIRouter(prefix="/v1/admin", route_class=StrictJsonRoute)
    one_by_one = asyncio.Lock()

    @router.get("/quantization")
    async def quantization(api: ApiOf, context: ContextOf) -> dict[str, Any]:
        api.check_admin(context, "get quantization")
        return await asyncio.to_thread(described, args)

    @router.post("/quantization", status_code=202)
    async def quantize(body: QuantizationBody, api: ApiOf, context: ContextOf) -> dict[str, Any]:
        api.check_admin(context, f"set quantization target={body.target} draft={body.draft}")
        wanted = requantized(args, body.target, body.draft)
        async with one_by_one:
            is_deployed = await asyncio.to_thread(_deploy, wanted, wanted != args, is_local)
        replaced = [name for name in DEPLOYMENTS if is_deployed and (name != DRAFT or wanted.has_own_draft)]
        return await asyncio.to_thread(described, wanted) | {"replaced": replaced}

    app.include_router(router)


def described(args: AppArgs) -> dict[str, Any]:
    """Of both models the quantization and the fingerprint; of the draft none where no draft model is deployed."""
    own = fingerprints(args)
    target = {"quantization": args.target.quantization, "fingerprint": own.decision}
    draft = {"quantization": args.draft.quantization, "fingerprint": own.draft}
    return {"target": target, "draft": draft if args.has_draft_model else None}


def requantized(args: AppArgs, target: Quantization | None, draft: Quantization | None) -> AppArgs:
    """The configuration with another quantization.

    Raises:
        ApiError: 400: none is given, or one for a draft model that is not there.
    """
    if target is None and draft is None:
        raise ApiError(400, "send target or draft, or both", param="target", code=INVALID)
    if draft is not None and not args.has_draft_model:
        raise ApiError(400, "no draft model is deployed with this target", param="draft", code=INVALID)
    given = {"target.quantization": target, "draft.quantization": draft}
    changes = {key: value for key, value in given.items() if value is not None}
    data = args.model_dump(exclude_unset=True)
    try:
        return validated(AppArgs, merged(AppArgs, data, changes), "")
    except SpecdecError as error:
        raise ApiError(400, str(error), param="target", code=INVALID) from None


def _deploy(args: AppArgs, is_new: bool, is_local: bool) -> bool:
    """Hand the application to Serve again, from within a replica of it; does not wait for the new replicas.

    Serve then replaces every deployment of it: ``serve.run_many`` gives each a random version (Ray 2.60,
    ``serve/_private/client.py``: ``version=deployment._version or get_random_string()``), and no public option sets one
    (``Deployment.options(version=)`` is refused). Serve takes whatever it is given: of two ingresses that both look
    before either deploys, the later one's holds.

    Args:
        args: What is to be served.
        is_new: Whether this replica serves anything else. Where not, an application that runs is left alone, as all its
            replicas are alike; one whose update has failed is deployed.
        is_local: Whether it may be deployed from here.

    Returns:
        Whether it was handed over.

    Raises:
        ApiError: 409: an update is under way, or the application is kept as a file says; 400: it cannot be served.
    """
    name = serve.get_replica_context().app_name
    status = serve.status().applications[name].status.value
    if status in _UNDER_WAY:
        raise ApiError(409, f"the application is {status}: try again when it runs", code="update_under_way")
    if not is_new and status == "RUNNING":
        return False
    if not is_local:
        lines = ", ".join(
            f"{role}.quantization: {model.quantization}"
            for role, model in (("target", args.target), ("draft", args.draft))
            if "quantization" in model.model_fields_set
        )
        message = f"the service is what its configuration says: put {lines} there, render it and deploy it again"
        raise ApiError(409, message, code="declarative_application")
    try:
        application = load_builder(LOCAL_APPLICATION)(args)
    except SpecdecError as error:
        raise ApiError(400, str(error), code=INVALID) from None
    serve.run_many(
        [serve.RunTarget(target=application, name=name, route_prefix="/", logging_config=serves_log(args))],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    return True
