# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour of tree speculation
#
# A language model writes one token per forward pass. On most hardware such a pass is spent on *moving the weights*:
# the arithmetic for one token keeps a fraction of the machine busy, and scoring twenty tokens in the same pass takes
# hardly longer than scoring one. Speculation uses that: something cheap *guesses* what comes next, and the large
# model, the **target**, *checks* all guesses in one pass. What it would not have said itself is thrown away, so the
# text is the target's own, and only the number of passes shrinks.
#
# This notebook does one such round by hand, three times: without a guess (*incremental* decoding), with one guessed
# sequence (*linear* speculation), and with a *tree* of guesses. You need to know what a transformer and its causal
# mask are, and nothing about speculation. The models ship with this repository: a target of 8 million parameters and
# a small draft model (**SSM**, small speculative model) of one million, both trained on Python code. They are small
# enough for two CPU cores, and no wiser than their size.

# %%
# %matplotlib inline
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import specjax as sj
from experiments import drawings
from experiments.config import REPOSITORY
from specjax.types import TreeMask

zoo = REPOSITORY / "experiments/zoo"
target, ssm = sj.load_model(zoo / "target"), sj.load_model(zoo / "ssm_a")
tokenizer = sj.load_tokenizer(zoo / "target")

prompt = tokenizer.encode("def fib(n):\n    if n < 2:\n        return n").ids
words = functools.partial(drawings.written, tokenizer)
" ".join(words(prompt))


# %% [markdown]
# ## Everything is a tree
#
# All three kinds of decoding need one thing from a model: *what would you say next, behind each of these nodes?* A
# node is a token with a parent; following the parents up to the root, which is the last token of the text, spells one
# possible continuation. So a tree of nodes is a bundle of continuations that share their beginnings.
#
# A model scores all nodes of a tree in **one pass** if each sees the text and *its own ancestors*, and nothing else:
# not its siblings, which are other guesses for the same position. That is a causal mask with the branches taken
# apart. A node's position is the text's length plus its depth, since that is where its token would stand.
#
# The function below does that with nothing but the model's forward. To keep it short it has no KV cache and feeds the
# whole text each time; `sj.generate` keeps one, of course.

# %%
ROOM = 96  # rows of one pass, so that every call has one shape and compiles once


@functools.partial(jax.jit, static_argnums=0)
def forward(model_forward, params, cache, tokens, positions, sees):
    mask = TreeMask(prefix_lengths=jnp.zeros(1, jnp.int32), tree_mask=sees[None])
    return model_forward(params, tokens[None], positions[None], mask, cache).logits[0]


def score(model, text, nodes, parents):
    """Logits [nodes, V] behind every node of a tree whose root, node 0, is the last token of the text."""
    before, count = len(text) - 1, len(nodes)
    # The text is a chain and the tree hangs on it. Spare rows at the end see only themselves.
    above = [*range(-1, before - 1), *(before - 1 if parent < 0 else before + parent for parent in parents)]
    sees = sj.ancestor_mask(jnp.array([*above, *[-1] * (ROOM - len(above))]))
    tokens = jnp.array([*text[:-1], *nodes, *[0] * (ROOM - len(above))])
    positions = jnp.sum(sees, axis=1) - 1  # as many as there are ancestors
    logits = forward(model.forward, model.params, model.init_cache(1, 0), tokens, positions, sees)
    return np.asarray(logits[before : before + count])


# %% [markdown]
# ## Incremental: a tree of one node
#
# Without guesses the tree is its root. The target says what comes behind it, that token is the next root, and so on:
# one pass, one token. Decoding is *greedy* in this notebook until the end, so a model always says its likeliest
# token.

# %%
text = list(prompt)
for _ in range(5):
    logits = score(target, text, nodes=[text[-1]], parents=[-1])
    text.append(int(np.argmax(logits[0])))

truth = text[len(prompt) :]
print("five passes, five tokens:", *words(truth))

# %% [markdown]
# ## Linear: a chain
#
# The SSM is a ninth of the target's size and has learned to imitate it. It guesses four tokens, one after the other,
# each time its likeliest. Then the target scores the chain in a single pass.
#
# *Verification* walks down from the root. At each node the target's own choice is known from that pass. If it is the
# child, the walk goes on there: the guess was **accepted**. If not, the walk ends, but the target's choice is still a
# token that it has said, so it is emitted too. A round therefore emits between one token (nothing was right) and
# depth + 1 (everything was, and the last choice, the **bonus token**, came free).


# %%
def draft(text, schedule):
    """The SSM's tree for an expansion schedule: <3, 2> is its 3 likeliest tokens, and behind each of them 2 more."""
    nodes, parents, level = [text[-1]], [-1], [0]
    for width in schedule:
        logits = score(ssm, text, nodes, parents)
        children = []
        for node in level:
            for token in np.argsort(-logits[node], kind="stable")[:width]:
                children.append(len(nodes))
                nodes.append(int(token))
                parents.append(node)
        level = children
    return nodes, parents


def verify(logits, nodes, parents):
    """The accepted nodes, root first, and the emitted tokens: the accepted ones, then the target's own next."""
    path, emitted = [0], []
    while True:
        choice = int(np.argmax(logits[path[-1]]))
        emitted.append(choice)
        child = [at for at, parent in enumerate(parents) if parent == path[-1] and nodes[at] == choice]
        if not child:
            return path, emitted
        path += child


def show(nodes, parents, path):
    """A table of the tree for the drawings, each branch as a whole."""
    above = lambda at: (*above(parents[at]), at) if at >= 0 else ()
    ways = sorted(above(at) for at in range(len(nodes)))  # in this order a node stands before all that is below it
    rows = {way[-1]: row for row, way in enumerate(ways)}
    return pd.DataFrame(
        {
            "slot": list(rows.values()),
            "parent": [rows.get(parents[at], -1) for at in rows],
            "depth": [len(way) - 1 for way in ways],
            "label": words(nodes[at] for at in rows),
            "accepted": [at in path for at in rows],
        }
    )


