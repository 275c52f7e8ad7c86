"""Imports point one way: which room may import which, read from the sources and not from what happens to be loaded."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Room -> the rooms it may import. A room is a module, or a package with all its modules; each may import itself.
# "specjax" is the package's __init__.py alone.
CORE = "specjax.types specjax.tree specjax.mask specjax.sampling specjax.laws specjax.prefill"
LOOP = f"{CORE} specjax.draft specjax.verify specjax.decode"
LIBRARY = f"{LOOP} specjax.cache specjax.models specjax.exact specjax.train specjax.request specjax.generate"
ARROWS = {
    "specjax.types": "",
    "specjax.tree": "specjax.types",
    "specjax.cache": "specjax.types",
    "specjax.laws": "specjax.types",
    "specjax.sampling": "specjax.types specjax.laws",
    "specjax.prefill": "specjax.types",
    "specjax.mask": "specjax.types specjax.tree",
    "specjax.draft": CORE,
    "specjax.verify": CORE,
    "specjax.decode": f"{CORE} specjax.draft specjax.verify",
    "specjax.exact": "specjax.types specjax.tree specjax.sampling specjax.laws specjax.verify",
    "specjax.models": "specjax.types specjax.cache pallas_kernels",
    "specjax.train": "specjax.types specjax.models",
    "specjax.request": LOOP,
    "specjax.generate": f"{LOOP} specjax.request",
    "specjax.testing": LIBRARY,
    "specjax": f"{LIBRARY} specjax.testing",
    "pallas_kernels": "",
    "experiments": f"{LIBRARY} specjax.testing specjax pallas_kernels",
}
PACKAGES = {room.split(".")[0] for room in ARROWS}

# Third-party packages that only these rooms may use; the others that pyproject.toml declares are free to all.
ONLY_IN = {"flax": {"specjax.models"}, "optax": {"specjax.train", "experiments"}}
KERNELS_MAY_USE = {"jax", "numpy"}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room a module of ours belongs to; None where the table has no such room."""
    if module in ARROWS:
        return module
    parent = module.rpartition(".")[0]
    return room_of(parent) if parent and parent != "specjax" else None


def imported(path: Path, source: str) -> Iterator[str]:
    """Every module that ``source`` imports, wherever in the file.

    ``from package import name`` gives package.name where that is a module, else the package.
    """
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in ARROWS or is_module(inner) else base


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.split(".")[0] in PACKAGES and (path.is_dir() or path.with_suffix(".py").is_file())


def wrong_arrows(path: Path, source: str) -> list[str]:
    room = room_of(module_of(path))
    assert room is not None, f"{path} belongs to no room: add it to ARROWS"
    wrong = []
    for module in imported(path, source):
        if module.split(".")[0] in PACKAGES:
            target = room_of(module)
            if target != room and target not in ARROWS[room].split():
                wrong.append(f"{room} imports {module}")
    return wrong


def undeclared(path: Path, source: str) -> list[str]:
    """Third-party packages that ``source`` imports and this room may not use."""
    room = room_of(module_of(path))
    assert room is not None
    declared = declared_modules("experiments" if room == "experiments" else None)
    wrong = []
    for module in imported(path, source):
        root = module.split(".")[0]
        if root in PACKAGES or root in sys.stdlib_module_names:
            continue
        misplaced = room not in ONLY_IN.get(root, {room}) or (room == "pallas_kernels" and root not in KERNELS_MAY_USE)
        if misplaced or root not in declared:
            wrong.append(f"{room} imports {module}")
    return wrong


@functools.cache
def declared_modules(extra: str | None) -> set[str]:
    """Import names of what pyproject.toml declares for the library, and for one extra on top."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    names = {re.split(r"[^A-Za-z0-9-]", requirement)[0].lower() for requirement in requirements}
    by_module = metadata.packages_distributions()
    return {module for module, dists in by_module.items() if names & {dist.lower().replace("_", "-") for dist in dists}}


def test_every_file_has_a_room_and_every_room_has_files():
    rooms = {path: room_of(module_of(path)) for path in sources()}
    assert [path for path, room in rooms.items() if room is None] == []
    assert set(ARROWS) - set(rooms.values()) == set()


def test_arrows_point_one_way():
    unknown = {target for targets in ARROWS.values() for target in targets.split()} - set(ARROWS)
    assert unknown == set()
    left = {room: set(targets.split()) for room, targets in ARROWS.items()}
    while left:
        free = {room for room, targets in left.items() if not targets & set(left)}
        assert free, f"ARROWS has a cycle among {sorted(left)}"
        left = {room: targets for room, targets in left.items() if room not in free}


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_follow_the_arrows(path):
    assert wrong_arrows(path, path.read_text()) == []


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_third_party_imports_are_declared_and_in_their_rooms(path):
    assert undeclared(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("specjax/tree.py", "from specjax.mask import ancestor_mask"),
        ("specjax/tree.py", "from specjax import mask"),
        ("specjax/tree.py", "from . import mask"),
        ("specjax/tree.py", "from .mask import ancestor_mask"),
        ("specjax/tree.py", "import specjax"),
        ("specjax/tree.py", "def late():\n    import specjax.decode as d"),
        ("specjax/draft/ssm.py", "from ..decode import round"),
        ("specjax/draft/__init__.py", "from .. import verify"),
        ("specjax/models/decoder.py", "from specjax.draft.ssm import ssm"),
        ("specjax/verify/rules.py", "if TYPE_CHECKING:\n    from specjax.exact import law"),
        ("specjax/testing.py", "import experiments"),
        ("pallas_kernels/tree_attention/api.py", "from specjax import types"),
    ],
)
def test_a_backward_import_is_caught(file, line):
    assert len(wrong_arrows(ROOT / file, line)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("specjax/tree.py", "import pandas as pd"),
        ("specjax/decode.py", "from flax import nnx"),
        ("specjax/models/decoder.py", "import tomlkit"),
        ("pallas_kernels/tree_attention/api.py", "import optax"),
    ],
)
def test_a_foreign_import_is_caught(file, line):
    assert len(undeclared(ROOT / file, line)) == 1


def test_allowed_imports_are_let_through():
    source = (
        "import jax.numpy as jnp\nfrom flax import nnx\nfrom specjax import cache\nfrom . import config\nimport json"
    )
    path = ROOT / "specjax/models/decoder.py"
    assert wrong_arrows(path, source) == undeclared(path, source) == []
