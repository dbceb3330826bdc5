"""Names of the deployments; they find each other by them."""

INGRESS = "OpenAIIngress"
ROUTER = "SpeculationRouter"
DRAFT = "DraftServer"
TARGET = "TargetServer"
DEPLOYMENTS = (INGRESS, ROUTER, DRAFT, TARGET)
