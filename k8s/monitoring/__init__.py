"""Dashboards, recording rules and alerts over the service's metrics; ``python -m k8s.monitoring`` writes the files."""
