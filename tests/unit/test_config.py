"""Settings from file and environment: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from duokv.kvstore.config import StoreConfig, load_config
from duokv.kvstore.errors import UsageError
from duokv.kvstore.policy import ClassRule, Policy

DAY_S = 86_400.0


def from_toml(tmp_path: Path, text: str, **environ: str) -> StoreConfig:
    path = tmp_path / "duokv.toml"
    path.write_text(text)
    return load_config(path, environ=environ)


def refusal(tmp_path: Path, text: str | None, **environ: str) -> str:
    """Return the one line that says why this configuration is refused."""
    path = None if text is None else tmp_path / "duokv.toml"
    if path is not None and text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path, environ=environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_the_documented_default() -> None:
    config = load_config(None, environ={"PATH": "/bin", "DUOKV_DATA": "/data", "DUOKV_DEBUG": "1"})
    assert config == StoreConfig()
    assert config.seed_policy == Policy.standard()
    assert (config.capacity, config.segment_bytes, config.preallocate_bytes) == (None, 256 << 20, 8 << 20)
    assert (config.swa_bytes, config.swa_expiry_s, config.index_map_bytes) == (1 << 30, 180.0, 64 << 30)
    assert (config.buffer_bytes, config.cache_bytes) == (256 << 20, 0)


def test_every_setting_can_be_given_in_the_file(tmp_path: Path) -> None:
    config = from_toml(
        tmp_path,
        """
        capacity = "10GiB"
        capacity_blocks = 65536
        segment_bytes = "64MiB"
        preallocate_bytes = "1 MiB"
        swa_bytes = "0B"
        swa_expiry_s = "unbounded"
        direct = "require"
        fsync = "always"
        read_threads = 6
        read_deadline_s = "500ms"
        buffer_bytes = "1GB"
        cache_bytes = "2GiB"
        write_behind_bytes = "64MiB"
        write_behind_full = "drop"
        use_flush_s = "0s"
        maintenance_interval_s = "1m"
        checkpoint_interval_s = "5m"
        index_path = "/ssd/index"
        index_map_bytes = "1GiB"
        writer_id = "node-1"
        default_class = "batch"
        [classes.batch]
        ttl = "1h"
        mode = "fixed"
        """,
    )
    assert config == StoreConfig(
        capacity=10 << 30,
        capacity_blocks=65_536,
        segment_bytes=64 << 20,
        preallocate_bytes=1 << 20,
        swa_bytes=0,
        swa_expiry_s=None,
        direct="require",
        fsync="always",
        read_threads=6,
        read_deadline_s=0.5,
        buffer_bytes=10**9,
        cache_bytes=2 << 30,
        write_behind_bytes=64 << 20,
        write_behind_full="drop",
        use_flush_s=0.0,
        maintenance_interval_s=60.0,
        checkpoint_interval_s=300.0,
        index_path="/ssd/index",
        index_map_bytes=1 << 30,
        writer_id="node-1",
        seed_policy=Policy({"batch": ClassRule(3600.0, "fixed")}, "batch").numbered(),
    )
    # All but the policy, which has keys of its own: a field without a key in the file would show here.
    assert all(getattr(config, name) != getattr(StoreConfig(), name) for name in StoreConfig.__struct_fields__)


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    text = 'capacity = "10GiB"\nread_threads = 2\n[classes.agent]\nttl = "1d"\n[classes.chat]\nttl = "2d"'
    config = from_toml(tmp_path, text, DUOKV_CAPACITY="unbounded", DUOKV_CLASSES__AGENT__TTL="3d")
    assert (config.capacity, config.read_threads) == (None, 2)
    assert config.seed_policy.classes == {"agent": ClassRule(3 * DAY_S), "chat": ClassRule(2 * DAY_S)}


def test_variables_change_and_add_to_the_standard_classes() -> None:
    environ = {"DUOKV_CLASSES__CHAT__MODE": "fixed", "DUOKV_CLASSES__BATCH__TTL": "1h", "DUOKV_DEFAULT_CLASS": "batch"}
    policy = load_config(None, environ=environ).seed_policy
    assert policy.classes == {
        "agent": ClassRule(3 * DAY_S),
        "chat": ClassRule(7 * DAY_S, "fixed"),
        "batch": ClassRule(3600.0),
    }
    assert policy.default == "batch"
    assert set(policy.ids) == set(policy.classes)


def test_classes_in_the_file_replace_the_standard_ones(tmp_path: Path) -> None:
    policy = from_toml(tmp_path, '[classes.chat]\nttl = "unbounded"').seed_policy
    assert policy.classes == {"chat": ClassRule(None)}


def test_case_19_misspelt_names_and_units_are_refused_with_the_right_ones(tmp_path: Path) -> None:
    """Unknown key, unknown variable, bad unit: the start is refused, the message holds the way out (LMCache #447)."""
    message = refusal(tmp_path, 'ttl_agnet = "3d"')
    assert "duokv.toml: ttl_agnet: unknown key" in message
    assert "'classes.agent.ttl'" in message

    message = refusal(tmp_path, None, DUOKV_TTL_AGNET="3d")
    assert message.startswith("DUOKV_TTL_AGNET: unknown variable")
    assert "'DUOKV_CLASSES__AGENT__TTL'" in message

    for message in (refusal(tmp_path, 'capacity = "10GBB"'), refusal(tmp_path, None, DUOKV_CAPACITY="10GBB")):
        assert "10GBB" in message
        assert "accepted: B, KiB, MiB, GiB" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('capacty = "1GiB"', ["capacty", "'capacity'"]),
        ("zzz = 1", ["zzz", "valid: capacity, ", "classes.agent.ttl"]),
        ("seed_policy = 1", ["seed_policy", "unknown key"]),
        ("[capacity]\nbytes = 1", ["capacity.bytes", "'capacity_blocks'"]),
        ('[classes.agent]\nttll = "3d"', ["classes.agent.ttll", "'classes.agent.ttl'"]),
        ('[classes]\nagent = "3d"', ["classes.agent", "'classes.agent.ttl'"]),
        ("[classes.agent]", ["classes.agent", "'classes.agent.ttl'"]),
        ('[classes.agent]\nmode = "fixed"', ["classes.agent has a mode and no ttl", "'3d'"]),
        ('[classes.chat]\nttl = "3d"\nmode = "slidng"', ["classes.chat.mode", "'slidng'", "'sliding'"]),
        ('[classes.agent]\nttl = "3d"', ["default_class 'chat'", "agent"]),
        ('[classes."a b"]\nttl = "3d"\n[classes.chat]\nttl = "3d"', ["'a b'", "rename it"]),
        ("[classes.chat]\nttl = 3", ["classes.chat.ttl", "'180s'"]),
        ("capacity = 10", ["capacity", "10 is not a text", "'10GiB'"]),
        ('capacity = "0B"', ["capacity", "at least 1"]),
        ("read_threads = 0", ["read_threads", "at least 1"]),
        ("read_threads = true", ["read_threads", "whole number"]),
        ("read_threads = 1.5", ["read_threads", "whole number"]),
        ('read_deadline_s = "unbounded"', ["read_deadline_s", "not possible"]),
        ('direct = "atuo"', ["direct", "'auto'"]),
        ("fsync = true", ["fsync", "valid: always, none, segment"]),
        ('writer_id = "../x"', ["writer_id", "directory name"]),
        ('index_path = ""', ["index_path", "not a text"]),
        ("capacity == 1", ["not TOML", "line 1"]),
    ],
)
def test_refused_file_names_itself_the_key_and_the_way_out(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(str(tmp_path / "duokv.toml"))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("DUOKV_CAPACITY", "", "not a text"),
        ("DUOKV_READ_THREADS", "four", "whole number"),
        ("DUOKV_SWA_EXPIRY", "1s", "'DUOKV_SWA_EXPIRY_S'"),
        ("DUOKV_CLASSES__AGENT", "3d", "'DUOKV_CLASSES__AGENT__TTL'"),
        ("DUOKV_CACHE_BYTES", "4096", "unit"),
        ("DUOKV_CACHE", "1GiB", "'DUOKV_CACHE_BYTES'"),
        ("DUOKV_", "1", "unknown variable"),
        ("DUOKV_DEFAULT_CLASS", "chta", "'chat'"),
    ],
)
def test_refused_variable_names_the_way_out(tmp_path: Path, name: str, value: str, part: str) -> None:
    message = refusal(tmp_path, None, **{name: value})
    assert part in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml: cannot be read"):
        load_config(tmp_path / "absent.toml", environ={})
    (tmp_path / "latin.toml").write_bytes(b'writer_id = "\xff"')
    with pytest.raises(UsageError, match=r"latin\.toml: not TOML"):
        load_config(tmp_path / "latin.toml", environ={})


def test_config_from_code_is_validated_too() -> None:
    with pytest.raises(UsageError, match="read_deadline_s"):
        StoreConfig(read_deadline_s=float("nan"))
    with pytest.raises(UsageError, match=r"fsync.*'always'"):
        msgspec.structs.replace(StoreConfig(), fsync="alway")


@pytest.mark.parametrize(
    ("capacity", "effective"), [(None, 256 << 20), (1 << 40, 256 << 20), (8 << 20, 128 << 10), (64, 1)]
)
def test_segments_are_at_most_a_64th_of_the_capacity(capacity: int | None, effective: int) -> None:
    assert StoreConfig(capacity=capacity).effective_segment_bytes == effective
