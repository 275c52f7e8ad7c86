"""The whole decode loop with each implementation: the same text, whichever attends."""

import functools

import jax
import pytest

import specjax as sj
from pallas_kernels.tree_attention import Config, tree_attention
from specjax.models import DecoderConfig, init_model

SMALL = DecoderConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_positions=64,
)


def text(attention, dtype):
    """Greedy text of two rows, drafted by a model of its own; the random weights are scaled so that texts differ."""
    target, draft = (init_model(SMALL, jax.random.key(seed), attention=attention, dtype=dtype) for seed in (0, 1))
    target, draft = (
        model._replace(params=jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, model.params))
        for model in (target, draft)
    )
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    return sj.generate(target, prompts, drafts=[draft], tree=(2, 1), max_new_tokens=4, eos_ids=()).tokens


@functools.cache
def plain_text(dtype):
    return text("xla", dtype)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("reference", "float32"), ("mosaic_tpu", "float32"), ("mosaic_gpu", "float16")],
)
def test_generate_gives_the_text_that_xla_gives(implementation, dtype):
    config = Config(interpret=True) if implementation.startswith("mosaic") else None
    attention = functools.partial(tree_attention, implementation=implementation, config=config)
    assert text(attention, dtype) == plain_text(dtype)
