"""For autodoc: the fields of a NamedTuple or dataclass with their types and the comment behind each, its shape say."""

import ast
import inspect
import io
import textwrap
import tokenize
from typing import Any


def fields_of(cls: type) -> list[tuple[str, str, str]]:
    """Name, type and trailing comment of each field that the class body declares, in order."""
    source = textwrap.dedent(inspect.getsource(cls))
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return [
        (line.target.id, ast.unparse(line.annotation), comments.get(line.end_lineno or line.lineno, ""))
        for line in body.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]


def has_fields(thing: Any) -> bool:
    return inspect.isclass(thing) and (hasattr(thing, "_fields") or hasattr(thing, "__dataclass_fields__"))


def add_fields(app, what: str, name: str, thing: Any, options, lines: list[str]) -> None:
    """Append the fields to a class's docstring."""
    if what != "class" or not has_fields(thing):
        return
    lines += ["", "Fields:", ""]
    for field, kind, comment in fields_of(thing):
        lines.append(f"- ``{field}``: ``{kind}``" + (f". {_literal(comment)}" if comment else ""))
    lines.append("")


def _literal(comment: str) -> str:
    """A comment as reStructuredText: it is prose that may hold anything."""
    return "".join(f"\\{sign}" if sign in "*`|_\\" else sign for sign in comment)


def skip_fields(app, what: str, name: str, thing: Any, skip: bool, options) -> bool | None:
    """Leave out the members that NamedTuple makes for its fields; they are listed with their comments."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def setup(app) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", add_fields)
    app.connect("autodoc-skip-member", skip_fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
