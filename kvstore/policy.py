"""Traffic classes: how long a block lives after its last use. Policy is data kept in the store, not code."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from duokv.kvstore.errors import UsageError, nearest

DAY_S = 86_400.0
MODES = ("sliding", "fixed")
PIN_CLASS = 0xFFFE
"""Pseudo-class of pins: the stamp is the pin's own deadline."""
BORN_CLASS = 0xFFFF
"""Pseudo-class of the time a block was stored, or revived by a commit after it expired; where `fixed` counts from."""
MAX_CLASSES = 0xFFF0


class ClassRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The life of one traffic class.

    ttl_s: seconds a block lives, inclusive; None keeps it until capacity needs the space.
    mode: "sliding" counts from the class's last use of the block, "fixed" from the time it was stored.
    """

    ttl_s: float | None
    mode: Literal["sliding", "fixed"] = "sliding"


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """All class rules of a store, and the class of callers that name none.

    `ids` maps every class name ever used to its number in stored records; a number is never given out twice. A class
    that was removed lives on by the default class's rule until its blocks are gone.
    """

    classes: dict[str, ClassRule]
    default: str
    ids: dict[str, int] = {}
    version: int = 1

    def __post_init__(self) -> None:
        if self.default not in self.classes:
            raise UsageError(
                f"policy: default class {self.default!r} has no rule; {nearest(self.default, self.classes)}"
            )
        for name, rule in self.classes.items():
            if not name or not name.replace("-", "").replace("_", "").isalnum():
                raise UsageError(f"policy: class name {name!r} is not letters, digits, '-' or '_'; rename it")
            if rule.mode not in MODES:
                raise UsageError(f"policy: class {name!r} has mode {rule.mode!r}; {nearest(rule.mode, MODES)}")
            if rule.ttl_s is not None and not rule.ttl_s >= 0:
                raise UsageError(
                    f"policy: class {name!r} has ttl {rule.ttl_s}; give seconds of at least 0 or 'unbounded'"
                )

    @classmethod
    def standard(cls) -> Policy:
        """The published production lives: agent traffic 3 days, chat 7 days, both after last use."""
        return cls({"agent": ClassRule(3 * DAY_S), "chat": ClassRule(7 * DAY_S)}, "chat").numbered()

    def numbered(self, previous: Policy | None = None) -> Policy:
        """Return this policy with a number for each class, keeping every number `previous` gave out."""
        ids = dict(previous.ids) if previous else dict(self.ids)
        for name in self.classes:
            if name not in ids:
                if len(ids) >= MAX_CLASSES:
                    raise UsageError(f"policy: more than {MAX_CLASSES} class names were ever used; make a new store")
                ids[name] = max(ids.values(), default=0) + 1
        version = previous.version + 1 if previous else self.version
        return Policy(self.classes, self.default, ids, version)

    @cached_property
    def any_fixed(self) -> bool:
        """Whether a class counts lives from the store time."""
        return any(rule.mode == "fixed" for rule in self.classes.values())

    def with_rule(self, name: str, rule: ClassRule) -> Policy:
        """Return a copy in which class `name` has `rule` (a new class, or a changed one)."""
        return Policy({**self.classes, name: rule}, self.default, self.ids, self.version)

    def class_id(self, name: str | None) -> int:
        """Return the number of a class (None: the default class); an unknown name raises UsageError."""
        wanted = self.default if name is None else name
        if wanted not in self.classes:
            raise UsageError(f"traffic class {wanted!r} is not in the store's policy; {nearest(wanted, self.classes)}")
        return self.ids[wanted]

    def name_of(self, class_id: int) -> str:
        """Return the name behind a number in a stored record."""
        if class_id == PIN_CLASS:
            return "(pin)"
        return next((name for name, number in self.ids.items() if number == class_id), f"(unknown {class_id})")

    def rule_of(self, class_id: int) -> ClassRule:
        """Return the rule in force for a stored class number; removed classes follow the default's."""
        return self._rules.get(class_id, self.classes[self.default])

    @cached_property
    def _rules(self) -> dict[int, ClassRule]:
        return {self.ids[name]: rule for name, rule in self.classes.items() if name in self.ids}
