"""The services and streams of ``tests/integration``."""

from tests.integration.conftest import service, start_fixture, streams, undisturbed  # noqa: F401 - fixtures
