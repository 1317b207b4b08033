"""The policy in force: read anew when its version moved, so that a change applies to every process at once."""

from __future__ import annotations

import msgspec

from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.index import IndexTxn, WriteTxn
from duokv.kvstore.policy import ClassRule, Policy

KEEP_ALL = Policy({"default": ClassRule(None)}, "default", version=0).numbered()
"""What holds when a store's policy was lost: nothing is deleted by age."""


def encode_policy(policy: Policy) -> bytes:
    """A policy as it is stored (JSON, so that people can read it)."""
    return msgspec.json.format(msgspec.json.encode(policy), indent=2)


def decode_policy(raw: bytes, *, where: str) -> Policy:
    """Read a stored policy; StoreError naming `where` if it cannot be one."""
    try:
        # Numbered again for a class that someone added by hand.
        return msgspec.json.decode(raw, type=Policy).numbered()
    except (msgspec.MsgspecError, UsageError) as error:
        raise StoreError(f"{where}: not a policy ({error}); restore it, or set it anew with kvctl ttl set") from error


class PolicyBook:
    """Caches the decoded policy of one store. Not thread-safe."""

    def __init__(self) -> None:
        self._version = b""
        self._policy = KEEP_ALL

    def current(self, txn: IndexTxn) -> Policy:
        """The policy as of this transaction."""
        version = txn.meta(b"policy_version") or b""
        if version != self._version:
            raw = txn.meta(b"policy")
            self._policy = KEEP_ALL if raw is None else decode_policy(raw, where="index")
            self._version = version
        return self._policy

    @property
    def latest(self) -> Policy:
        """The policy as last seen."""
        return self._policy

    @staticmethod
    def put(txn: WriteTxn, policy: Policy) -> None:
        """Set the policy in the index."""
        txn.put_meta(b"policy", encode_policy(policy))
        txn.put_meta(b"policy_version", policy.version.to_bytes(8, "little"))
