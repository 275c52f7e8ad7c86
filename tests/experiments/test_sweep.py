"""What a config stands for: its cells, each once, and clear refusals of those that make no sense."""

import dataclasses

import numpy as np
import pytest

from experiments import config, sweep
from experiments.sweep import LOOKUP, Block, Decode, Dynamic, Experiment, Lookup, Models, Run
from specjax.testing import table_model
from specjax.tree import Topology

ONE = ("a",)


def experiment(*blocks: Block, **decode) -> Experiment:
    return Experiment(Run("test"), Models("zoo/target", ("zoo/a", "zoo/b")), Decode(**decode), blocks)


def settings(cells) -> list[tuple]:
    return [(cell.config.decode.tree, cell.config.decode.drafts, cell.config.decode.temperature) for cell in cells]


def test_product_crosses_and_zip_advances_together():
    block = Block(
        product={"decode.temperature": [0.0, 1.0]},
        zip={"decode.tree": [[2], [1, 1]], "decode.drafts": [["a"], ["a", "b"]]},
    )
    assert settings(sweep.cells(experiment(block))) == [
        ((2,), ("a",), 0.0),
        ((1, 1), ("a", "b"), 0.0),
        ((2,), ("a",), 1.0),
        ((1, 1), ("a", "b"), 1.0),
    ]


def test_unquoted_dotted_keys_are_the_same_keys():
    quoted = Block(product={"decode.tree": [[2], [3]], "run.seed": [0, 1]})
    nested = Block(product={"decode": {"tree": [[2], [3]]}, "run": {"seed": [0, 1]}})
    found = [sweep.cells(_two(block)) for block in (quoted, nested)]
    assert found[0] == found[1] and len(found[0]) == 4


def _two(block: Block) -> Experiment:
    return experiment(block, drafts=("a", "b"))


def test_blocks_follow_one_another_and_equal_cells_are_one():
    block = Block(product={"decode.tree": [[2], [3]]})
    again = Block(product={"decode.tree": [[3], [4]]})
    assert [
        cell.config.decode.tree for cell in sweep.cells(dataclasses.replace(_two(block), sweep=(block, again)))
    ] == [
        (2,),
        (3,),
        (4,),
    ]


def test_incremental_cells_are_one_whatever_they_leave_unused():
    block = Block(product={"decode.verifier": ["naive_sampling", "multi_step"], "decode.temperature": [0.0]})
    base = Experiment(Run("test"), Models("zoo/target"), Decode(draft_mode="iid"), (block,))
    (cell,) = sweep.cells(base)
    assert cell.config.decode.incremental and cell.config == sweep.baseline(cell.config)


def test_a_baseline_differs_in_the_method_only():
    cell = sweep.cells(experiment(tree=(2, 1), drafts=("a", "b"), temperature=0.7, top_k=5, verifier="multi_step"))[0]
    base = sweep.baseline(cell.config)
    assert base.decode == Decode(temperature=0.7, top_k=5)
    assert base.run == cell.config.run and base.models.target == cell.config.models.target


