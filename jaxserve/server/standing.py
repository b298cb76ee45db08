"""How a request stands among others: its class, whose it is, and how long it is worth waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from jaxserve.errors import RequestError
from jaxserve.request import ServiceClass

TIERS: Mapping[str, ServiceClass] = MappingProxyType(
    {
        "auto": "interactive",
        "default": "interactive",
        "priority": "interactive",
        "flex": "batch",
        "batch": "batch",
    }
)


class Standing(Protocol):
    """What bodies say of it."""

    @property
    def service_tier(self) -> str | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def timeout(self) -> float | None: ...


def service_class(body: Standing) -> ServiceClass:
    """From `service_tier`, or from `priority`: above 0 is what can wait, as in vLLM.

    Raises RequestError for a tier that is not known.
    """
    if body.service_tier is None:
        return "batch" if (body.priority or 0) > 0 else "interactive"
    if body.service_tier not in TIERS:
        raise RequestError(
            f"service_tier {body.service_tier[:40]!r} is not one of {', '.join(TIERS)}",
            param="service_tier",
        )
    return TIERS[body.service_tier]


def deadline(body: Standing) -> float | None:
    """From `timeout`, in seconds. Raises RequestError for one that is no time."""
    if body.timeout is None:
        return None
    if not (body.timeout > 0 and math.isfinite(body.timeout)):
        raise RequestError(f"timeout is {body.timeout:g}: send seconds, above 0", param="timeout")
    return body.timeout
