"""The models of ``tests/specdec/models``."""

from tests.specdec.models.conftest import models, whole_forward  # noqa: F401 - fixtures
