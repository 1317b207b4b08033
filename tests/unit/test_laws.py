"""The laws of the tree: who imports whom, what a file may hold, what a wheel carries."""

from __future__ import annotations

import ast
import email
import graphlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("kvstore", "engine", "replay", "connectors", "kernels", "tools", "bench")
PRESENT = tuple(folder for folder in FOLDERS if (ROOT / folder).is_dir())

MAY_IMPORT = {
    "kvstore": set[str](),
    "kernels": set[str](),
    "replay": {"kvstore"},
    "connectors": {"kvstore"},
    "engine": {"kvstore", "replay", "connectors", "kernels"},
    "tools": set(FOLDERS),
    "bench": set(FOLDERS),
}
CORE = {"numpy", "lmdb", "xxhash", "msgspec"}
EVENT_LOOP = {"asyncio", "uvloop", "aiofiles"}
MAX_LINES = 400

LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONTAINERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
SHARED = {"Lock", "RLock", "Condition", "Event", "local", "ContextVar", "count"}
READ_ONLY = {"Mapping", "Sequence", "Set", "Collection"}


@cache
def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(place, dotted name) of everything a file imports, wherever in the file; a relative import begins with a dot."""
    for node in ast.walk(source(path)):
        if isinstance(node, ast.Import):
            yield from ((place(path, node), alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from duokv import kvstore` names a module of ours by its last part.
            yield from ((place(path, node), f"{module}.{alias.name}") for alias in node.names)


def place(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_imports_point_down() -> None:
    """The direction: tools | bench -> engine -> replay | connectors | kernels -> kvstore."""
    wrong = []
    edges: dict[str, set[str]] = {folder: set() for folder in PRESENT}
    for path in files(*PRESENT):
        folder = path.relative_to(ROOT).parts[0]
        for where, name in imports(path):
            root, target, *_ = f"{name}.".split(".")
            if root == "duokv" and target != folder:
                edges[folder].add(target)
                if target not in MAY_IMPORT[folder]:
                    wrong.append(f"{where} imports {name}; beside itself only {sorted(MAY_IMPORT[folder])} are allowed")
    assert not wrong, "\n".join(wrong)
    graphlib.TopologicalSorter(edges).prepare()  # CycleError, should the roots tools and bench import each other


def test_imports_are_absolute_and_full() -> None:
    wrong = [
        f"{where} imports {name}; write duokv.<folder>"
        for path in files(*PRESENT, "tests")
        for where, name in imports(path)
        if name.partition(".")[0] in {"", *FOLDERS}
    ]
    assert not wrong, "\n".join(wrong)


def test_core_needs_only_its_four_dependencies() -> None:
    names = [requirement.partition(">")[0] for requirement in PROJECT["project"]["dependencies"]]
    assert sorted(names) == sorted(CORE)
    wrong = []
    for path in files("kvstore"):
        extra = EVENT_LOOP if path.name == "aio.py" else set[str]()
        allowed = (sys.stdlib_module_names - EVENT_LOOP) | CORE | {"duokv"} | extra
        wrong += [f"{where} imports {name}" for where, name in imports(path) if name.partition(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", PRESENT)
def test_folder_is_a_flat_typed_package(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").is_file()
    assert (ROOT / folder / "py.typed").is_file()
    nested = [str(path.relative_to(ROOT)) for path in files(folder) if path.parent != ROOT / folder]
    assert not nested, f"move these up, folders are flat: {nested}"
    assert PROJECT["tool"]["setuptools"]["package-dir"].get(f"duokv.{folder}") == folder


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in files(*PRESENT)}
    wrong = [f"{path.relative_to(ROOT)} has {n} lines" for path, n in lengths.items() if n > MAX_LINES]
    assert not wrong, "\n".join([*wrong, f"split what has more than {MAX_LINES} lines"])


def module_state(path: Path) -> Iterator[str]:
    for node in ast.walk(source(path)):
        if isinstance(node, ast.Global):
            yield f"{place(path, node)}: global {', '.join(node.names)}"
    for node in source(path).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        constant = ast.unparse(target) == "__all__" or (isinstance(node, ast.AnnAssign) and read_only(node.annotation))
        made = last_name(node.value.func) if isinstance(node.value, ast.Call) else ""
        if made in SHARED or ((made in CONTAINERS or isinstance(node.value, LITERALS)) and not constant):
            yield f"{place(path, node)}: {ast.unparse(target)} can change"


def read_only(annotation: ast.expr) -> bool:
    """Whether mypy refuses a write through this type."""
    if isinstance(annotation, ast.Subscript):
        outer = last_name(annotation.value)
        return read_only(annotation.slice) if outer == "Final" else outer in READ_ONLY
    return last_name(annotation) in READ_ONLY


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def test_modules_hold_no_state() -> None:
    wrong = [line for path in files(*PRESENT) for line in module_state(path)]
    advice = "use a tuple or frozenset, annotate a table as Mapping or Sequence, or move it into an object"
    assert not wrong, "\n".join([*wrong, advice])


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            node.name == "__init__" or not node.name.startswith("_")
        ):
            yield node


def mentions_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(
        isinstance(node, ast.Name | ast.Attribute) and last_name(node) == "Any" for node in ast.walk(annotation)
    )


def test_public_signatures_say_what_they_take() -> None:
    wrong = []
    for path in files(*PRESENT):
        for function in public_functions(source(path).body):
            arguments = function.args
            if arguments.kwarg:
                wrong.append(f"{place(path, function)}: {function.name} takes **{arguments.kwarg.arg}")
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            if any(mentions_any(note) for note in (function.returns, *(arg.annotation for arg in every if arg))):
                wrong.append(f"{place(path, function)}: {function.name} has Any in its signature")
    assert not wrong, "\n".join(wrong)


def test_no_file_names_a_machine() -> None:
    """Paths of one machine and hosts of package registries belong to its configuration, not here."""
    # Spelt in halves, or this file would break its own law.
    banned = [left + right for left, right in (("/wo", "rk/"), ("pypi", ".org"), ("python", "hosted"))]
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    contents = {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}
    assert "tests/unit/test_laws.py" in contents
    wrong = [
        f"{name} mentions {word}" for name, content in contents.items() for word in banned if word.encode() in content
    ]
    assert not wrong, "\n".join(wrong)


def test_wheel_holds_our_modules_and_asks_for_the_core(tmp_path: Path) -> None:
    # Built from a copy: in place, left-overs in `build/` would be packed too.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in (*PRESENT, "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; backend.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"duokv-{PROJECT['project']['version']}.dist-info/"
        metadata = email.message_from_bytes(wheel.read(f"{info}METADATA"))

    modules = {f"duokv/{path.relative_to(ROOT).as_posix()}" for path in files(*PRESENT)}
    assets = {f"duokv/engine/assets/{path.name}" for path in (ROOT / "engine" / "assets").iterdir()}
    typed = {f"duokv/{folder}/py.typed" for folder in PRESENT}
    assert {name for name in names if not name.startswith(info)} == modules | typed | assets
    assert f"{info}licenses/LICENSE" in names
    requirements = metadata.get_all("Requires-Dist", [])
    assert {name.partition(">")[0] for name in requirements if "extra ==" not in name} == CORE
