"""Bounded replay: where a request starts on a prefix hit, and what it needs from the SWA tier. Pure values only."""

from duokv.replay.plan import (
    WINDOW_TOKENS,
    Mode,
    Reason,
    ReplayPlan,
    ReplayPolicy,
    TokenPartition,
    anchor,
    is_exact,
    kept_boundaries,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
)
from duokv.replay.window import (
    RingGeometry,
    pack_state,
    unpack_state,
    visible_entries,
    window_span,
    writes_entry,
)

__all__ = [
    "WINDOW_TOKENS",
    "Mode",
    "Reason",
    "ReplayPlan",
    "ReplayPolicy",
    "RingGeometry",
    "TokenPartition",
    "anchor",
    "is_exact",
    "kept_boundaries",
    "pack_state",
    "plan_replay",
    "swa_candidates",
    "unpack_state",
    "usable",
    "valid_from",
    "visible_entries",
    "window_span",
    "writes_entry",
]
