"""Traffic classes: rules, and numbers that stored records can rely on."""

from __future__ import annotations

import pytest

from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.policy import PIN_CLASS, ClassRule, Policy
from duokv.kvstore.policybook import KEEP_ALL, decode_policy, encode_policy

DAY_S = 86_400.0


def test_the_standard_lives_are_the_published_ones() -> None:
    policy = Policy.standard()
    assert policy.classes == {"agent": ClassRule(3 * DAY_S, "sliding"), "chat": ClassRule(7 * DAY_S, "sliding")}
    assert (policy.default, policy.any_fixed) == ("chat", False)
    assert policy.class_id(None) == policy.class_id("chat") != policy.class_id("agent")


def test_a_number_is_never_given_out_twice() -> None:
    first = Policy.standard()
    removed = Policy({"chat": ClassRule(60.0)}, "chat").numbered(first)
    added = removed.with_rule("batch", ClassRule(None)).numbered(removed)
    again = added.with_rule("agent", ClassRule(1.0)).numbered(added)
    assert [policy.version for policy in (first, removed, added, again)] == [1, 2, 3, 4]
    assert len(set(again.ids.values())) == len(again.ids) == 3
    for policy in (removed, added, again):
        assert {name: policy.ids[name] for name in first.ids} == first.ids


def test_a_removed_class_lives_by_the_default_rule() -> None:
    before = Policy.standard()
    after = Policy({"chat": ClassRule(60.0, "fixed")}, "chat").numbered(before)
    agent = before.class_id("agent")
    assert (after.name_of(agent), after.rule_of(agent)) == ("agent", ClassRule(60.0, "fixed"))
    assert after.any_fixed
    with pytest.raises(UsageError, match="traffic class 'agent' is not in the store's policy; valid: chat"):
        after.class_id("agent")


def test_numbers_nobody_gave_out_have_a_name_for_people() -> None:
    assert Policy.standard().name_of(PIN_CLASS) == "(pin)"
    assert Policy.standard().name_of(99) == "(unknown 99)"


@pytest.mark.parametrize(
    ("classes", "default", "message"),
    [
        ({"chat": ClassRule(1.0)}, "chta", "did you mean 'chat'"),
        ({"a b": ClassRule(1.0)}, "a b", "class name 'a b'"),
        ({"": ClassRule(1.0)}, "", "class name ''"),
        ({"chat": ClassRule(-1.0)}, "chat", "at least 0 or 'unbounded'"),
        ({"chat": ClassRule(float("nan"))}, "chat", "at least 0 or 'unbounded'"),
        ({"chat": ClassRule(1.0, "slidin")}, "chat", "did you mean 'sliding'"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(classes: dict[str, ClassRule], default: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Policy(classes, default)
    assert "\n" not in str(caught.value)


def test_a_policy_survives_its_encoding() -> None:
    policy = Policy.standard().with_rule("batch", ClassRule(None, "fixed")).numbered()
    assert decode_policy(encode_policy(policy), where="here") == policy


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"classes": {}}',
        encode_policy(Policy.standard()).replace(b"ttl_s", b"ttl"),
        b'{"classes": {"chat": {"ttl_s": -1}}, "default": "chat"}',
        b'{"classes": {"chat": {"ttl_s": 1}}, "default": "agent"}',
    ],
    ids=["empty", "another shape", "no default", "unknown field", "bad ttl", "default without a rule"],
)
def test_a_stored_policy_that_is_none_says_where_it_lies(raw: bytes) -> None:
    with pytest.raises(StoreError, match=r"^policy.json: not a policy .*kvctl ttl set"):
        decode_policy(raw, where="policy.json")


def test_a_class_added_by_hand_gets_a_number() -> None:
    raw = encode_policy(Policy.standard().with_rule("batch", ClassRule(60.0)))
    policy = decode_policy(raw, where="policy.json")
    assert policy.class_id("batch") not in Policy.standard().ids.values()
    assert policy.version == Policy.standard().version


def test_a_lost_policy_deletes_nothing() -> None:
    assert all(KEEP_ALL.rule_of(class_id).ttl_s is None for class_id in (0, 1, 2, 500))
