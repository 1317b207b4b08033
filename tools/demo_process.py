"""What sections of the demo share: work in a process of its own, times for people."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

from duokv.kvstore.errors import DuoKVError, StoreError

Send = Callable[[object], None]
T = TypeVar("T")


def in_new_process(work: Callable[[Send], None], kind: type[T], *, count: int = 1) -> Iterator[T]:
    """Run `work` in a fresh interpreter and yield the `count` values of `kind` it sends, as they come.

    work: a module's function, or a partial of one. It may end its process as it likes once it has sent everything. A
    DuoKVError of its is raised here, and StoreError if it ends early.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        for _ in range(count):
            try:
                sent = ours.recv()
            except EOFError:
                raise StoreError("a process of the demo ended early; its error is above") from None
            if isinstance(sent, DuoKVError):
                raise sent
            assert isinstance(sent, kind)
            yield sent
        process.join()
    finally:
        # Still running only if nobody wants the rest.
        process.kill()
        process.join()
        ours.close()


def milliseconds(seconds: float) -> str:
    """Return a time as people read it: tenths of a millisecond only where they matter."""
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:,.0f} ms"


def _child(work: Callable[[Send], None], pipe: Connection) -> None:
    try:
        work(pipe.send)
    except DuoKVError as error:
        pipe.send(error)
