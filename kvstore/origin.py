"""Whether stored KV equals what a cold prefill would have computed."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """How a block or an SWA window came to be; the numbers are stored and order from better to worse.

    A result is EXACT iff all blocks it was computed from are EXACT, the SWA state it restored (if any) is EXACT, and no
    bounded replay took place; everything else is APPROX. Under one key EXACT replaces APPROX, never the reverse, and an
    APPROX window never serves a request that asks for EXACT, even if the blocks have become EXACT meanwhile.
    """

    EXACT = 0
    APPROX = 1
