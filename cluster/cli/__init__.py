"""The ``specdec`` command."""

from cluster.cli.main import main

__all__ = ["main"]
