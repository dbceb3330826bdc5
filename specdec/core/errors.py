"""The errors specdec raises for its users; our own bugs are assertions."""


class SpecdecError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidParameterError(SpecdecError, ValueError):
    """A value a user gave is not allowed.

    Attributes:
        parameter: The name of the parameter, as the user writes it.
        code: A stable machine-readable code, such as ``context_length_exceeded``, or None.
    """

    def __init__(self, parameter: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class UnsupportedParameterError(InvalidParameterError):
    """A parameter that is known, but that this service cannot honour; it is never ignored."""


class ModelLoadError(SpecdecError):
    """A model could not be loaded, or is of a kind that cannot be served exactly."""


class RecordedStepsError(ModelLoadError):
    """A model's steps cannot be recorded on its device, or recorded steps are wrong there; others may be right."""


class IncompatiblePairError(SpecdecError):
    """Target and draft do not fit together; the message names the first difference."""


class MemoryPlanError(SpecdecError):
    """The memory given cannot hold one sequence; the message carries the numbers."""


class CancelledError(SpecdecError):
    """The caller cancelled a generation."""


class SequenceFailedError(SpecdecError):
    """One sequence could not be generated to its end; the message says why. Others are not concerned.

    Attributes:
        is_passing: Whether the same request may succeed when it is sent again.
        code: Stable and machine-readable.
    """

    def __init__(self, reason: str, *, is_passing: bool = False, code: str = "generation_failed") -> None:
        super().__init__(reason)
        self.is_passing = is_passing
        self.code = code


class ServiceUnavailableError(SpecdecError):
    """No worker can take the request now."""


class DeviceLostError(SpecdecError):
    """A backend's device can no longer be used: whoever drives the backend must fail, and be replaced."""


NOT_FINITE = "the model's outputs are not finite numbers"
"""Why a sequence ends whose hidden states or largest logit are NaN or infinite."""
_MOST_REASON_CHARACTERS = 300


def reason_of(error: BaseException) -> str:
    """What is said of an error to the one whom it concerns: its type and its message, on one line, not too long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_REASON_CHARACTERS else f"{text[:_MOST_REASON_CHARACTERS]}..."
