"""One generation, round by round, as JSON and as a page that steps through its trees.

`python -m experiments.trace configs/quickstart.toml [--cell 3] [--prompt 0] [--out DIR]`
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

import specjax as sj
from experiments import command, config, sweep
from experiments.config import ConfigError
from experiments.sweep import Experiment
from experiments.workshop import Workshop
from specjax import decode
from specjax.request import Plan, prepare
from specjax.tree import TokenTree
from specjax.types import Acceptance, RoundKeys

PAGE = pathlib.Path(__file__).with_name("trace.html")
MARK = "__TRACE__"  # where the page holds the JSON


class Seen(NamedTuple):
    """One round of a batch of one, as it was verified."""

    tree: TokenTree
    path: jax.Array  # [1, D + 1] slots
    target: jax.Array  # [1, N] the target's probability of each node's token behind its parent
    draft: jax.Array  # [1, N, S] each source's; 0 where it drew nothing there


def rounds(plan: Plan) -> tuple[list[int], list[dict[str, Any]], str]:
    """Decode a plan of one prompt.

    Returns:
      The first token, which prefill emits; a dictionary per round, see ``trace``; and why it stopped.

    Raises:
      ValueError: for a drafter that chooses among sizes, whose trees are of several shapes.
    """
    if plan.spec.draft_choose is not None:
        raise ValueError("a drafter that chooses among sizes cannot be traced; trace one of its sizes")
    state, found = plan.start(), []
    first = np.asarray(state.tokens)[0, int(plan.inputs[1][0]) : int(state.lengths[0])].tolist()
    while bool(state.running[0]):
        begins = int(state.lengths[0])
        state, info, seen = _look(plan.spec, plan.params, state)
        emitted = np.asarray(state.tokens)[0, begins : int(state.lengths[0])].tolist()
        found.append(_round(jax.device_get(seen), emitted, int(info.accepted[0]), begins - 1))
    reason = "eos" if int(state.reasons[0]) == decode.EOS else "length"
    return first, found, reason


@functools.partial(jax.jit, static_argnums=0)
def _look(spec: decode.Spec, params: decode.Params, state: decode.DecodeState):
    seen: list[Seen] = []

    def verify(keys: RoundKeys, tree: TokenTree, logits: jax.Array, warp: sj.Warp) -> Acceptance:
        acceptance = spec.verify(keys, tree, logits, warp)
        # Greedy decoding has no probabilities but 0 and 1; what a reader wants to see are those behind them.
        shown = dataclasses.replace(warp, temperature=jnp.where(warp.temperature == 0, 1.0, warp.temperature))
        seen.append(jax.vmap(_probabilities)(tree, acceptance.path, logits, shown))
        return acceptance

    state, info = decode.round(spec._replace(verify=verify), params, state)
    return state, info, seen[0]


def _probabilities(tree: TokenTree, path: jax.Array, logits: jax.Array, warp: sj.Warp) -> Seen:
    parents = jnp.maximum(tree.parents, 0)
    target = jax.vmap(lambda parent, token: warp(logits[parent])[token])(parents, tree.tokens)
    rows = tree.q_rows[parents]  # [N, S]
    if tree.q.shape[0]:
        draft = jnp.where(rows >= 0, tree.q[jnp.maximum(rows, 0), tree.tokens[:, None]], 0)
    else:
        draft = jnp.zeros(rows.shape)
    return Seen(tree, path, target, draft)


def _round(seen: Seen, emitted: list[int], accepted: int, length: int) -> dict[str, Any]:
    tree = jax.tree.map(lambda leaf: leaf[0], seen.tree)
    path = seen.path[0, : accepted + 1].tolist()
    nodes = []
    for slot in np.flatnonzero(tree.valid).tolist():
        parent, token = int(tree.parents[slot]), int(tree.tokens[slot])
        drawn = tree.draw_valid[parent] & (tree.draw_tokens[parent] == token) if slot else np.zeros(0, bool)
        sources = sorted(set(tree.draw_source[drawn].tolist())) if slot else []
        nodes.append(
            {
                "slot": slot,
                "parent": parent,
                "depth": int(tree.depths[slot]),
                "token": token,
                "sources": sources,
                "draft": max((float(seen.draft[0, slot, source]) for source in sources), default=None),
                "target": float(seen.target[0, slot]) if slot else None,
                "accepted": slot in path[1:],
            }
        )
    return {"length": length, "nodes": nodes, "path": path, "accepted": accepted, "emitted": emitted}


def trace(experiment: Experiment, makes: Workshop, prompt: int) -> dict[str, Any]:
    """Everything about one generation, as plain data; every token as ``{"token": id, "text": text}``.

    ``rounds`` has for each round ``length``, the tokens that stand before its root; ``nodes`` with slot, parent, depth,
    sources, the draft's and the target's probability, and whether it was accepted; ``path``, the accepted slots, root
    first; ``accepted``, their number without the root; ``emitted``; and ``begin`` and ``end``, the characters of
    ``text.whole`` between which it stands. ``text.begin`` is where the prompt ends.

    Args:
      experiment: a cell.
      makes: what loads its models.
      prompt: which of its prompts.
    """
    text = makes.texts(experiment)[prompt]
    plan = prepare(**makes.call(experiment, [text], prompt))
    first, found, reason = rounds(plan)
    tokenizer = sj.load_tokenizer(_directory(experiment, makes))
    say = text_of(tokenizer)
    told = lambda token: {"token": token, "text": say(token)}
    ids, ends = list(text.tokens), []
    for part in ([], first, *(item["emitted"] for item in found)):
        ids += part
        ends.append(tokenizer.decode(ids, skip_special_tokens=False))
    places = [
        len(os.path.commonprefix([end, ends[-1]])) for end in ends
    ]  # before a character of which a byte is missing
    for item, (begin, end) in zip(found, itertools.pairwise(places[1:]), strict=True):
        item |= {"begin": begin, "end": end}
        item["emitted"] = [told(token) for token in item["emitted"]]
        for node in item["nodes"]:
            node["text"] = say(node["token"])
    steps = len(found)
    emitted = sum(len(item["emitted"]) for item in found)
    return {
        "title": f"{sweep.label(experiment.decode)} {' + '.join(experiment.decode.drafts)}".strip(),
        "settings": {key: value for key, value in config.to_dict(experiment).items() if key != "sweep"},
        "sources": list(experiment.decode.drafts),
        "prompt": {"name": text.name, "cut": text.cut, "tokens": [told(token) for token in text.tokens]},
        "first": [told(token) for token in first],
        "text": {"whole": ends[-1], "begin": places[0]},
        "rounds": found,
        "finish_reason": reason,
        "tokens_per_step": emitted / steps if steps else None,
    }


def _directory(experiment: Experiment, makes: Workshop) -> pathlib.Path:
    models = experiment.models
    target = makes.model(models.target, models.attention, models.dtype)
    return pathlib.Path(target.directory) if target.directory else config.resolve(models.target)


def text_of(tokenizer: tokenizers.Tokenizer) -> Callable[[int], str]:
    """What a token adds to a text; of one that is part of a character, its bytes, such as ``<0xE2>``."""
    byte_of = {letter: value for value, letter in _byte_letters()}
    before = tokenizer.encode("a", add_special_tokens=False).ids[
        -1:
    ]  # since some tokenizers strip a text's first space
    base = tokenizer.decode(before, skip_special_tokens=False)

    @functools.cache
    def text(token: int) -> str:
        whole = tokenizer.decode([*before, token], skip_special_tokens=False)
        added = whole.removeprefix(base)
        if added and "\ufffd" not in added:
            return added
        piece = tokenizer.id_to_token(token)
        if piece is None:
            return f"<{token}>"  # padding behind the tokenizer's last id
        if added and not piece.startswith("<0x") and all(letter in byte_of for letter in piece):
            return "".join(f"<0x{byte_of[letter]:02X}>" for letter in piece)
        return piece

    return text


def _byte_letters() -> list[tuple[int, str]]:
    """The letters that byte-level tokenizers write bytes with: printable bytes as themselves, the rest from 256 up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    return [(value, chr(value)) for value in plain] + [(value, chr(256 + at)) for at, value in enumerate(others)]


