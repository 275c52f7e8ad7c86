# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exactness lab
#
# Speculative sampling promises that the text has the target's distribution, whatever was drafted. A rule that breaks
# the promise does not crash and does not write nonsense. It writes text that is a little too much like the draft
# model, and no amount of reading tells. Sampling many texts and comparing histograms is slow and sees only coarse
# faults.
#
# specjax checks the promise by *enumeration* instead: with a vocabulary of a few tokens, every outcome of the draws
# can be summed in double precision, and the emitted token either has the target's law to the last digits or it has
# not. This notebook does that with a few rules, catches a biased one, and asks how close the good ones come to the
# optimum.

# %%
# %matplotlib inline
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import specjax as sj
from specjax import exact

p = np.array([0.5, 0.3, 0.2, 0.0])  # what the target says of four tokens
q = np.array([0.1, 0.2, 0.3, 0.4])  # what the draft model says

# %% [markdown]
# ## The law of an emitted token
#
# At a node some tokens $x_1, .., x_k$ have been drawn from the draft's $q$. A *node rule* looks at the target's $p$,
# at $q$ and at the draws, and gives the law of the token that is emitted there, $e(y \mid x_1, .., x_k)$. If that
# token is one of the draws, the walk goes on below it. The rule is **exact** if the draws leave no trace on average:
#
# $$\sum_{x_1, .., x_k} \Pr(x_1, .., x_k)\; e(y \mid x_1, .., x_k) = p(y) \quad \text{for every } y.$$
#
# The sum is over the *proposal law* $\Pr$, the way in which the draws were made, which is as much a part of the claim
# as the rule. `emitted_law` is the left side. Multi-step speculative sampling, SpecInfer's rule, with two independent
# draws:

# %%
exact.emitted_law("multi_step", p, q, num_draws=2, law="iid")

# %% [markdown]
# That is $p$. The same rule on *the two likeliest tokens* of the draft, which is what most people's trees are made
# of:

# %%
exact.emitted_law("multi_step", p, q, num_draws=2, law="deterministic")

# %% [markdown]
# Token 0, always, though the target wants it half of the time. The draws were 3 and 2. The rule tests token 3,
# refuses it, since $p$ gives it nothing, and goes on with the residual, which makes up for all the times that
# *another* token would have been drawn and accepted. But none ever is. After token 2 has gone the same way, all that
# is left is token 0. Nothing is wrong with the rule, and nothing with the draws. They do not belong together.
#
# ## Which goes with which
#
# A fair test takes many random problems, not one. Below is the worst *total variation* between the emitted law and
# $p$ over 30 of them, that is the largest probability of any event that the rule gets wrong. Numbers at rounding
# level are zero; the others are not small.

# %%
rng = np.random.default_rng(0)
problems = rng.dirichlet([0.4] * 4, (30, 2))
rules = ("naive_sampling", "naive_tree", "multi_step", "without_replacement", "spectr")
laws = ("iid", "without_replacement", "deterministic")


def worst_variation(rule, law):
    """Over the problems, two draws each."""
    laws_of = [exact.emitted_law(rule, p, q, num_draws=2, law=law) for p, q in problems]
    return max(sj.testing.total_variation(emitted, p) for emitted, (p, q) in zip(laws_of, problems))


measured = pd.DataFrame({law: {rule: worst_variation(rule, law) for rule in rules} for law in laws})
measured.style.format("{:.1e}").highlight_between(left=1e-12, color="#f4c7a8", props="font-weight: bold")

# %%
assert (measured.loc["naive_sampling"] < 1e-12).all() and (measured["iid"] < 1e-12).all()
assert measured.loc["multi_step", "deterministic"] > 0.1 and measured.loc["spectr", "without_replacement"] > 0.1

# %% [markdown]
# `naive_sampling` ignores the draws and is exact for everything. The rule `without_replacement` is exact for draws
# without replacement, and for independent ones too, of which nobody would have been sure without the sum.
# `sj.verify.table()` measures all rules and laws this way, and `sj.generate` refuses the pairs that fail:

# %%
toy = sj.testing.table_model(rng.normal(size=(4, 4)))
try:
    sj.generate(toy, [[0]], drafts=[toy], tree=(2, 2), draft_mode="top_k", verifier="multi_step")
except ValueError as error:
    print(error)

# %% [markdown]
# ## What bias looks like
#
# Here is a rule with a plausible mistake. Speculative sampling accepts a draw $x$ with probability $\min(1,
# p(x)/q(x))$, and where it refuses, the token comes from the *residual*, $(p - q)_+$ made to sum to one. Whoever
# forgets the residual and samples from $p$ itself gets a rule that looks right and reads right.

# %%


