"""What this package knows of ``deployments``: its names, as strings. Deployments find each other by them, too."""

INGRESS = "OpenAIIngress"
ROUTER = "SpeculationRouter"
DRAFT = "DraftServer"
TARGET = "TargetServer"
DEPLOYMENTS = (INGRESS, ROUTER, DRAFT, TARGET)


def loads_model(deployment: str) -> bool:
    """Whether a deployment's replicas load a model, and say what they do."""
    return deployment in (TARGET, DRAFT)


APPLICATION_NAME = "specdec"
APPLICATION = "deployments.app:build_app"
LOCAL_APPLICATIONS = "deployments.app:build_local"
"""Both applications, for one machine."""
DRAFT_APPLICATION = "deployments.app:build_draft"
DRAFT_APPLICATION_NAME = f"{APPLICATION_NAME}-draft"
STATUS = "deployments.operate.status"
"""Module with a builder for each of the service's status applications: ``build_health`` for ``/health``, and so on."""
STATUS_PARTS = ("health", "metrics")
MIDDLEWARES = "deployments.proxy:middlewares"
"""What Serve's HTTP proxy runs around each request."""
OWN_TRACES_ONLY = "deployments.proxy:own_traces_only"
"""The same, where clients do not decide which requests are traced."""
AUTOSCALER = "deployments.metrics.autoscaling:Autoscaler"
"""What decides how many replicas of a range there are."""
OTLP = "deployments.metrics.spans:otlp"
"""What makes the exporter of traces."""
MONITORING = "deployments.monitoring:files"
"""Gives the files of dashboards and alerts."""
