# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bring your own
#
# A drafter and a verification rule written here, in the notebook, and proved before they are used. Neither needs a
# class to inherit from or a registry to sign: a drafter is a tuple of pure functions, a node rule is one function.

# %%
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.exact import expected_acceptance, optimal_acceptance
from specjax.types import Drafter, Draws
from specjax.verify import traverse

# %% [markdown]
# ## A drafter
#
# Ours is the oldest language model there is: a table of how often each token followed each other, counted in some
# text. It drafts a chain, drawing each token from the table's row of the token before. That costs nothing on any
# device.
#
# A drafter promises this (`specjax.types.Drafter` has the whole contract):
#
# - `init` makes a state from the prompts, `propose` a tree for every row, `commit` learns what was emitted. Every array
#   of the state has a leading batch axis, so that a row can be replaced while the others go on. Our table need not
#   remember anything: the root, the last committed token, is given to `propose`.
# - The tree says what was **drawn**, in which order and from which distribution `q`. That is what is verified, so a `q`
#   that is not what was drawn from biases the text.
# - Randomness comes from `keys.draft`, one key per row, which the loop has folded with the length of the text.
# - Row i's tree depends on row i alone.
#
# The tree is written for one row, and mapped over the batch.

# %%
DEPTH = 3


def one_tree(table, key, root, warp):
    """A chain of DEPTH tokens, each drawn from the table's row of the one before."""
    vocab_size = table.shape[0]
    tokens, rows = [root], []
    for level in range(DEPTH):
        q = warp(table[tokens[-1]][None])[0]  # the row's draft temperature, top-k and top-p
        rows.append(q)
        tokens.append(jax.random.categorical(jax.random.fold_in(key, level), jnp.log(q)).astype(jnp.int32))
    slots = jnp.arange(DEPTH + 1)
    drawn = jnp.array([*tokens[1:], 0])[:, None]  # [N, 1]: the draw at each node is the next token; the last has none
    return sj.TokenTree(
        tokens=jnp.array(tokens),
        parents=slots - 1,
        depths=slots,
        valid=jnp.ones(DEPTH + 1, bool),
        draw_tokens=drawn,
        draw_valid=(slots < DEPTH)[:, None],
        draw_source=jnp.zeros(1, jnp.int32),
        q=jnp.stack(rows).reshape(DEPTH, vocab_size),
        q_rows=jnp.where(slots < DEPTH, slots, -1)[:, None],
        laws=("iid",),
        max_depth=DEPTH,
    )


def init(table, tokens, lengths, hidden):
    return jnp.zeros((len(lengths), 0))  # nothing to remember


def propose(table, keys, state, roots, warp):
    return jax.vmap(one_tree, in_axes=(None, 0, 0, 0))(table, keys.draft, roots, warp), state


def commit(table, state, emission, hidden):
    return state


def bigram(table):
    """A drafter from a table of logits [V, V], row = the token before."""
    return Drafter(init, propose, commit, jnp.asarray(table), max_depth=DEPTH, laws=("iid",), vocab_size=len(table))


# %% [markdown]
# ## Proved
#
# `check_drafter` runs it beside a target whose logits depend on every token, position and mask bit, and checks each
# promise: well-formed trees, pure functions, independent rows, draws distributed as the law says, and texts that are
# incremental decoding's. It raises where one is broken and returns nothing where none is.

# %%
rng = np.random.default_rng(0)
target = sj.testing.context_model(0, vocab_size=12)
mine = bigram(rng.normal(size=(12, 12)))
sj.testing.check_drafter(mine, target)

# %% [markdown]
# A mistake that is easily made: to draw at a lower temperature, for better guesses, and hand out the probabilities of
# the old one. The text would be biased, the trees look perfect, and the check says so:


# %%
def propose_colder(table, keys, state, roots, warp):
    tree, state = propose(table * 2, keys, state, roots, warp)  # drawn from the sharper table ..
    honest, _ = propose(table, keys, state, roots, warp)
    return dataclasses.replace(tree, q=honest.q), state  # .. and said to be drawn from this one


try:
    sj.testing.check_drafter(mine._replace(propose=propose_colder), target)
except ValueError as error:
    print(error)