def forgetful(p, q, draws):
    """Accept the first draw as one should, and otherwise sample from p instead of the residual."""
    token = draws.tokens[0]
    accept = jnp.where(q[0, token] > 0, jnp.minimum(1, p[token] / q[0, token]), 0)
    return ((1 - accept) * p).at[token].add(accept)


emitted = exact.emitted_law(forgetful, p, q, num_draws=1, law="iid")
figure = Figure(figsize=(5, 2.4), layout="constrained")
axes = figure.subplots()
for shift, (name, values, color, hatch) in enumerate(
    (("draft q", q, "#bbbbbb", ""), ("target p", p, "#0072B2", ""), ("emitted", emitted, "#D55E00", "////"))
):
    axes.bar(np.arange(4) + 0.27 * (shift - 1), values, 0.25, color=color, hatch=hatch, edgecolor="white", label=name)
axes.set_xticks(range(4), [f"token {token}" for token in range(4)])
axes.set_ylabel("probability")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
figure

# %% [markdown]
# Half of the draws are refused. The residual would give eight tenths of those to token 0, of which the draft has too
# few, and nothing to token 2, whose accepted draws are all that it is due. Sampling from $p$ again gives token 0 a half
# of them and tokens 1 and 2 the rest: both are too frequent, and token 0 lost three tenths of its share.

# %%
assert np.allclose(emitted, [0.35, 0.35, 0.3, 0])

# %% [markdown]
# `check_verifier` tries a rule on random, sparse and degenerate problems and reports the first on which it
# fails, with the numbers to compute it again by hand:

# %%
try:
    sj.testing.check_verifier(forgetful, "iid", num_draws=[1])
except ValueError as error:
    print(error)

# %% [markdown]
# ## How good can a rule be?
#
# Exact rules differ in how often the emitted token is one of the draws, and the walk goes on. No exact rule can
# exceed (SpecTr, Sun et al. 2023)
#
# $$1 + \min_{H} \big[\, p(H) - \Pr(\text{all draws lie in } H) \,\big],$$
#
# the minimum being over sets $H$ of tokens: a draw outside of a set that the target wants seldom but the draft nearly
# always must come about often enough. `optimal_acceptance` computes the bound, `expected_acceptance` what a rule
# reaches.

# %%
p, q = rng.dirichlet([1.0] * 5), rng.dirichlet([1.0] * 5)
ordered = ("naive_sampling", "naive_tree", "multi_step", "spectr")
acceptance = pd.DataFrame(
    {
        f"{draws} draws": {
            **{rule: exact.expected_acceptance(rule, p, q, num_draws=draws, law="iid") for rule in ordered},
            "bound": exact.optimal_acceptance(p, q, num_draws=draws, law="iid"),
        }
        for draws in (1, 2, 3)
    }
).astype(float)
acceptance.round(4)

# %% [markdown]
# With one draw all but naive sampling are the same rule, and it is the optimum. With more they part, here in this
# order, which is no theorem; that none exceeds the bound is one.

# %%
assert (acceptance.diff().iloc[1:] > -1e-9).all().all()
assert np.allclose(
    acceptance.loc[["naive_tree", "multi_step", "spectr"], "1 draws"], acceptance.loc["bound", "1 draws"]
)

# %% [markdown]
# ## Whole trees
#
# *Path rules* decide on a path at a time instead of a node at a time, so their law is that of all tokens of a round
# together. `joint_law` sums it over every tree that can be drafted and every way the verifier can go, and
# `block_efficiency` is the expected number of tokens per round. The models here are tables: the law of the first
# token, of the second behind each first, and so on. The example has a chain of two guesses, and is the one with which
# Sun et al. (2024) introduce *block verification*.

# %%
target = [np.array([1 / 3, 2 / 3]), np.array([[1 / 3, 2 / 3]] * 2), np.array([[[1 / 3, 2 / 3]] * 2] * 2)]
draft = [np.array([2 / 3, 1 / 3]), np.array([[2 / 3, 1 / 3]] * 2)]
chain = dict(num_draws=[1, 1], law="iid")
verifiers = ("multi_step", "block", "traversal")
found = {name: exact.block_efficiency(name, target, draft, **chain) - 1 for name in verifiers}
found["bound"] = exact.block_efficiency_bound(target, draft, **chain) - 1
pd.Series(found, name="accepted tokens a round").to_frame()

# %% [markdown]
# Testing token by token accepts 10/9 of the two guesses, deciding on the block accepts 11/9. Both leave the law of
# the text as it is:

# %%
truth = np.einsum("a,ab,abc->abc", *target)
for name in verifiers:
    assert sj.testing.total_variation(exact.joint_law(name, target, draft, **chain), truth) < 1e-12
assert np.isclose(found["multi_step"], 10 / 9) and np.isclose(found["block"], 11 / 9)
