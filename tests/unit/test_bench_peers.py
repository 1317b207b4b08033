"""Peers side by side on sizes small enough for a test: right bytes, wrong bytes, absent environments, the protocol."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_kit import refusal

from duokv.bench.peer_serve import Action, Answer, Bench, Given, Rows, keys_of, serve, touched_rows
from duokv.bench.peers import FOREIGN, LOCAL, main
from duokv.bench.peers_case import KEPT, Figure, ForeignPeer, Limits, Part, Size, measure
from duokv.bench.peers_local import Files, Wanted, local_worker
from duokv.kvstore import CacheGeometry
from duokv.kvstore.errors import StoreError

TINY = Size(payload_bytes=3000, slot_bytes=4096, blocks=2, rounds=KEPT + 1, threads=1)
PARTS = [Part("cold", 1), Part("cold", 2), Part("warm", 2), Part("put", 2), Part("lookup", 2), Part("tokens", 2)]
DRIVER = """
from types import SimpleNamespace

ABOUT = dict(version="0", durable=False, durability="none", integrity="none", note="", missing={"tokens": "takes keys"})


class Fake:
    about = ABOUT

    def __init__(self, name, given):
        self.name, self.given, self.held = name, given, {}
        print("noise on stdout")

    def prepare(self, action, keys, rows):
        return SimpleNamespace(keys=keys, rows=rows)

    def put(self, handle):
        if self.name == "failing":
            raise RuntimeError("disk\\nfull")
        for key, row in zip(handle.keys, handle.rows):
            self.held[key] = bytes(row)

    def read(self, handle):
        if self.name == "dying":
            import os
            os._exit(3)
        if self.name == "silent":
            import threading
            threading.Event().wait()
        for key, row in zip(handle.keys, handle.rows):
            row[:] = memoryview(self.held[key])
        if self.name == "wrong":
            handle.rows[-1, 50] ^= 1
        if self.name == "swapped":
            return list(handle.rows)[::-1]
        return list(handle.rows)[:1] if self.name == "short" else list(handle.rows)

    def lookup(self, handle):
        return sum(key in self.held for key in handle.keys)

    def close(self):
        (self.given.folder.parent / "closed").touch()


def open_peer(name, given):
    if name == "unable":
        raise ModuleNotFoundError("No module named 'foreign'")
    return Fake(name, given)