nodes, parents = draft(prompt, (1, 1, 1, 1))
path, emitted = verify(score(target, prompt, nodes, parents), nodes, parents)
assert path == [0] and emitted == truth[:1]
print(f"one pass, {len(emitted)} token{'s' * (len(emitted) > 1)}:", *words(emitted))
drawings.tree(show(nodes, parents, path))

# %% [markdown]
# Blue and bold is what was accepted. The root always is, and here it stands alone: the SSM's first guess is not what
# the target says, so all that hangs on it is lost, however good. One wrong token ends a chain.
#
# ## A tree
#
# The target's choice often *is* among the SSM's favourites, in second or third place. So let the SSM hedge: three
# guesses for the next token, two behind each of these, one behind each of those, and so on. In the literature's
# notation this is the **expansion schedule** <3,2,1,1> (SpecInfer, section 3.1): 21 guesses. They cost the SSM four
# passes, as the chain did, and the target one.

# %%
nodes, parents = draft(prompt, (3, 2, 1, 1))
path, emitted = verify(score(target, prompt, nodes, parents), nodes, parents)
print(f"one pass, {len(emitted)} tokens:", *words(emitted))
tree = show(nodes, parents, path)
drawings.tree(tree)

# %% [markdown]
# Twice the target took the SSM's second choice, and the walk went all the way down. Five tokens for one pass, and
# they are the five that incremental decoding took five passes for:

# %%
siblings = lambda at: [other for other, parent in enumerate(parents) if parent == parents[at]]
assert [siblings(at).index(at) for at in path[1:]] == [1, 1, 0, 0]  # places among the SSM's choices
assert emitted == truth

# %% [markdown]
# ## The mask
#
# How can one pass score six continuations that contradict each other? By what each node may see. Below, a row is a
# node that looks and a dark cell is what it sees: the whole committed text (hatched), its ancestors, and itself. On a
# chain this would be the familiar causal triangle. In a tree each branch has a triangle of its own, and what branches
# share, their common ancestors, is computed once. SpecInfer calls this the topology-aware causal mask (section 4.2).

# %%
drawings.mask(tree)

# %% [markdown]
# ## The same round, three ways
#
# The larger the tree, the more of the target's text it holds. What that is worth depends on what a pass of so many
# rows costs, and what the SSM's passes cost: the notebook *Analysing a sweep* is about that.

# %%
rounds = []
for name, schedule in (("incremental", ()), ("linear <1,1,1,1>", (1, 1, 1, 1)), ("tree <3,2,1,1>", (3, 2, 1, 1))):
    nodes, parents = draft(prompt, schedule)
    path, emitted = verify(score(target, prompt, nodes, parents), nodes, parents)
    assert emitted == truth[: len(emitted)]  # whatever was guessed, the target's own words
    rounds.append(
        {
            "method": name,
            "guesses": len(nodes) - 1,
            "accepted": len(path) - 1,
            "emitted in one pass": len(emitted),
            "text": " ".join(words(emitted)),
        }
    )
pd.DataFrame(rounds).set_index("method")

# %% [markdown]
# ## A whole text
#
# Rounds follow one another: the last emitted token is the next root. `sj.generate` does what was done by hand above,
# in one compiled loop: drafting, scoring under the mask, the walk, and keeping the accepted rows in the KV caches of
# both models. It counts *verify steps*, passes of the target, and *tokens per step* is the ratio that speculation is
# about. The first token comes from prefill, the pass that reads the prompt, and counts in neither.

# %%
plain = sj.generate(target, [prompt], max_new_tokens=40, eos_ids=())
result = sj.generate(target, [prompt], drafts=[ssm], tree=(3, 2, 1, 1), max_new_tokens=40, eos_ids=())
assert result.tokens == plain.tokens and result.tokens[0][:5] == truth

print(tokenizer.decode(prompt + result.tokens[0]))
assert np.isclose(result.stats.tokens_per_step, (40 - 1) / result.stats.verify_steps)
print(f"\n{plain.stats.verify_steps} passes of the target without speculation, {result.stats.verify_steps} with:")
print("accepted in each round:", *(item.accepted for item in result.rounds[0]))
print(f"tokens per step: {result.stats.tokens_per_step:.2f}")

# %% [markdown]
# ## And at a temperature?
#
# Then the target has no *choice* but a distribution, and to accept a guess only because it is likely would change
# what the model says. The simplest exact answer: *sample* from the target at each node of the walk, and go on if the
# sample happens to be a child. The guesses have no part in the text, only in how far a pass gets. specjax takes the
# noise of a sample from the request's seed and the token's position, so even the sampled text is the one that
# incremental decoding writes with that seed:

# %%
warm = sj.Warp(temperature=0.8, top_p=0.95)
alone = sj.generate(target, [prompt], warp=warm, seeds=7, max_new_tokens=40, eos_ids=())
beside = sj.generate(
    target, [prompt], drafts=[ssm], tree=(3, 2, 1, 1), warp=warm, seeds=7, max_new_tokens=40, eos_ids=()
)
assert beside.tokens == alone.tokens
print(tokenizer.decode(beside.tokens[0]))
print(f"\ntokens per step: {beside.stats.tokens_per_step:.2f}")

# %% [markdown]
# Cleverer rules accept more often by comparing what the target and the SSM think of a guess, and are exact as well,
# if the guesses were drawn the way the rule assumes. Which rule is exact for which draws, and how one finds out, is
# the subject of the *Exactness lab*.
