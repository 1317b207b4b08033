"""The key is everything that changes KV: cases 03, 04, 05 and 06."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_kit import GEOMETRY, NS, config, prompt

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import CacheGeometry, Media, Namespace, StoreError, chain_keys, open_store

if TYPE_CHECKING:
    from cases.conftest import World

TOKENS = prompt(range(5))
GOLDEN = Path(__file__).parents[1] / "golden" / "keys.json"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (replace(NS, kv_format="bf16"), replace(NS, kv_format="fp8")),
        (replace(NS, kv_format="fp8/scale=fp32"), replace(NS, kv_format="fp8/scale=ue8m0")),
        (replace(NS, weights="rev-1017"), replace(NS, weights="rev-1018")),
        (replace(NS, rope="theta=1e4"), replace(NS, rope="theta=1e4,yarn=40")),
        (replace(NS, adapter=None), replace(NS, adapter="lora")),
        (replace(NS, salt=b"one tenant"), replace(NS, salt=b"another")),
    ],
    ids=["format", "scales", "weights", "rope", "adapter", "tenant"],
)
def test_case_03_equal_tokens_in_another_format_are_another_record(
    world: World, one: Namespace, other: Namespace
) -> None:
    """A prompt was stored as bf16 KV and asked for as fp8: equal tokens answered with bytes of the other format.

    Here the second format misses, both can be stored, and each reads its own.
    """
    store = world.on(MemoryBackend())
    assert world.put(store, TOKENS, one) == 5
    hit = store.lookup(other, TOKENS)
    assert (hit.tokens, hit.miss_reason, world.load(store, hit)) == (0, "absent", 0)
    assert world.put(store, TOKENS, other) == 5
    assert store.stats().blocks == 10
    assert world.get(store, TOKENS, one) == world.get(store, TOKENS, other) == 5


@pytest.mark.parametrize("change", [{"parallel": "tp=2/rank=0"}, {"parallel": "tp=1/rank=1"}, {"layout": "B"}])
def test_case_04_another_parallel_layout_on_the_same_root_misses(world: World, change: dict[str, str]) -> None:
    """A folder written by one rank of one layout was opened by another, and its bytes were taken as they were."""
    written = replace(NS, parallel="tp=1/rank=0", layout="A")
    store = world.on_files()
    world.put(store, TOKENS, written)
    store.close()
    store = world.on_files()
    hit = store.lookup(replace(written, **change), TOKENS)  # type: ignore[arg-type]
    assert (hit.tokens, world.load(store, hit)) == (0, 0)
    assert world.get(store, TOKENS, written) == 5


@pytest.mark.parametrize(
    "layout",
    [
        CacheGeometry.opaque("layout B", payload_bytes=GEOMETRY.payload_bytes, swa_bytes=GEOMETRY.swa_bytes),
        CacheGeometry.opaque(GEOMETRY.name, payload_bytes=GEOMETRY.payload_bytes // 2, swa_bytes=GEOMETRY.swa_bytes),
        CacheGeometry.preset("tiny"),
    ],
    ids=["same sizes, other name", "half the size", "preset"],
)
def test_case_04_another_byte_layout_on_the_same_root_is_refused(world: World, layout: CacheGeometry) -> None:
    """The same when the sizes of blocks, or their inside at equal size, are others: an error that says both."""
    store = world.on_files()
    world.put(store, TOKENS)
    store.close()
    with pytest.raises(StoreError, match=f"geometry '{GEOMETRY.name}'.*{layout.name!r}") as caught:
        open_store(f"file://{world.root}", geometry=layout, config=config())
    assert "\n" not in str(caught.value)
    assert world.get(world.on_files(), TOKENS) == 5


def test_case_05_no_two_namespaces_run_into_each_other() -> None:
    """Names joined without their lengths made an adapter look like a salt, and ("ab", "c") like ("a", "bc")."""
    pairs = [
        replace(NS, adapter="X", salt=None),
        replace(NS, adapter=None, salt=b"X"),
        replace(NS, model="ab", weights="c"),
        replace(NS, model="a", weights="bc"),
    ]
    assert len({chain_keys(ns, TOKENS)[0] for ns in pairs}) == 4


@pytest.mark.parametrize("joint", ["", "\0", "\1", "/", "|", ":", ",", "\n"])
def test_case_05_no_text_can_play_the_joint_between_two_fields(joint: str) -> None:
    """The same for names that hold whatever might have been put between them."""
    one = replace(NS, model=f"a{joint}b", weights="c")
    other = replace(NS, model="a", weights=f"b{joint}c")
    assert chain_keys(one, TOKENS)[0] != chain_keys(other, TOKENS)[0]


def test_case_05_text_moved_between_any_two_fields_changes_the_key() -> None:
    """The same for all fields, for what is empty and what is not there, and for salts that end in zeros."""
    names = [field.name for field in fields(Namespace)]
    blank = Namespace("", "", "", "", "", "", "", "", b"")
    spaces = [blank, replace(blank, adapter=None), replace(blank, salt=None)]
    for name in names:
        for text in ("X", "XX", "X\0", "\1\0\0\0X"):
            value = text.encode() if name == "salt" else text
            spaces.append(replace(blank, **{name: value}))  # type: ignore[arg-type]
    assert len(set(spaces)) == len(spaces) == 3 + 4 * len(names)
    assert len({chain_keys(ns, TOKENS)[0] for ns in spaces}) == len(spaces)


def test_case_05_media_and_tokens_do_not_run_into_each_other() -> None:
    """And inside a block: the digest of an image is none of its place, its length or the next image."""
    kinds = [
        (),
        (Media(0, 2, b"ab"), Media(2, 2, b"c")),
        (Media(0, 2, b"a"), Media(2, 2, b"bc")),
        (Media(0, 4, b"abc"),),
    ]
    assert len({chain_keys(NS, TOKENS, media)[0] for media in kinds}) == len(kinds)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_case_06_every_process_derives_the_stored_keys(seed: str) -> None:
    """Keys built on Python's own hash differed from process to process, so a restart missed everything."""
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(GOLDEN.parent)!r})
        import test_golden
        sys.stdout.buffer.write(test_golden.key_vectors())
    """
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_bytes())
