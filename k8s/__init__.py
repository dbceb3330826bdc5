"""Manifests, and the generator of dashboards and rules."""
