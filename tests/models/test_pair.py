"""Whether a draft fits a target: what is wrong, what is only worth a remark."""

import json

import pytest
import tokenizers

import specjax as sj
from specjax.testing import table_model

TOKENS = ["<s>", "</s>", "the", "tree", "of", "life"]


def model(folder, tokens=TOKENS, *, logits=8, eos_ids=(1,), **generation):
    """A model of so many logits, as if loaded from a directory with a tokenizer of these tokens."""
    folder.mkdir(exist_ok=True)
    if tokens is not None:
        known = {token: number for number, token in enumerate(tokens)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<s>"))
        made.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return table_model([0.0] * logits, eos_ids=eos_ids)._replace(directory=str(folder))


def test_a_pair_of_one_family_has_no_remarks(tmp_path):
    assert sj.check_pair(model(tmp_path / "a"), model(tmp_path / "b")) == ()


def test_padding_is_told_from_tokens(tmp_path):
    """Padding alone is worth a remark that says how far the two agree, as is a token that only one knows."""
    (remark,) = sj.check_pair(model(tmp_path / "a", logits=8), model(tmp_path / "b", TOKENS[:5], logits=6))
    assert "a has 8 logits, the draft" in remark
    assert "share the 5 tokens that both tokenizers know" in remark
    assert "the target's alone has 1 more and the draft's 0" in remark


def test_another_vocabulary_is_refused_with_both_sides(tmp_path):
    other = ["<s>", "</s>", "tree", "the", "of", "death"]
    with pytest.raises(ValueError, match="cannot draft for each other") as caught:
        sj.check_pair(model(tmp_path / "a"), model(tmp_path / "b", other))
    for part in (str(tmp_path / "a"), str(tmp_path / "b"), "at 3 ids: 2 is 'the' and 'tree', 3 is 'tree' and 'the'"):
        assert part in str(caught.value)


def test_tokenizers_with_hardly_an_id_in_common_are_refused(tmp_path):
    """Where ids do not overlap none can differ, which says nothing."""
    target, draft = model(tmp_path / "a", TOKENS[:4]), model(tmp_path / "b", logits=12)
    far = tokenizers.Tokenizer(tokenizers.models.WordLevel({"other": 10, "words": 11}, unk_token="other"))
    far.save(str(tmp_path / "b" / "tokenizer.json"))
    with pytest.raises(ValueError, match="have 4 and 2 tokens, but only 0 ids in common"):
        sj.check_pair(target, draft)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="knows ids up to 5, its model only 4"):
        sj.check_pair(model(tmp_path / "a"), model(tmp_path / "b", logits=4))


def test_special_ids_are_compared(tmp_path):
    target = model(tmp_path / "a", eos_ids=(1, 5), bos_token_id=0, pad_token_id=1)
    bos, eos = sj.check_pair(target, model(tmp_path / "b", bos_token_id=2, pad_token_id=1))
    assert eos == "eos_token_id is 1 or 5 for the target and 1 for the draft; a run stops at the target's."
    assert bos == "bos_token_id is 0 for the target and 2 for the draft."


def test_without_tokenizers_only_equal_sizes_pass(tmp_path):
    target = model(tmp_path / "a")
    (remark,) = sj.check_pair(target, model(tmp_path / "b", None))
    assert f"no tokenizer.json for {tmp_path / 'b'}" in remark
    assert "not checked" in sj.check_pair(table_model([0.0] * 8, eos_ids=(1,)), target)[0]
    with pytest.raises(ValueError, match="nothing says whether the difference is padding"):
        sj.check_pair(target, model(tmp_path / "b", None, logits=9))
