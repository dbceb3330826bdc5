"""Metrics: the families of all of them, how replicas count and export them, and the page that shows them together."""
