"""Documentation is part of the library: its code runs, its API pages are complete, notebooks and twins agree."""

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types
from pathlib import Path

import autodoc_fields
import jax
import jupytext
import pytest

import pallas_kernels
import specjax as sj
from experiments import config, sweep

ROOT = Path(__file__).parent.parent
ZOO = ROOT / "experiments/zoo"
HUB = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B")
PAGES = [
    "README.md",
    *(f"docs/{path.relative_to(ROOT / 'docs')}" for path in sorted((ROOT / "docs/howto").glob("*.md"))),
]
PAGES += ["docs/concepts/trees.md"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def public_modules() -> list[str]:
    """Every module of the two packages that says what is public in it."""
    found = []
    for package in (sj, pallas_kernels):
        found.append(package.__name__)
        found += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    # A kernel's module needs its platform's compiler, and is no public one.
    named = [name for name in found if "__all__" in Path(str(importlib.util.find_spec(name).origin)).read_text()]
    return sorted(named)


def public_names(module: str) -> dict[str, object]:
    loaded = importlib.import_module(module)
    things = {name: getattr(loaded, name) for name in loaded.__all__}
    return {name: thing for name, thing in things.items() if not isinstance(thing, types.ModuleType)}


def documented() -> dict[str, list[str]]:
    """Module -> the names that the API pages describe in it."""
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        module = ""
        for directive, argument in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.MULTILINE):
            if directive == "currentmodule":
                module = argument
            elif directive in ("autofunction", "autoclass", "data"):
                found.setdefault(module, []).append(argument)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_documentation_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    tokenizer = sj.load_tokenizer(ZOO / "target")
    if page == "README.md":  # its models are large, or slow to compile: others stand in for them
        monkeypatch.setattr(sj, "load_model", stand_in)
    names = {"prompts": [tokenizer.encode("def add(a, b):\n    return").ids]}  # a reader's own
    with jax.debug_key_reuse(False):
        for code in blocks((ROOT / page).read_text(), "python"):
            exec(compile(code, page, "exec"), names)


def stand_in(path: str, *, dtype: str = "float32") -> sj.Model:
    """A model that is compiled in no time, with the tokenizer of the models that ship."""
    assert dtype in ("float32", "bfloat16") and (path in HUB or (ROOT / path / "config.json").is_file()), path
    return sj.testing.context_model(len(path), 4096)._replace(directory=str(ZOO / "target"))


def test_configs_in_the_readme_are_configs(tmp_path):
    (text,) = blocks((ROOT / "README.md").read_text(), "toml")
    (tmp_path / "mine.toml").write_text(text)
    experiment = config.load(sweep.Experiment, tmp_path / "mine.toml")
    assert len(sweep.cells(experiment)) == 12


def test_api_pages_describe_every_public_name_once():
    pages = documented()
    assert sorted(pages) == public_modules()
    described = {id(public_names(module)[name]) for module, names in pages.items() for name in names}
    for module, names in pages.items():
        public = public_names(module)
        assert len(names) == len(set(names)), module
        assert set(names) <= set(public), f"{module}: described, but not in __all__"
        # A name may be described where it is imported from or to.
        missing = [name for name in set(public) - set(names) if id(public[name]) not in described]
        assert missing == [], f"{module}: in __all__, but on no page"


@pytest.mark.parametrize("module", public_modules())
def test_every_public_name_says_what_it_is(module):
    for name, thing in public_names(module).items():
        if not (inspect.isclass(thing) or callable(thing)) or isinstance(thing, tuple):
            continue  # a value: the page and a comment say what it is
        text = (thing.__doc__ or "").strip()
        assert text and not text.startswith(f"{name}("), f"{module}.{name} has no docstring of its own"
        if inspect.isclass(thing):
            for member, method in vars(thing).items():
                if inspect.isfunction(method) and not member.startswith("_"):
                    assert method.__doc__, f"{module}.{name}.{member} has no docstring"


@pytest.mark.parametrize("module", public_modules())
def test_arrays_have_shapes_and_errors_are_told(module):
    for name, thing in public_names(module).items():
        if inspect.isclass(thing) and (hasattr(thing, "_fields") or dataclasses.is_dataclass(thing)):
            for field, kind, comment in autodoc_fields.fields_of(thing):
                is_array = re.match(r"(jax\.Array|np\.ndarray|Array)\b", kind)
                assert not is_array or "[" in comment, f"{module}.{name}.{field} has no shape"
        if inspect.isfunction(thing):
            kinds = [str(kind) for kind in inspect.get_annotations(thing).values()]
            takes_arrays = any(re.search("Array|ndarray", kind) and "Callable" not in kind for kind in kinds)
            text = thing.__doc__ or ""
            assert not takes_arrays or "[" in text, f"{module}.{name} says no shape"
            raises = re.search(
                r"^    raise ValueError|^        raise ValueError", inspect.getsource(thing), re.MULTILINE
            )
            assert not raises or "Raises:" in text or "errors" in text.lower(), (
                f"{module}.{name} does not say its errors"
            )


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_its_text_twin_without_outputs(notebook):
    remedy = f"run: jupytext --to ipynb notebooks/{notebook.stem}.py"
    mine, twin = jupytext.read(notebook), jupytext.read(notebook.with_suffix(".py"))
    plain = lambda found: [(cell.cell_type, cell.source) for cell in found.cells]
    assert plain(mine) == plain(twin), remedy
    code = [cell for cell in mine.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code), remedy


def test_every_text_twin_has_a_notebook():
    twins, notebooks = ({path.stem for path in (ROOT / "notebooks").glob(kind)} for kind in ("*.py", "*.ipynb"))
    assert twins == notebooks != set()
