"""How many cache pages fit beside everything else in a device's memory. Plain arithmetic."""

from __future__ import annotations

RUNTIME_BYTES = 512 << 20
"""Left free on a GPU beside weights, pages and a step's temporaries: for code and the runtime."""


def fitting_pages(usable_bytes: float, taken_bytes: int, page_bytes: int, most: int) -> int:
    """Pages of a pool, the null page included; 0 if there is no room for any.

    Args:
        usable_bytes: of the device's memory that may be filled.
        taken_bytes: of it that is not for pages.
        page_bytes: of one page over all layers.
        most: pages that can ever be of use.
    """
    fitting = int(usable_bytes - taken_bytes) // page_bytes
    return 0 if fitting < 2 else min(fitting, most) + 1