else:
    raise AssertionError("the mistake went unnoticed")

# %% [markdown]
# ## A node rule
#
# A node rule gets the target's `p` [V], the drafts' `q` [S, V], one row per source, and the node's ordered draws, and
# returns the law of the emitted token, which sums to 1. It does no sampling: the library draws the token from that
# law, and because it is a law and not a sample, it can be summed.
#
# Ours keeps *the draw that the target likes best in proportion*, the one with the largest $p/q$, and tests that one.
# A kept draw does not have the law $q$ any more: with k independent draws it is the favourite only if all the others
# are less liked. With $F(x)$ the probability that one draw is liked no more than $x$, and $F(x^-)$ that it is liked
# less, the kept draw has the law
#
# $$r(x) = F(x)^k - F(x^-)^k,$$
#
# and *against that* it can be accepted as in ordinary speculative sampling: with probability $\min(1, p/r)$, the
# residual being $(p - r)_+$.


# %%
def favourite(p, q, draws: Draws):
    """Keep the draw with the largest p / q, and test it against the law of what is kept. For i.i.d. draws."""
    q, count = q[0], draws.valid.sum()  # a leaf of the tree has no draws, and then the law is p
    order = jnp.argsort(jnp.where(q > 0, p / jnp.where(q > 0, q, 1), -1), stable=True)  # least liked first
    place = jnp.argsort(order)
    below = jnp.cumsum(q[order])[place]  # F(x)
    r = jnp.where(q > 0, below**count - (below - q) ** count, 0)
    kept = draws.tokens[jnp.argmax(jnp.where(draws.valid, place[draws.tokens], -1))]
    accept = jnp.where(r[kept] > 0, jnp.minimum(1, p[kept] / jnp.where(r[kept] > 0, r[kept], 1)), 0)
    rest = jnp.maximum(p - r, 0)
    total = rest.sum()
    residual = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)
    return ((1 - accept) * residual).at[kept].add(accept)


worst = sj.testing.check_verifier(favourite, "iid", num_draws=[1, 2, 3])
print(f"largest total variation from the target: {worst:.1e}")

# %% [markdown]
# Exact, to rounding. For draws without replacement it is not, since these have another law. The check gives the
# problem on which it saw that:

# %%
try:
    sj.testing.check_verifier(favourite, "without_replacement", num_draws=[2])
except ValueError as error:
    print(error)
else:
    raise AssertionError("the bias went unnoticed")

# %% [markdown]
# How good is it? Here it beats multi-step sampling and comes close to the bound for any exact rule. On the trees of the
# models that ship the two are level: what wins depends on how $p$ and $q$ differ.

# %%
for _ in range(3):
    p, q = rng.dirichlet([1.0] * 5, 2)
    rules = {"favourite": favourite, "multi_step": "multi_step"}
    line = {name: expected_acceptance(rule, p, q, num_draws=2, law="iid") for name, rule in rules.items()}
    line["bound"] = optimal_acceptance(p, q, num_draws=2, law="iid")
    print("  ".join(f"{name} {float(value):.3f}" for name, value in line.items()))

# %% [markdown]
# ## Together
#
# `traverse` makes a verifier of a node rule, and the third field says which draws it is exact for: the name of a law,
# as proved above. `sj.generate` holds it to that. The drafter brings its own tree, so there is none to be given.

# %%
verifier = sj.Verifier("favourite", traverse(favourite), frozenset({"iid"}))
result = sj.generate(target, [[1, 2, 3]], drafts=[mine], verifier=verifier, warp=sj.Warp(1.0), seeds=0)
print(f"{result.stats.tokens_per_step:.2f} tokens per step:", result.tokens[0][:16], "..")

try:
    sj.generate(target, [[1]], drafts=[target], tree=(2, 2), draft_mode="top_k", verifier=verifier, warp=sj.Warp(1.0))
except ValueError as error:
    print(error)

# %% [markdown]
# And greedily, as with any drafter and any exact rule, the text is the target's own:

# %%
greedy = functools.partial(sj.generate, target, [[1, 2, 3]], max_new_tokens=24)
assert greedy(drafts=[mine], verifier=verifier).tokens == greedy().tokens
