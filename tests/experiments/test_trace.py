"""A traced generation is the library's, and its page works in a browser, whatever its tokens are."""

import json
import os
import pathlib
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import tokenizers

import specjax as sj
from experiments import trace, workshop
from specjax.request import prepare

TARGET = sj.testing.context_model(0, 256)
DRAFT = sj.testing.mixed(TARGET)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trace_is_what_generate_does(temperature):
    options = dict(drafts=[DRAFT], tree=(2, 1), warp=sj.Warp(temperature), max_new_tokens=20, seeds=[3])
    first, rounds, reason = trace.rounds(prepare(TARGET, [[1, 2, 3]], **options))
    wanted = sj.generate(TARGET, [[1, 2, 3]], **options)
    assert (first + sum((item["emitted"] for item in rounds), []), reason) == (wanted.tokens[0], "length")
    assert [(item["accepted"], len(item["emitted"])) for item in rounds] == [
        (item.accepted, item.emitted) for item in wanted.rounds[0]
    ]
    text = [1, 2, 3, *wanted.tokens[0]]
    assert max(item["accepted"] for item in rounds) == (1 if temperature else 2)
    laws = np.asarray(sj.Warp(temperature or 1.0)(sj.testing.fresh_logits(TARGET, text)))
    for item in rounds:
        nodes = {node["slot"]: node for node in item["nodes"]}
        assert nodes[0]["token"] == text[item["length"]] and nodes[0]["parent"] == -1
        for above, slot, token in zip(item["path"], item["path"][1:], item["emitted"]):
            assert nodes[slot]["parent"] == above and nodes[slot]["token"] == token
        assert [node["slot"] for node in nodes.values() if node["accepted"]] == sorted(item["path"][1:])
        # Behind the root, the probabilities are those of the two models for the text so far.
        p = laws[item["length"]]
        drawn = [node for node in nodes.values() if node["parent"] == 0]
        assert all(node["sources"] == [0] and node["draft"] > 0 for node in drawn)
        np.testing.assert_allclose([node["target"] for node in drawn], p[[node["token"] for node in drawn]], rtol=1e-4)


def config_of(zoo: pathlib.Path, folder: pathlib.Path) -> str:
    (folder / "prompts.jsonl").write_text('{"prompt": "def f(x):", "name": "p"}\n')
    path = folder / "some.toml"
    path.write_text(
        f'[run]\nname = "t"\nprompts = "{folder / "prompts.jsonl"}"\nnum_prompts = 1\nmax_new_tokens = 16\n'
        f'[models]\ntarget = "{zoo / "target"}"\ndrafts = ["{zoo / "far"}"]\n[decode]\ndrafts = ["far"]\n'
        "[[sweep]]\nproduct.decode.tree = [[2, 1], [3]]\n"
    )
    return str(path)


@pytest.fixture(scope="module")
def exported(zoo, tmp_path_factory):
    """A folder with trace.json and trace.html of the command."""
    folder = tmp_path_factory.mktemp("trace")
    target = TARGET._replace(directory=str(zoo / "target"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workshop, "_load_model", lambda path, *_: target if path.endswith("target") else DRAFT)
        assert trace.main([config_of(zoo, folder), "--out", str(folder / "out")]) == 0
    return folder / "out"


def data_of(page: str) -> dict:
    """What a browser would read as the page's data."""

    class Reader(HTMLParser):
        found, inside = "", False

        def handle_starttag(self, tag, attrs):
            self.inside = dict(attrs).get("id") == "data"

        def handle_endtag(self, tag):
            self.inside = False

        def handle_data(self, data):
            self.found += data if self.inside else ""

    reader = Reader()
    reader.feed(page)
    return json.loads(reader.found)


def test_the_command_writes_both_files(exported):
    traced = json.loads((exported / "trace.json").read_text())
    page = (exported / "trace.html").read_text()
    assert data_of(page) == traced and trace.MARK not in page
    assert traced["title"] == "<2,1> far" and traced["prompt"]["name"] == "p"
    assert "".join(token["text"] for token in traced["prompt"]["tokens"]) == "def f(x):"
    assert len(traced["first"]) == 1 and sum(len(item["emitted"]) for item in traced["rounds"]) == 15
    whole, places = traced["text"]["whole"], [item["end"] for item in traced["rounds"]]
    assert whole.startswith("def f(x):") and places == sorted(places) and places[-1] == len(whole)
    assert not re.search(r"https?://|src=|href=", page)


HOSTILE = [
    "</script><script>boom()</script>",
    "<!--",
    "\u202e\x00\x1b\r\n",
    "&lt;<b>",
    "\u2028",
    "<0xE2>",
    "\U0001f600",
]


def hostile(traced: dict) -> dict:
    """The same trace with texts that would break a page that does not escape them."""
    texts = iter(HOSTILE * 1000)
    for item in traced["rounds"]:
        for entry in (*item["nodes"], *item["emitted"]):
            entry["text"] = next(texts)
    return traced


def test_no_token_breaks_the_page(exported):
    traced = hostile(json.loads((exported / "trace.json").read_text()))
    page = trace.page(traced)
    assert data_of(page) == traced and page.count("<script") == page.count("</script>") == 2 and "boom()" in page


def test_tokens_are_shown_as_what_they_add(byte_tokenizer):
    bytes_ = tokenizers.Tokenizer.from_file(str(byte_tokenizer))
    say = trace.text_of(bytes_)
    assert [say(number) for number in bytes_.encode("a \n").ids] == ["a", " ", "\n"]
    assert [say(number) for number in bytes_.encode("é").ids] == ["<0xC3>", "<0xA9>"] and say(9999) == "<9999>"
    vocabulary = {"▁": 0, "a": 1, "▁the": 2, "<0xE2>": 3, "<unk>": 4}
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    pieces.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    assert [trace.text_of(pieces)(number) for number in (1, 2, 3)] == ["a", " the", "<0xE2>"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cell", "3"], "--cell 3: there are 2"),
        (["--cell", "0"], "--cell 0: there are 2"),
        (["--prompt", "1"], "run.num_prompts is 1"),
    ],
)
def test_what_is_not_there_is_refused(zoo, tmp_path, capsys, arguments, words):
    assert trace.main([config_of(zoo, tmp_path), *arguments]) == 2 and words in capsys.readouterr().err