def page(traced: dict[str, Any]) -> str:
    """The trace as one HTML file that needs no other and no network."""
    raw = json.dumps(traced, ensure_ascii=True)  # no line separators or control characters
    for letter in "<>&":  # a token may be "</script>"
        raw = raw.replace(letter, f"\\u{ord(letter):04x}")
    return PAGE.read_text(encoding="utf-8").replace(MARK, raw)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 2 for a bad config."""
    parser = command.parser("trace", "Export one generation of a config as JSON and as a page.", runs=True)
    parser.add_argument("--cell", type=int, metavar="N", help="of the sweep, from 1; default: the first that drafts")
    parser.add_argument("--prompt", type=int, default=0, metavar="N", help="from 0")
    args = parser.parse_args(arguments)
    screen = command.screen()
    try:
        experiment = config.load(Experiment, args.config, args.set)
        cells = sweep.cells(experiment)
        chosen = [cell for cell in cells if cell.config.decode.drafts] if args.cell is None else cells
        number = 1 if args.cell is None else args.cell
        if not 1 <= number <= len(chosen):
            raise ConfigError([f"--cell {number}: there are {len(chosen)} to choose from; --dry-run of run lists them"])
        cell = chosen[number - 1]
        if not 0 <= args.prompt < cell.config.run.num_prompts:
            raise ConfigError([f"--prompt {args.prompt}: run.num_prompts is {cell.config.run.num_prompts}"])
        makes = Workshop([cell])
        makes.check([cell])
        traced = trace(cell.config, makes, args.prompt)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    directory = args.out or config.REPOSITORY / "runs" / f"trace-{cell.id}-{args.prompt}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "trace.json").write_text(json.dumps(traced, indent=1) + "\n", encoding="utf-8")
    (directory / "trace.html").write_text(page(traced), encoding="utf-8")
    screen.print(
        f"{len(traced['rounds'])} rounds, {traced['tokens_per_step'] or 0:.2f} tokens per step: "
        f"{directory / 'trace.html'}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
