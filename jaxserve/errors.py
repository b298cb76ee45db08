"""The errors users see. Each message says what was wrong and what would be right."""

from __future__ import annotations


class JaxserveError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(JaxserveError, ValueError):
    """A request that can never be served as it stands. The client's to fix.

    Attributes:
        param: name of the offending field, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFound(RequestError):
    """What the request names is not here.

    Attributes:
        code: for a program.
    """

    code = "not_found"


class ConfigError(JaxserveError, ValueError):
    """Settings that cannot work together, or not on this device."""


class Overloaded(JaxserveError):
    """A request that would be served at another time.

    Attributes:
        retry_after: seconds until then.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlinePassed(JaxserveError):
    """A request that was given up, or never begun, because its own deadline could not be met."""


class EngineStopped(JaxserveError, RuntimeError):
    """The engine is gone or going: nothing can be asked of it any more."""
