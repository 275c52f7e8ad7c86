"""Chat templates: how a model wants a conversation written."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specjax.models.files import read_json
from specjax.models.hub import find_model

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate(Protocol):
    """A conversation as the text that a model was trained to go on with."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Write a conversation.

        Args:
          messages: each with a "role" and a "content", such as ``{"role": "user", "content": "Hello"}``.
          add_generation_prompt: whether the text ends where the assistant's answer begins.
          variables: what else the template reads, such as ``tools``.

        Returns:
          The text, its special tokens included: encode it with ``add_special_tokens=False``.

        Raises:
          ValueError: the template refuses the conversation.
        """
        ...


def load_chat_template(path: str | Path, name: str = "default") -> ChatTemplate:
    """The chat template of a model directory, or of a model on the hub.

    Templates are programs of whoever made the model; they run in Jinja's sandbox.

    Args:
      path: the directory, or an id as ``load_model`` takes it.
      name: which one, where there are several.

    Raises:
      FileNotFoundError: no such directory, or it has no chat template (models that were not taught to chat have none).
      ValueError: no template of this name, or one that is not Jinja.
    """
    import jinja2  # where it is needed: what does not chat needs no templates

    directory = find_model(path, weights=False)
    templates, tokens = _templates(directory)
    if not templates:
        raise FileNotFoundError(
            f"{directory}: no chat template; expected chat_template.jinja, or one in tokenizer_config.json; a model "
            "that was not taught to chat has none, and takes prompts as they are"
        )
    if name not in templates:
        raise ValueError(f"{directory}: no chat template {name!r}; it has {', '.join(sorted(templates))}")
    try:
        template = _environment().from_string(templates[name])
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{directory}: the chat template {name!r} is not Jinja: {error}") from None

    def render(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        # Templates ask whether these are none, which an undefined variable is not.
        given = {**tokens, "tools": None, "documents": None, "messages": messages}
        try:
            return template.render({**given, "add_generation_prompt": add_generation_prompt, **variables})
        except Exception as error:  # a template is somebody's program: it raises whatever its bugs raise
            raise ValueError(f"{directory}: the chat template {name!r} refuses these messages: {error}") from None

    return render


def _templates(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Templates by name, and the special tokens they may write."""
    configs = {
        file: read_json(directory / file)
        for file in ("special_tokens_map.json", "tokenizer_config.json", "chat_template.json")
        if (directory / file).exists()
    }
    templates, tokens = {}, {}
    for content in configs.values():
        for token in _SPECIAL_TOKENS:
            value = content.get(token)
            if value is not None:
                tokens[token] = value["content"] if isinstance(value, dict) else value
        given = content.get("chat_template")
        if isinstance(given, str):
            templates["default"] = given
        elif given is not None:
            templates |= {entry["name"]: entry["template"] for entry in given}
    for file in [directory / "chat_template.jinja", *sorted((directory / "additional_chat_templates").glob("*.jinja"))]:
        if file.exists():
            name = "default" if file.parent == directory else file.stem
            templates[name] = file.read_text(encoding="utf-8")
    return templates, tokens


@functools.cache
def _environment() -> Any:
    """Jinja with what templates on the hub expect to find in it."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; in a text it is nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own is for HTML


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