class Browser:
    """A headless browser driven over its debugging pipe, with real key presses and clicks."""

    def __init__(self, profile: pathlib.Path):
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        command = [CHROMIUM, *options.split(), f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # The browser reads its file 3 and writes its file 4.
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{read} 4>&{write} 2>/dev/null', *command]
        self._process = subprocess.Popen(shell, pass_fds=(read, write))
        os.close(read), os.close(write)
        self._buffer, self._session, self._number, self.events = b"", None, 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self):
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser is gone"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: pathlib.Path):
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def ask(self, expression: str):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def click(self, element: str):
        self.ask(f"document.getElementById('{element}').scrollIntoView()")
        box = self.ask(f"document.getElementById('{element}').getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome here: the page was not opened")
def test_the_page_steps_through_the_rounds_in_a_browser(exported, tmp_path):
    traced = json.loads((exported / "trace.json").read_text())
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(exported / "trace.html")
        count = len(traced["rounds"])
        slots = lambda kind: browser.ask(
            f"[...document.querySelectorAll('li{kind}')].map((item) => +item.dataset.slot)"
        )
        shows = lambda: browser.ask("document.getElementById('round').textContent")
        for number, item in enumerate(traced["rounds"]):
            assert shows() == f"round {number + 1} of {count}"
            assert sorted(slots(".accepted")) == sorted(item["path"][1:])
            assert sorted(slots("[data-slot]")) == [node["slot"] for node in item["nodes"]]
            now = browser.ask("[...document.querySelector('#text .now').textContent].length")
            assert now >= item["end"] - item["begin"]  # hidden characters are named
            browser.press("ArrowRight")
        assert shows() == f"round {count} of {count}" and browser.ask("document.getElementById('next').disabled")
        for action, wanted in (
            (lambda: browser.click("first"), 1),
            (lambda: browser.click("next"), 2),
            (lambda: browser.press("End"), count),
            (lambda: browser.click("previous"), count - 1),
            (lambda: browser.press("ArrowLeft"), count - 2),
            (lambda: browser.click("last"), count),
            (lambda: browser.press("Home"), 1),
        ):
            action()
            assert shows() == f"round {wanted} of {count}"

        (tmp_path / "hostile.html").write_text(trace.page(hostile(traced)), encoding="utf-8")
        browser.open(tmp_path / "hostile.html")
        shown = browser.ask("[...document.querySelectorAll('.token')].map((item) => item.textContent).join(' ')")
        assert "</script><script>boom()</script>" in shown and r"<U+202E><U+0000><U+001B>\r\n" in shown
        assert browser.ask("document.querySelectorAll('script').length") == 2
        asked = [event["params"]["request"]["url"] for event in browser.events if "request" in event.get("params", {})]
        assert asked and all(url.startswith("file://") for url in asked)
        assert not [event for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]
    finally:
        browser.close()