def test_cell_ids_change_with_every_setting_that_matters():
    base = experiment(tree=(2, 1), drafts=("a", "b"))
    others = [
        dataclasses.replace(base, decode=dataclasses.replace(base.decode, **change))
        for change in (
            {"tree": (2, 2)},
            {"drafts": ("b", "a")},
            {"temperature": 1.0},
            {"capacity": 3},
            {"verifier": "x"},
            {"top_p": 0.5},
        )
    ] + [
        dataclasses.replace(base, run=dataclasses.replace(base.run, **change))
        for change in ({"seed": 1}, {"batch_size": 2}, {"max_new_tokens": 8}, {"padded": True})
    ]
    assert len({sweep.cells(item)[0].id for item in [base, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("block", "decode", "words"),
    [
        (
            Block(product={"decode.tre": [[1]]}),
            {},
            ["sweep at decode.tre=[1]: decode.tre: unknown key", "decode.tree?"],
        ),
        (
            Block(product={"decode.tree": [[1], [0]]}),
            {"drafts": ("a", "b")},
            ["at decode.tree=[0]: decode.tree: ", "entry 0 is 0"],
        ),
        (Block(product={"decode.tree": [[1], "x"]}), {"drafts": ("a", "b")}, ["decode.tree: expected a list"]),
        (
            Block(product={"decode.tree": [[[0], [1, 0]]]}),
            {"drafts": ("a", "b")},
            ["decode.tree: path 1, [1, 0], lacks its parent [1]"],
        ),
        (Block(product={"decode.tree": [1, 2]}), {"drafts": ("a", "b")}, ["decode.tree: expected a list", "got 1"]),
        (Block(product={"decode.temperature": 1.0}), {}, ["sweep.product.decode.temperature: expected a list"]),
        (Block(product={"decode.temperature": []}), {}, ["expected a list with at least one value"]),
        (Block(product={"decode.top_p": [0.0]}), {}, ["decode.top_p: expected > 0"]),
        (Block(product={"run.name": ["a b"]}), {}, ["run.name: expected letters"]),
        (Block(product={"decode.temperature": [-1.0]}), {}, ["decode.temperature: expected >= 0.0, got -1.0"]),
        (Block(product={"temperature": [1.0]}), {}, ["temperature: not a setting"]),
        (Block(product={"sweep.product": [1.0]}), {}, ["sweep.product: not a setting"]),
        (Block(zip={"run.seed": [1], "run.repeats": [1, 2]}), {}, ["lists of one length expected"]),
        (Block(product={"run.seed": [1]}, zip={"run.seed": [1]}), {}, ["run.seed is in both product and zip"]),
        (Block(), {}, ["sweep: empty"]),
        (
            Block(product={"run.seed": [0, 1, 2]}),
            {"tree": (2,)},
            ["a tree needs a draft", "(a, b)", "at 2 more points"],
        ),
        (Block(product={"run.seed": [0]}), {"drafts": ONE}, ["drafts need a tree to fill"]),
        (
            Block(product={"run.seed": [0]}),
            {"drafts": ("c",), "tree": (1,)},
            ["'c' is neither among models.drafts (a, b) nor 'prompt_lookup'"],
        ),
        (
            Block(product={"decode.dynamic.nodes": [99]}),
            {"drafts": ("a", "b"), "builder": "grow", "dynamic": Dynamic(2, 3, 4)},
            ["at decode.dynamic.nodes=99: decode.dynamic: grow: 99 nodes are more than the 10"],
        ),
        (Block(product={"decode.builder": ["grwo"]}), {}, ["decode.builder: expected one of", "did you mean 'grow'?"]),
        (Block(product={"decode.lookup.min_match": [9]}), {}, ["decode.lookup.max_match: expected >= min_match"]),
        (
            Block(product={"decode.capacity": [9]}),
            {"drafts": ("a", "b"), "tree": (1,), "combine": "first"},
            ["decode.capacity: cuts trees that are merged"],
        ),
        (Block(product={"decode.lookup.branches": [0]}), {}, ["decode.lookup.branches: expected >= 1, got 0"]),
        (Block(product={"decode.lookup.branch": [1]}), {}, ["unknown key; did you mean decode.lookup.branches?"]),
        (Block(product={"run.seed": [0]}), {"drafts": ("a", "a"), "tree": (1,)}, ["names a draft twice"]),
        (
            Block(product={"run.seed": [0]}),
            {"drafts": ("a", "b"), "tree": (1,), "temperature": -1.0},
            ["decode.temperature"],
        ),
        (Block(product={"run.seed": [0]}), {"drafts": ONE, "tree": (1,)}, ["no cell uses 'zoo/b'", "'b'"]),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(block, decode, words):
    with pytest.raises(config.ConfigError) as error:
        sweep.cells(experiment(block, **decode))
    for word in words:
        assert word in str(error.value)


def test_a_directory_may_not_have_the_name_of_a_source():
    base = Experiment(Run("test"), Models("t", ("zoo/prompt_lookup",)), Decode(tree=(1,), drafts=(LOOKUP,)))
    with pytest.raises(config.ConfigError, match="names a source that needs no directory"):
        sweep.cells(base)


def test_two_drafts_of_one_name_are_refused():
    base = Experiment(Run("test"), Models("t", ("zoo/a", "other/a")), Decode(tree=(1,), drafts=("a",)))
    with pytest.raises(config.ConfigError, match="directory names must differ"):
        sweep.cells(base)


def test_labels():
    label = lambda *drafts, **settings: sweep.label(Decode(drafts=drafts, **settings))
    assert label() == "incremental"
    assert label("a", "b", tree=(3, 2, 1, 1)) == "<3,2,1,1>"
    assert label("a", "b", tree=(3, 2, 1, 1), capacity=9) == "<3,2,1,1> to 9"
    assert label("a", tree=((0,), (1,), (0, 0))) == "paths(3)"
    assert label("a", builder="grow", dynamic=Dynamic(4, 3, 9)) == "grow(4x3:9)"
    assert label(LOOKUP) == "copy(3x7)"
    assert label(LOOKUP, "a", "b", tree=(2, 1)) == "copy(3x7) + <2,1>"
    assert label("a", LOOKUP, tree=(2, 1), combine="first") == "<2,1> or copy(3x7)"


def test_settings_that_a_cell_does_not_use_do_not_change_its_id():
    """Of a static tree, a dynamic one, and a lookup alone: whatever else is set, the cell is the same."""
    static = {"drafts": ("a", "b"), "tree": (2, 1)}
    dynamic = {"drafts": ("a", "b"), "builder": "expand_and_rerank"}
    alone = {"drafts": (LOOKUP,)}
    other_size, other_lookup = Dynamic(2, 2, 3), Lookup(branches=1)
    for used, unused in (
        (static, [{"dynamic": other_size}, {"lookup": other_lookup}]),
        (dynamic, [{"tree": (3,)}, {"lookup": other_lookup}]),
        (
            alone,
            [
                {"tree": (3,)},
                {"dynamic": other_size},
                {"builder": "grow"},
                {"draft_mode": "iid"},
                {"combine": "first"},
            ],
        ),
    ):
        base = Experiment(Run("test"), Models("t", () if used is alone else ("zoo/a", "zoo/b")), Decode(**used))
        cells = [dataclasses.replace(base, decode=Decode(**used, **extra)) for extra in unused]
        assert {sweep.cells(cell)[0].id for cell in cells} == {sweep.cells(base)[0].id}


def test_settings_that_a_cell_uses_are_swept():
    block = Block(
        product={"decode.builder": ["grow", "expand_and_rerank"], "decode.dynamic.nodes": [5, 6]},
        zip={"decode.drafts": [["a", "b"], ["a", LOOKUP]], "decode.lookup.length": [7, 4]},
    )
    found = sweep.cells(experiment(block, tree=(1,), draft_mode="iid"))
    assert len(found) == 8 == len({cell.id for cell in found})
    first, second = found[:2]
    assert (first.config.decode.dynamic.nodes, first.config.decode.tree) == (5, ())
    assert (second.config.decode.lookup.length, second.config.models.drafts) == (4, ("zoo/a",))
    assert config.from_dict(Experiment, config.to_dict(first.config)) == first.config


def test_builders_are_the_library_s():
    assert sweep.builder(Decode()) is sweep.builder(Decode(drafts=(LOOKUP,), tree=(2,))) is None
    static = sweep.builder(Decode(drafts=("a",), tree=(2, 1)))
    assert isinstance(static, Topology) and static.shape.num_nodes == 5
    dynamic = sweep.builder(Decode(drafts=("a",), builder="grow", dynamic=Dynamic(2, 3, 4)))
    drafter = dynamic(table_model(np.zeros(8)), "iid")
    assert (drafter.max_depth, drafter.laws) == (3, ("grown iid",))


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("ensemble", {"<2,1,1,1>", "<2,1,1,1> to 9", "<2,1,1,1> to 17"}),
        ("medusa", {"<3,2,1,1>", "paths(21)"}),
        ("eagle", {"<3,2,1,1>", "paths(10)"}),
        ("prompt_lookup", {"copy(1x3)", "copy(1x7)", "copy(3x3)", "copy(3x7)", "<2,1,1,1>", "<2,1,1,1> + copy(3x7)"}),
        ("grow", {"<3,2,1,1>", "grow(6x5:21)"}),
        (
            "sources",
            {
                "<3,2,1,1>",
                "<1,1,3,1,1,1,1,1>",
                "paths(7)",
                "expand_and_rerank(6x5:21)",
                "grow(6x5:21)",
                "copy(3x7)",
                "paths(7) + copy(2x7)",
            },
        ),
        (
            "expand_and_rerank",
            {"<3,2,1,1>", *(f"expand_and_rerank({w}x{d}:{n})" for w in (3, 6) for d in (4, 6) for n in (10, 21))},
        ),
    ],
)
def test_every_source_has_a_config(name, methods):
    cells = sweep.cells(config.load(Experiment, config.REPOSITORY / "configs" / f"{name}.toml"))
    assert {sweep.label(cell.config.decode) for cell in cells} == methods


def test_the_quickstart_is_valid():
    cells = sweep.cells(config.load(Experiment, config.REPOSITORY / "configs/quickstart.toml"))
    text = {(cell.config.decode.temperature, sweep.label(cell.config.decode)) for cell in cells}
    trees = {"incremental", "<1,1,1,1>", "<1,1,3,1,1,1,1,1>", "<2,1,1,1>", "<3,2,1,1>"}
    assert text == {(temperature, tree) for temperature in (0.0, 1.0) for tree in trees}
    assert len(cells) == 22
    assert {len(cell.config.decode.drafts) for cell in cells} == {0, 1, 2, 3}
