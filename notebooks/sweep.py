# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Analysing a sweep
#
# `python -m experiments.run CONFIG` decodes every cell of a sweep and leaves a directory with two files that matter:
# `run.json`, which says what was run and on what, and `records.jsonl`, a row per cell and prompt. The report it
# writes answers the usual questions. This notebook is for the others: a small sweep, its records in pandas, and then
# *replay*, which tells what thousands of other trees would have done.

# %%
# %matplotlib inline
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pandas as pd

import specjax as sj
from experiments import metrics, plots, prompts, search
from experiments.config import REPOSITORY

directory = pathlib.Path(tempfile.mkdtemp())
(directory / "sweep.toml").write_text("""
[run]
name = "sweep"
prompts = "humaneval"
num_prompts = 4
max_prompt_tokens = 96
max_new_tokens = 24
repeats = 1

[models]
target = "experiments/zoo/target"
drafts = ["experiments/zoo/ssm_a"]

[[sweep]]
[sweep.product]
run.batch_size = [1, 4]
decode.tree = [[1, 1, 1, 1], [3, 2, 1, 1]]
decode.drafts = [["ssm_a"]]

[[sweep]]
[sweep.product]
run.batch_size = [1, 4]
decode.tree = [[]]
""")
command = [sys.executable, "-m", "experiments.run", directory / "sweep.toml", "--out", directory / "run"]
said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
assert said.returncode == 0, said.stderr
print(said.stdout)

# %% [markdown]
# Four prompts make an example, not a result. The chain and the tree were both decoded one prompt at a time and four
# together.
#
# ## A record
#
# Settings have dotted names, `decode.tree` say, and what was measured has plain ones. Times are lists, one entry per
# timed pass. A batch's wall time is divided among its prompts.

# %%
records = pd.read_json(directory / "run/records.jsonl", lines=True)
columns = [
    "method",
    "run.batch_size",
    "name",
    "steps",
    "emitted",
    "drafted",
    "accepted",
    "emitted_per_round",
    "same_text",
]
records[columns].head(6)

# %% [markdown]
# Greedy decoding, as here, and naive sampling at a temperature write the very text that incremental decoding writes,
# or something is broken. (The other exact verifiers promise its law, not its letters.)

# %%
assert records.same_text.all()

# %% [markdown]
# ## Tokens per step
#
# Emitted tokens over verify steps, **total over total**. The mean of the prompts' own ratios is another number, one
# in which a prompt that took two steps counts as much as one that took forty.

# %%
totals = records.groupby(["method", "run.batch_size"], sort=False)[["emitted", "steps", "drafted", "accepted"]].sum()
totals["tokens_per_step"] = totals.emitted / totals.steps
totals["of drafted, accepted"] = totals.accepted / totals.drafted
totals.round(3)

# %% [markdown]
# `metrics.summarize` makes this table for reports, with quartiles over prompts, times and speed-ups. The number of
# steps does not depend on the batch: a row's text and rounds are its own, whoever is decoded beside it.

# %%
table = metrics.frame(records.to_dict("records"), list(dict.fromkeys(records.cell)))
summary = metrics.summarize(table)
assert np.allclose(summary.tokens_per_step, totals.tokens_per_step)
one, four = (totals.xs(batch, level="run.batch_size").steps for batch in (1, 4))
assert (one == four).all()

# %% [markdown]
# ## Acceptance by depth
#
# At depth d a round has *tried* its drafted tokens if it came as far as their parent. The share of those that were
# accepted says where a tree is worth its nodes. A chain asks whether the SSM's favourite is right; a node with three
# children whether the target's choice is among three.

# %%
plots.acceptance(summary[summary["run.batch_size"] == 1], metrics.acceptance_by_depth(table))

# %% [markdown]
# ## And by rank
#
# Records do not say how often the *third* favourite is right where it was not drafted. A **rank trace** does: it
# decodes the text once, and looks up where each of its tokens stands in the SSM's order. From it, how often the token
# of each rank is accepted at each depth, given that all before it were among the first four:

