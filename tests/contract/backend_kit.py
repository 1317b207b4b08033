"""What the laws of a backend share: aligned memory, bytes to tell pages apart by, and whole files put and got."""

from __future__ import annotations

from collections.abc import Callable

from duokv.kvstore.backend import Backend, ReadOp
from duokv.kvstore.buffers import aligned

PAGE = 4096
"""A multiple of every alignment a backend may ask for."""

MakeBackend = Callable[[], Backend]


def room(nbytes: int, fill: int = 0xEE) -> memoryview:
    """Aligned memory whose content shows what a read has not touched."""
    view = aligned(nbytes)
    view[:] = bytes([fill]) * nbytes
    return view


def pattern(nbytes: int, seed: int) -> memoryview:
    """Aligned bytes in which each page differs from the next, and from those of another seed."""
    view = aligned(nbytes)
    for page in range(0, nbytes, PAGE):
        n = min(PAGE, nbytes - page)
        view[page : page + n] = ((page // PAGE * 7 + seed) % 251 + 1).to_bytes(2, "little") * (n // 2) + b"x" * (n % 2)
    return view


def put(backend: Backend, name: str, data: memoryview) -> None:
    """Write a sealed file."""
    writer = backend.create(name, data.nbytes)
    writer.write(0, [data])
    writer.seal(data.nbytes)


def get(backend: Backend, name: str, nbytes: int, offset: int = 0) -> bytes:
    """Read `nbytes`, or what there is of them; OSError as read_many reports it."""
    view = room(nbytes)
    (got,) = backend.read_many([ReadOp(name, offset, (view,))], deadline_s=60)
    if got < 0:
        raise OSError(-got, "read failed", name)
    return bytes(view[:got])
