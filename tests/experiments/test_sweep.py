"""What a config stands for: its cells, each once, and clear refusals of those that make no sense."""

import dataclasses

import pytest

from experiments import config, sweep
from experiments.sweep import Block, Decode, Experiment, Models, Run

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
        (Block(product={"run.seed": [0]}), {"drafts": ("c",), "tree": (1,)}, ["'c' is not among models.drafts (a, b)"]),
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


def test_two_drafts_of_one_name_are_refused():
    base = Experiment(Run("test"), Models("t", ("zoo/a", "other/a")), Decode(tree=(1,), drafts=("a",)))
    with pytest.raises(config.ConfigError, match="directory names must differ"):
        sweep.cells(base)


def test_labels():
    assert sweep.label(()) == "incremental"
    assert sweep.label((3, 2, 1, 1)) == "<3,2,1,1>"
    assert sweep.label(((0,), (1,), (0, 0))) == "paths(3)"


def test_every_shipped_config_of_this_kind_is_valid():
    cells = sweep.cells(config.load(Experiment, config.REPOSITORY / "configs/quickstart.toml"))
    text = {(cell.config.decode.temperature, sweep.label(cell.config.decode.tree)) for cell in cells}
    trees = {"incremental", "<1,1,1,1>", "<1,1,3,1,1,1,1,1>", "<2,1,1,1>", "<3,2,1,1>"}
    assert text == {(temperature, tree) for temperature in (0.0, 1.0) for tree in trees}
    assert {len(cell.config.decode.drafts) for cell in cells} == {0, 1, 2, 3}
