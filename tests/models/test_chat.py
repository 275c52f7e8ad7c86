"""Chat templates: where they are found, what they may do, what they write."""

import json

import pytest

from specjax.models import load_chat_template

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hällo <1> & 2"}]
CHATML = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- raise_exception("no tools here") }}
    {%- endif %}
    {% if loop.index > 9 %}{% break %}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
EXPECTED = (
    "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHällo <1> & 2<|im_end|>\n<|im_start|>assistant\n"
)


def write(folder, *, tokens=None, **files):
    """A directory with these files; what is not text is written as JSON."""
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **(tokens or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        name = name.replace("__", ".")
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": CHATML},
        {"chat_template__json": {"chat_template": CHATML}},
        {"tokens": {"chat_template": CHATML}},
        {"tokens": {"chat_template": [{"name": "default", "template": CHATML}, {"name": "rag", "template": "x"}]}},
        {"chat_template__jinja": CHATML, "tokens": {"chat_template": "an older one"}},
    ],
    ids=["jinja-file", "json-file", "tokenizer-config", "several", "file-wins"],
)
def test_templates_are_found_where_they_are(tmp_path, files):
    render = load_chat_template(write(tmp_path, **files))
    assert render(MESSAGES) == EXPECTED
    assert render(MESSAGES, add_generation_prompt=False) == EXPECTED.removesuffix("<|im_start|>assistant\n")


def test_variables_and_json_are_for_people_and_not_for_html(tmp_path):
    template = "{{ tools | tojson }}{{ eos_token }}{{ strftime_now('%Y') | length }}"
    render = load_chat_template(write(tmp_path, chat_template__jinja=template))
    assert render(MESSAGES, tools=[{"name": "größe <&>"}]) == '[{"name": "größe <&>"}]</s>4'


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{{ messages[0] | tojson(indent=1, sort_keys=true) }}", '{\n "content": "Be brief.",\n "role": "system"\n}'),
        ("{{ 'ä' | tojson(ensure_ascii=true, separators=(',', ':')) }}", '"\\u00e4"'),
        ("{% if tools is not none %}{{ tools | length }}{% endif %}none", "none"),
        ("{% generation %}{% set word = 'yes' %}{{ word }}{% endgeneration %}.", "yes."),
    ],
    ids=["sorted", "ascii", "no-tools", "generation"],
)
def test_what_templates_on_the_hub_use_is_there(tmp_path, template, written):
    assert load_chat_template(write(tmp_path, chat_template__jinja=template))(MESSAGES) == written


def test_a_template_that_breaks_says_which(tmp_path):
    render = load_chat_template(write(tmp_path, chat_template__jinja="{{ 'a' + messages[0].content }}"))
    with pytest.raises(ValueError, match="'default' refuses these messages: can only concatenate str"):
        render([{"role": "user", "content": None}])


def test_a_refused_conversation_says_why(tmp_path):
    render = load_chat_template(write(tmp_path, chat_template__jinja=CHATML))
    with pytest.raises(ValueError, match="'default' refuses these messages: no tools here"):
        render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("attack", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_run_in_a_sandbox(tmp_path, attack):
    render = load_chat_template(write(tmp_path, chat_template__jinja=attack))
    messages = list(MESSAGES)
    with pytest.raises(ValueError, match="refuses these messages"):
        render(messages)
    assert messages == MESSAGES


def test_what_is_missing_or_malformed_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no chat template; expected chat_template.jinja"):
        load_chat_template(write(tmp_path))
    with pytest.raises(ValueError, match="no chat template 'rag'; it has default"):
        load_chat_template(write(tmp_path, chat_template__jinja=CHATML), "rag")
    with pytest.raises(ValueError, match="is not Jinja: "):
        load_chat_template(write(tmp_path, chat_template__jinja="{% for %}"))
