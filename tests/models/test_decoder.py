"""The decoder's forward: tree passes, the cache, requested rows, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.models import init_model
from specjax.models.product import product
from specjax.types import Model, TreeMask
from tests.models import directories, numpy_llama

CONFIG = directories.TINY
PROMPT = [7, 3, 50, 11, 3, 29]
CAPACITY = 16
# The tree of schedule (3, 2, 2), breadth-first and depth-first: parents and tokens by slot.
BREADTH = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, *(slot for slot in range(4, 10) for _ in range(2))]
DEPTH = [
    -1,
    *(parent for child in (1, 8, 15) for parent in (0, child, child + 1, child + 1, child, child + 4, child + 4)),
]


@functools.cache
def model(attention: str | None = None) -> Model:
    """Weights large enough that every token and position moves the logits."""
    made = init_model(CONFIG, jax.random.key(0), attention=attention)
    return made._replace(params=jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim > 1 else leaf, made.params))


@functools.partial(jax.jit, static_argnums=0)
def run(forward, params, tokens, positions, mask, cache, rows=None):
    return forward(params, tokens, positions, mask, cache, rows=rows)


def hugging_face_tensors(params) -> dict[str, np.ndarray]:
    """The parameters by their Hugging Face names, written out by hand."""
    made = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"]["scale"],
        "lm_head.weight": params["lm_head"]["weight"][...],
    }
    for i in range(CONFIG.num_layers):
        layer, at = params["layers"][i], f"model.layers.{i}"
        made[f"{at}.input_layernorm.weight"] = layer["input_layernorm"]["scale"]
        made[f"{at}.post_attention_layernorm.weight"] = layer["post_attention_layernorm"]["scale"]
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            for name in names:
                made[f"{at}.{part}.{name}_proj.weight"] = layer[part][f"{name}_proj"]["weight"][...]
    return {name: np.asarray(value[...]) for name, value in made.items()}


def reference(text) -> np.ndarray:
    """[N, V] by the NumPy forward."""
    return numpy_llama.logits(hugging_face_tensors(model().params), text, layers=2, heads=4, kv_heads=2, head_dim=8)


def depths_of(parents) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def path_of(parents, slot) -> list[int]:
    return [*path_of(parents, parents[slot]), slot] if slot >= 0 else []


def prefilled(target: Model, prompts, capacity=CAPACITY):
    """A cache of ragged prompts, each fed as a chain."""
    longest = max(map(len, prompts))
    tokens = jnp.asarray([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(longest), tokens.shape)
    mask = TreeMask(jnp.zeros(len(prompts), jnp.int32), jnp.tile(jnp.tri(longest, dtype=bool), (len(prompts), 1, 1)))
    out = run(target.forward, target.params, tokens, positions, mask, target.init_cache(len(prompts), capacity))
    return out.cache.commit(positions, jnp.asarray(list(map(len, prompts)), jnp.int32))


def tree_pass(target: Model, cache, parents, tokens, lengths, rows=None):
    """One pass over the same tree in every row of the batch."""
    batch = len(lengths)
    lengths = jnp.asarray(lengths, jnp.int32)
    mask = TreeMask(lengths, jnp.tile(sj.ancestor_mask(jnp.asarray(parents)), (batch, 1, 1)))
    positions = lengths[:, None] + jnp.asarray(depths_of(parents), jnp.int32)
    fed = jnp.tile(jnp.asarray(tokens, jnp.int32), (batch, 1))
    return run(target.forward, target.params, fed, positions, mask, cache, rows)


@pytest.mark.parametrize("attention", ["reference", "xla"])
@pytest.mark.parametrize("parents", [BREADTH, DEPTH], ids=["breadth-first", "depth-first"])
def test_tree_pass_equals_fresh_forward_on_every_path(parents, attention):
    """B01: positions are depths and not slots, whatever the order of the slots."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, len(parents))
    target = model(attention)
    out = tree_pass(target, prefilled(target, [PROMPT]), parents, tokens, [len(PROMPT)])
    for slot in range(len(parents)):
        text = [*PROMPT, *tokens[path_of(parents, slot)]]
        np.testing.assert_allclose(out.logits[0, slot], reference(text)[-1], atol=1e-4, rtol=0)


def test_ragged_batch_equals_each_row_alone():
    """B24: prefix lengths are per row; rows past them may hold NaN and are never read."""
    prompts = [PROMPT, PROMPT[:2], PROMPT[:4]]
    cache = prefilled(model(), prompts)
    unread = (jnp.arange(CAPACITY) >= cache.lengths[:, None])[:, None, :, None]
    k, v = (tuple(jnp.where(unread, jnp.nan, buffer) for buffer in buffers) for buffers in (cache.k, cache.v))
    cache = dataclasses.replace(cache, k=k, v=v)
    out = tree_pass(model(), cache, [-1, 0, 0], [1, 2, 3], list(map(len, prompts)))
    for row, prompt in enumerate(prompts):
        for slot, path in enumerate([[1], [1, 2], [1, 3]]):
            np.testing.assert_allclose(out.logits[row, slot], reference([*prompt, *path])[-1], atol=1e-4, rtol=0)


