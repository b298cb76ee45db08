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


class APIError(JaxserveError):
    """What a server answered instead of what a client asked for.

    Attributes:
        status: of HTTP; 500 if a stream broke off and did not say.
        kind, param, code: of the body, where it has them.
        retry_after: seconds after which the server wants to be asked again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after


class ConnectionFailed(JaxserveError, ConnectionError):
    """A client could not reach its server, or lost it before the answer was whole."""


class EngineStopped(JaxserveError, RuntimeError):
    """The engine is gone or going: nothing can be asked of it any more."""