"""


@pytest.fixture
def limits(disk: Path) -> Iterator[Limits]:
    made = Limits(disk, TINY)
    yield made
    made.close()


@pytest.fixture
def driver(disk: Path) -> Path:
    path = disk / "driver.py"
    path.write_text(DRIVER)
    return path


def foreign(disk: Path, driver: Path, name: str, limits: Limits, answer_s: float = 60) -> ForeignPeer:
    own = disk / "own"
    own.mkdir(exist_ok=True)
    return ForeignPeer(
        Path(sys.executable), driver, name, folder=own, content=limits.content, size=TINY, answer_s=answer_s
    )


def opened(disk: Path) -> Given:
    own = disk / "own"
    own.mkdir(exist_ok=True)
    memory = touched_rows(2 * TINY.blocks, TINY.slot_bytes)
    return Given(own, memory, TINY.payload_bytes, TINY.blocks, TINY.rounds, TINY.threads)


@pytest.mark.parametrize("name", LOCAL)
def test_a_peer_gives_what_was_put(disk: Path, limits: Limits, name: str) -> None:
    geometry = CacheGeometry.opaque("tiny", payload_bytes=TINY.payload_bytes)
    worker = local_worker(name, opened(disk), geometry, limits.content)
    try:
        assert worker.do("lookup", 0, 2).found == 0
        for turn in (0, 1):
            assert worker.do("put", turn, 2).found == 2
        read: tuple[Action, ...] = ("cold", "warm", "warm", "cold")
        for action in read:
            for turn in (1, 0):
                for blocks in (1, 2):
                    answer = worker.do(action, turn, blocks)
                    assert (answer.found, answer.digest) == (blocks, limits.digest(turn, blocks))
        assert worker.do("lookup", 1, 2).found == 2
        assert worker.do("lookup", 2, 2).found == 0
    finally:
        worker.close()
    assert len({limits.digest(turn, blocks) for turn in (0, 1) for blocks in (1, 2)}) == 4


def test_all_of_a_run_in_one_table(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "here").mkdir()
    arguments = ["--blocks", "2", "--pairs", "1", "--threads", "1", "--folder", str(disk / "here")]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    peers = {peer["name"]: peer for peer in found["peers"]}
    assert tuple(peers) == (*LOCAL, *FOREIGN)
    for name in LOCAL:
        figures = {figure["action"]: figure for figure in peers[name]["figures"]}
        assert set(figures) == {"cold", "warm", "put", "lookup", "tokens"}
        measured = [figure for figure in figures.values() if "reason" not in figure]
        assert len(measured) == (5 if name == "duokv" else 4)
        assert all(0 < figure["low"] <= figure["ratio"] <= figure["high"] for figure in measured)
        assert peers[name]["about"]["durability"]
        assert peers[name]["about"]["integrity"]
    for name, (environment, _) in FOREIGN.items():
        assert f"--env {environment}=PYTHON" in peers[name]["skipped"]
    assert not list((disk / "here").iterdir())


def test_an_environment_that_lacks_the_project_is_skipped(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--blocks", "1", "--pairs", "1", "--peers", "mooncake-tcp,vllm-fs", "--folder", str(disk)]
    environments = ["--env", f"mooncake={sys.executable}", "--env", f"vllm={disk / 'absent'}"]
    assert main([*arguments, *environments, "--json"]) == 0
    mooncake, vllm = json.loads(capsys.readouterr().out)["peers"]
    assert mooncake["skipped"] == "ModuleNotFoundError: No module named 'mooncake'"
    assert vllm["skipped"].startswith("[Errno 2] No such file or directory")
    assert not list(disk.iterdir())


def test_a_foreign_driver_speaks_the_protocol(disk: Path, limits: Limits, driver: Path) -> None:
    peer = foreign(disk, driver, "good", limits)
    try:
        found = measure("good", peer, limits, PARTS, 1)
    finally:
        peer.close()
    assert found.figures[Part("tokens", 2)] == Figure(reason="takes keys")
    measured = [figure for part, figure in found.figures.items() if part.action != "tokens"]
    assert all(len(figure.peer_s) == 1 and len(figure.limit_s) == 2 for figure in measured)
    assert (disk / "closed").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "WRONG BYTES"),
        ("swapped", "WRONG BYTES"),
        ("short", "FELL SHORT: 1 blocks of 2"),
        ("dying", "its process ended"),
        ("failing", "RuntimeError: disk full"),
    ],
)
def test_a_peer_that_does_less_has_no_figure(disk: Path, limits: Limits, driver: Path, name: str, reason: str) -> None:
    peer = foreign(disk, driver, name, limits)
    try:
        found = measure(name, peer, limits, [Part("cold", 2), Part("warm", 2)], 1)
    finally:
        peer.close()
    assert all(reason in figure.reason for figure in found.figures.values())
    assert not any(figure.peer_s for figure in found.figures.values())


def test_what_cannot_be_opened_says_why(disk: Path, limits: Limits, driver: Path) -> None:
    peer = foreign(disk, driver, "unable", limits)
    with pytest.raises(StoreError, match="ModuleNotFoundError: No module named 'foreign'"):
        _ = peer.about
    peer.close()


def test_what_does_not_answer_is_given_up(disk: Path, limits: Limits, driver: Path) -> None:
    peer = foreign(disk, driver, "silent", limits, answer_s=5)
    assert peer.about["version"] == "0"
    peer.do("put", 0, 2)
    with pytest.raises(StoreError, match="no answer in 5 s"):
        peer.do("warm", 0, 2)
    with pytest.raises(StoreError, match="its process ended"):
        peer.do("warm", 0, 2)
    peer.close()


def test_a_store_in_this_process_that_gives_other_bytes(
    disk: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_: Files, handle: Wanted) -> list[Rows]:
        return list(handle.rows)

    monkeypatch.setattr(Files, "read", stale)
    worker = Bench(lambda given: Files(given, fsync=False), opened(disk), limits.content)
    found = measure("files", worker, limits, [Part("warm", 2), Part("lookup", 2)], 1)
    worker.close()
    assert found.figures[Part("warm", 2)].reason.startswith("WRONG BYTES")
    assert found.figures[Part("lookup", 2)].peer_s


def test_what_was_read_before_does_not_pass_for_read(
    disk: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Bench(lambda given: Files(given, fsync=False), opened(disk), limits.content)
    worker.do("put", 0, 2)
    assert worker.do("warm", 0, 2).digest == limits.digest(0, 2)
    monkeypatch.setattr(Files, "read", lambda _, handle: list(handle.rows))
    assert worker.do("warm", 0, 2).digest != limits.digest(0, 2)
    worker.close()


def test_an_error_does_not_end_the_service(disk: Path, limits: Limits, driver: Path) -> None:
    order = {"folder": str(disk / "own"), "content": str(limits.content), "payload_bytes": 3000, "slot_bytes": 4096}
    orders: list[object] = [{**order, "blocks": 2, "rounds": 1, "threads": 1}]
    orders += [{"do": action, "turn": 0, "blocks": 2} for action in ("warm", "put", "warm")]
    (disk / "own").mkdir()
    answers = io.StringIO()
    serve(driver, "good", io.StringIO("\n".join(map(json.dumps, orders))), answers)
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert said[0]["about"]["version"] == "0"
    assert said[1]["error"].startswith("KeyError")
    assert said[2]["found"] == 2
    assert said[3]["digest"] == limits.digest(0, 2)
    assert (disk / "closed").exists()


def test_ratios_are_to_the_limits_around() -> None:
    figure = Figure(peer_s=(2.0, 1.0, 4.0), limit_s=(1.0, 3.0, 5.0, 7.0))
    assert figure.ratios == (1.0, 4.0, 1.5)
    assert (figure.ratio, figure.seconds) == (1.5, 2.0)


def test_no_two_blocks_have_one_key() -> None:
    keys = [key for turn in range(3) for key in keys_of(turn, 20)]
    assert len(set(keys)) == 60
    assert keys_of(1, 5) == keys_of(1, 20)[:5]
    assert Answer(1.0, 2).digest == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--env", "sglang"], "is not NAME=PYTHON"),
        (["--env", "redis=/usr/bin/python3"], "is not NAME=PYTHON"),
        (["--peers", "duokv,redis"], "no peer is called 'redis'"),
        (["--pairs", "0"], "at least 1"),
        (["--quik"], "unrecognized arguments"),
        (["--folder", "missing"], "no such folder"),
        (["--folder", "{disk}", "--blocks", "1000000000"], "make room"),
    ],
)
def test_misuse_is_one_line(disk: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    line = refusal(main, [argument.format(disk=disk) for argument in arguments], capsys)
    assert line.startswith("peers: ")
    assert reason in line
    assert not list(disk.iterdir())
