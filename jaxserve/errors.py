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


class ConfigError(JaxserveError, ValueError):
    """Settings that cannot work together, or not on this device."""


class EngineStopped(JaxserveError, RuntimeError):
    """The engine is gone or going: nothing can be asked of it any more."""