def test_levels_fed_one_by_one_equal_the_whole_tree():
    """A draft level feeds only its own nodes and sees the earlier ones in the tree buffer (M > N)."""
    parents, tokens = [-1, 0, 0, 1, 2], np.array([1, 2, 3, 4, 5])
    cache = prefilled(model(), [PROMPT])
    whole = tree_pass(model(), cache, parents, tokens, [len(PROMPT)]).logits[0]
    ancestors = np.asarray(sj.ancestor_mask(jnp.asarray(parents)))
    depths = np.asarray(depths_of(parents))
    for level in (slice(0, 1), slice(1, 3), slice(3, 5)):
        mask = TreeMask(jnp.asarray([len(PROMPT)]), jnp.asarray(ancestors[None, level, : level.stop]))
        positions = jnp.asarray(len(PROMPT) + depths[level])[None]
        out = run(model().forward, model().params, jnp.asarray(tokens[level])[None], positions, mask, cache)
        cache = out.cache
        np.testing.assert_allclose(out.logits[0], whole[level], atol=1e-5, rtol=0)


def test_committed_path_equals_fresh_prefill():
    """The accepted path is gathered, not taken as the first rows."""
    parents, tokens = [-1, 0, 0, 1, 2], np.array([1, 2, 3, 4, 5])
    out = tree_pass(model(), prefilled(model(), [PROMPT]), parents, tokens, [len(PROMPT)])
    cache = out.cache.commit(jnp.asarray([[0, 2, 4]]), jnp.asarray([3]))
    fresh = prefilled(model(), [[*PROMPT, 1, 3, 5]])
    assert int(cache.lengths[0]) == int(fresh.lengths[0]) == 9
    for ours, theirs in zip((*cache.k, *cache.v), (*fresh.k, *fresh.v), strict=True):
        np.testing.assert_allclose(ours[:, :, :9], theirs[:, :, :9], atol=1e-5, rtol=0)


def test_only_the_requested_rows_have_logits():
    parents, tokens, lengths = [-1, 0, 0], [1, 2, 3], [6, 6]
    cache = prefilled(model(), [PROMPT, PROMPT])
    everything = tree_pass(model(), cache, parents, tokens, lengths)
    some = tree_pass(model(), cache, parents, tokens, lengths, rows=jnp.asarray([[2, 0], [1, 1]]))
    assert some.logits.shape == (2, 2, CONFIG.vocab_size)
    np.testing.assert_allclose(some.logits[0], everything.logits[0, [2, 0]], atol=1e-6)
    np.testing.assert_allclose(some.logits[1], everything.logits[1, [1, 1]], atol=1e-6)
    assert some.hidden.shape == (2, 3, CONFIG.hidden_size)
    head = np.asarray(model().params["lm_head"]["weight"][...])
    np.testing.assert_allclose(np.asarray(everything.hidden) @ head.T, everything.logits, atol=1e-5)


def test_functions_are_made_once_per_architecture():
    """B39: compiled code is reused by the identity of forward, so equal settings must give the same one."""
    first, second = init_model(CONFIG, jax.random.key(0)), init_model(CONFIG, jax.random.key(1))
    assert first.forward is second.forward
    assert first.init_cache is second.init_cache
    assert init_model(CONFIG, jax.random.key(0), attention="reference").forward is not first.forward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_holds_for_parameters_cache_and_logits(dtype):
    made = init_model(CONFIG, jax.random.key(0), dtype=dtype)
    cache = prefilled(made, [PROMPT])
    out = tree_pass(made, cache, [-1], [1], [len(PROMPT)])
    kinds = {leaf.dtype for leaf in jax.tree.leaves((made.params, cache.k, out.cache.v_tree, out.logits))}
    assert kinds == {jnp.dtype(dtype)}
    wide = init_model(CONFIG, jax.random.key(0))
    same = tree_pass(wide, prefilled(wide, [PROMPT]), [-1], [1], [len(PROMPT)]).logits
    np.testing.assert_allclose(out.logits.astype(jnp.float32), same, atol=1e-5 if dtype == "float32" else 2e-2)


def test_gradient_of_the_product_is_that_of_a_matrix_product():
    """The hand-written gradient against the derived one, for activations with any number of leading axes."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 4), (5, 4)))
    loss = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
    ours = jax.grad(lambda x, weight: (product(x, weight) * loss).sum(), argnums=(0, 1))(x, weight)
    derived = jax.grad(lambda x, weight: ((x @ weight.T) * loss).sum(), argnums=(0, 1))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, derived)


@pytest.mark.parametrize("leading", [(), (0,), (1,), (7,), (3, 0), (2, 3)], ids=str)
def test_product_is_a_matrix_products(leading):
    """Any number of rows, none too; alone and mapped over stacked weights."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(2, *leading, 6)), rng.normal(size=(2, 5, 6))
    x, weights = jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32)
    expected = np.einsum("s...i,soi->s...o", x, weights)
    np.testing.assert_allclose(jax.jit(product)(x[1], weights[1]), expected[1], atol=1e-5)
    np.testing.assert_allclose(jax.vmap(product)(x, weights), expected, atol=1e-5)


def test_product_of_mixed_dtypes_keeps_the_activations_dtype():
    x, weight = jnp.ones((3, 4)), jnp.full((5, 4), 1 + 2**-7, jnp.bfloat16)
    out, pull = jax.vjp(product, x, weight)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.full((3, 5), 4 * (1 + 2**-7), np.float32))
    assert [leaf.dtype for leaf in pull(out)] == [jnp.float32, jnp.bfloat16]
