"""Whether a draft can speak for a target: token i of the one must be token i of the other."""

from pathlib import Path
from typing import Any

from specjax.models.files import read_json
from specjax.models.tokenizer import load_tokenizer
from specjax.types import Model

_SHOWN = 3  # examples in a message
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_pair(target: Model, draft: Model) -> tuple[str, ...]:
    """Compare vocabularies, special ids and tokenizers of two loaded models before a run.

    Logits are often padded beyond the tokenizer's last id, each model's to its own size; the tokenizers say what is
    padding.

    Args:
      target: a model; its tokenizer is looked for in the directory it was loaded from.
      draft: another.

    Returns:
      Remarks, one sentence each, on what differs without making the pair wrong.

    Raises:
      ValueError: the same id means different tokens, or nothing can tell whether it does. Every reason is named, with
        both sides.
    """
    sides = {"target": target, "draft": draft}
    names = {side: model.directory or f"the {side}" for side, model in sides.items()}
    tokens = {side: _tokens(model) for side, model in sides.items()}
    sizes = (
        f"the target {names['target']} has {target.vocab_size} logits, the draft {names['draft']} {draft.vocab_size}"
    )
    problems, remarks = [], []
    ours, theirs = tokens["target"], tokens["draft"]
    if ours is None or theirs is None:
        missing = f"no tokenizer.json for {' and '.join(names[side] for side in sides if tokens[side] is None)}"
        if target.vocab_size != draft.vocab_size:
            problems.append(f"{sizes}, and with {missing} nothing says whether the difference is padding")
        else:
            remarks.append(f"{missing}, so whether ids mean the same tokens was not checked.")
    else:
        for side, known in (("target", ours), ("draft", theirs)):
            if max(known) >= sides[side].vocab_size:
                problems.append(
                    f"the tokenizer of {names[side]} knows ids up to {max(known)}, its model only "
                    f"{sides[side].vocab_size}: they do not belong together"
                )
        shared = ours.keys() & theirs.keys()
        different = sorted(number for number in shared if ours[number] != theirs[number])
        if different:
            shown = ", ".join(f"{i} is {ours[i]!r} and {theirs[i]!r}" for i in different[:_SHOWN])
            problems.append(
                f"the tokenizers of {names['target']} and {names['draft']} differ at {len(different)} ids: {shown}; "
                "choose a draft of the target's family, or train one with its tokenizer"
            )
        elif 2 * len(shared) < min(len(ours), len(theirs)):
            problems.append(
                f"the tokenizers of {names['target']} and {names['draft']} have {len(ours)} and {len(theirs)} tokens, "
                f"but only {len(shared)} ids in common; nothing says that the others mean the same"
            )
        elif target.vocab_size != draft.vocab_size or ours.keys() != theirs.keys():
            remarks.append(
                f"{sizes}; they share the {len(shared)} tokens that both tokenizers know, the target's alone has "
                f"{len(ours) - len(shared)} more and the draft's {len(theirs) - len(shared)}, and what lies beyond is "
                "padding."
            )
    special = {side: _special_ids(model) for side, model in sides.items()}
    for key in _SPECIAL:
        a, b = (special[side].get(key, ()) for side in sides)
        if a != b:
            remarks.append(
                f"{key} is {_show(a)} for the target and {_show(b)} for the draft; a run stops at the target's."
                if key == "eos_token_id"
                else f"{key} is {_show(a)} for the target and {_show(b)} for the draft."
            )
    if problems:
        raise ValueError("these two cannot draft for each other:\n  " + "\n  ".join(problems))
    return tuple(remarks)


def _tokens(model: Model) -> dict[int, str] | None:
    """The tokenizer's tokens by id; None without a tokenizer."""
    if model.directory is None or not (Path(model.directory) / "tokenizer.json").exists():
        return None
    vocabulary = load_tokenizer(model.directory).get_vocab(with_added_tokens=True)
    return {number: token for token, number in vocabulary.items()}


def _special_ids(model: Model) -> dict[str, tuple[int, ...]]:
    """Ids by their key, as the model's files give them: generation_config.json, else config.json."""
    found: dict[str, tuple[int, ...]] = {"eos_token_id": tuple(sorted(model.eos_ids))}
    for file in ("generation_config.json", "config.json"):
        path = Path(model.directory or "") / file
        content: dict[str, Any] = read_json(path) if model.directory and path.exists() else {}
        for key in _SPECIAL:
            value = content.get(key)
            if isinstance(value, int):
                found.setdefault(key, (value,))
    return found


def _show(ids: tuple[int, ...]) -> str:
    return " or ".join(map(str, ids)) or "none"
