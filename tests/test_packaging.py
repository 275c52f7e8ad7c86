"""What is shipped: the wheel's contents, the pins, and what no tracked file may hold."""

import re
import subprocess
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
MAX_BYTES = 20 * 2**20

# What names a place instead of a thing: a registry's host, a home folder, a web address inside a pin.
REGISTRY_HOST = re.compile(rb"(pypi|pythonhosted|npmjs|debian)[.](org|com|net)")
HOME_PATH = re.compile(rb"(?<![A-Za-z0-9_.])/(root|home|Users|work)/")


def requirements() -> list[Requirement]:
    """Everything a pinned install asks for: the library, the experiments, and all dependency groups."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = table["dependency-groups"]
    lines = [*table["project"]["dependencies"], *table["project"]["optional-dependencies"]["experiments"]]
    return [Requirement(line) for line in [*lines, *(line for group in groups.values() for line in group)]]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def places(text: bytes) -> list[bytes]:
    """The lines that name a registry's host or a home folder."""
    if b"\0" in text[:8192]:  # binary, as git decides it
        return []
    return [line for line in text.splitlines() if REGISTRY_HOST.search(line) or HOME_PATH.search(line)]


def test_wheel_holds_the_two_packages_and_nothing_else(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for package in ("specjax", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_licence_is_the_whole_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_tracked_file_is_small_enough_to_clone():
    assert [str(path) for path in tracked_files() if path.stat().st_size > MAX_BYTES] == []


def test_no_tracked_file_names_a_registry_or_a_home_folder():
    found = {str(path.relative_to(ROOT)): places(path.read_bytes()) for path in tracked_files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://" + "pypi" + ".org/simple",
        "see files." + "pythonhosted" + ".org",
        "PATH=/" + "root/bin",
        "'/" + "home/me/model'",
    ],
)
def test_a_named_place_is_caught(line):
    assert places(f"first\n{line}\nlast".encode()) == [line.encode()]


def test_pins_are_exact_and_name_no_place():
    assert all(
        re.fullmatch(r"[a-z0-9-]+", name) and re.fullmatch(r"[0-9][0-9a-z.]*", pin) for name, pin in pins().items()
    )


def test_pins_satisfy_the_declared_ranges():
    for requirement in requirements():
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pin), f"{requirement} does not allow the pinned {pin}"


def test_everything_the_requirements_pull_in_is_pinned():
    missing, seen, todo = set(), set(), requirements()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in pins():
            missing.add(name)
            continue
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # the lint group is not there where only the tests run
            continue
        extras = requirement.extras or {""}
        todo += [
            need
            for need in map(Requirement, needs)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    assert missing == set()