# %%
target, ssm = (sj.load_model(REPOSITORY / "experiments/zoo" / name) for name in ("target", "ssm_a"))
tokenizer = sj.load_tokenizer(REPOSITORY / "experiments/zoo/target")
texts = prompts.load("humaneval", num_prompts=8, max_tokens=96, tokenizer=tokenizer)
trace = sj.replay.rank_trace(target, [ssm], [list(text.tokens) for text in texts], max_new_tokens=24)
rates = sj.replay.calibrate(trace, depth=5, most_draws=4).rates
plots.ranks(pd.DataFrame([{"depth": d + 1, "rank": r + 1, "rate": rate} for (d, r), rate in np.ndenumerate(rates)]))

# %% [markdown]
# The first rank is right most of the time, and each further one adds less. That is why trees should be deep along the
# favourites and wide only near the root.
#
# ## Tokens per step against nodes
#
# At temperature 0 the trace decides every round of every static tree, so trees need not be decoded to be counted:
# this *replays* all expansion schedules of up to 24 nodes and compares them with chains, and with the trees that
# Sequoia's dynamic program builds from a table like the one above, only 12 deep. That table is of the very prompts on
# which its trees are replayed here, and the best of many schedules is chosen on them too, so both look a little better
# than they would on new ones.

# %%
schedules = list(search.schedules(25, 12))
optimum = sj.replay.optimal_trees(sj.replay.calibrate(trace, depth=12, most_draws=4).rates, 25)
kinds = {
    "optimal tree": [optimum.topology(size) for size in range(2, 26)],
    "schedule": schedules,
    "chain": [(1,) * length for length in range(1, 13)],
}
nodes_of = lambda tree: (tree if isinstance(tree, sj.Topology) else sj.Topology.from_schedule(tree)).shape.num_nodes - 1
trees = pd.DataFrame(
    [
        {
            "kind": kind,
            "nodes": nodes_of(tree),
            "tokens_per_step": value,
            "tree": str(tree) if kind != "optimal tree" else "",
        }
        for kind, group in kinds.items()
        for tree, value in zip(group, sj.replay.tokens_per_step(trace, group), strict=True)
    ]
)
print(f"{len(schedules)} schedules")
plots.sizes(trees)

# %% [markdown]
# The best schedules, and what the replay says of the two that were decoded above, on the prompts that both have seen:

# %%
first_four = trace._replace(
    tokens=trace.tokens[:4],
    lengths=trace.lengths[:4],
    ranks=trace.ranks[:, :4],
    near=trace.near[:, :4],
    target_near=trace.target_near[:4],
)
replayed = sj.replay.tokens_per_step(first_four, [(1, 1, 1, 1), (3, 2, 1, 1)])
decoded = summary[summary.ssms != ""].drop_duplicates("method").tokens_per_step
assert np.allclose(replayed, decoded)  # not an estimate
trees[trees.kind == "schedule"].nlargest(5, "tokens_per_step")

# %% [markdown]
# ## Speed against latency
#
# Tokens per step are not yet time. A step with a tree takes longer than one without, by how much depends on the
# machine and on how many requests share the pass. Whoever serves many wants tokens per second *of all*; whoever waits
# wants those of *one*. Larger batches trade one for the other, and speculation moves the frontier between them.

# %%
points = pd.DataFrame(
    {
        "method": summary.method,
        "batch": summary["run.batch_size"],
        "per_request": summary.tokens_per_second / summary["run.batch_size"],
        "total": summary.tokens_per_second,
    }
)
plots.frontier(points)

# %% [markdown]
# Numbers at the points are batch sizes. On two cores, where a pass is busy with a few rows already, trees and batches
# compete for the same arithmetic; on a GPU a pass of a few dozen rows takes as long as one of one. `experiments.tune`
# puts replay and measured latencies together and looks for the best tree on the machine at hand.
