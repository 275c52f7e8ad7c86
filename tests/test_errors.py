"""Bad input: a clear error on the host, before any model is traced or compiled."""

import numpy as np
import pytest

import specjax as sj
from specjax.draft import ssm
from specjax.types import Model
from tests.helpers import VOCAB


def never(*args, **options):
    raise AssertionError("a model was traced although the input is bad")


def model(vocab_size: int = VOCAB, max_positions: int = 64) -> Model:
    return Model(never, None, never, vocab_size, max_positions)


TARGET = model()
SMALL = model(vocab_size=5)
DRAFTED = dict(drafts=[TARGET], tree=(2, 1))
DRAFTER = ssm(TARGET, sj.Topology.chain(3), "iid")

CASES = [
    # prompts
    ("no prompts", dict(prompts=[]), "non-empty list of token-id lists"),
    ("prompts None", dict(prompts=None), "list of token-id lists"),
    ("prompts a number", dict(prompts=5), "list of token-id lists"),
    ("prompts a text", dict(prompts="abc"), "list of token-id lists"),
    ("empty prompt", dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
    ("one flat prompt", dict(prompts=[1, 2]), r"prompts\[0\] is 1; expected a list of token ids"),
    ("prompt a text", dict(prompts=[[1], "abc"]), r"prompts\[1\] is 'abc'; expected a list of token ids"),
    ("prompt None", dict(prompts=[None]), r"prompts\[0\]"),
    ("prompt of floats", dict(prompts=[[1.0]]), r"prompts\[0\] must be a flat list of integer"),
    ("prompt of bools", dict(prompts=[[True]]), r"prompts\[0\] must be a flat list of integer"),
    ("nested prompt", dict(prompts=[[[1, 2]]]), r"prompts\[0\] must be a flat list of integer"),
    ("ragged prompt", dict(prompts=[[1, [2]]]), r"prompts\[0\] must be a flat list of integer"),
    ("id too large", dict(prompts=[[1], [2, 16]]), r"prompts\[1\] has token id 16, outside the target's \[0, 16\)"),
    ("negative id", dict(prompts=[[-1]]), r"token id -1"),
    # room
    ("prompt too long", dict(prompts=[[1], [1] * 65]), r"prompts\[1\] has 65 tokens .* context of 64"),
    ("budget too large", dict(max_new_tokens=64), r"prompts\[0\] has 2 tokens .*max_new_tokens=64.* context of 64"),
    ("row's budget too large", dict(prompts=[[1], [1]], max_new_tokens=[5, 64]), r"prompts\[1\]"),
    ("tree too deep", dict(DRAFTED, prompts=[[1] * 63], max_new_tokens=1), "tree of depth 2 .* context of 64"),
    ("draft's context", dict(drafts=[model(max_positions=6)], tree=(1,)), "draft model's context of 6"),
    ("default budget", dict(max_new_tokens=None), "max_new_tokens"),
    # budgets
    ("negative budget", dict(max_new_tokens=-1), "max_new_tokens must be an integer >= 0"),
    ("float budget", dict(max_new_tokens=3.0), "max_new_tokens"),
    ("bool budget", dict(max_new_tokens=True), "max_new_tokens"),
    ("bool in budgets", dict(prompts=[[1], [2]], max_new_tokens=[True, 3]), "max_new_tokens"),
    ("text budget", dict(max_new_tokens="3"), "max_new_tokens"),
    ("too many budgets", dict(max_new_tokens=[3, 3]), "max_new_tokens has 2 entries for 1 prompts"),
    ("float in budgets", dict(max_new_tokens=[3.0]), r"max_new_tokens\[0\] is 3.0"),
    # drafts and trees
    ("target a path", dict(target="model"), "target is a str; expected a Model"),
    ("target None", dict(target=None), "target is a NoneType; expected a Model"),
    ("tree without draft", dict(tree=(2, 1)), "nothing that drafts it"),
    ("draft without tree", dict(drafts=[TARGET]), "needs a tree"),
    ("one bare draft", dict(drafts=TARGET, tree=(2,)), r"drafts=\[draft\]"),
    ("one bare drafter", dict(drafts=DRAFTER), r"drafts=\[draft\]"),
    ("drafts None", dict(drafts=None, tree=(2,)), "drafts"),
    ("drafts a text", dict(drafts="ssm", tree=(2,)), "drafts"),
    ("draft a path", dict(drafts=["ssm"], tree=(2,)), r"drafts\[0\] is a str; expected a Model or a Drafter"),
    ("drafter and tree", dict(drafts=[DRAFTER], tree=(2,)), "brings its own tree"),
    ("tree of zeros", dict(DRAFTED, tree=(0,)), "entry 0 is 0"),
    ("empty tree", dict(DRAFTED, tree=()), "at least one entry"),
    ("tree a number", dict(DRAFTED, tree=3), "sequence such as"),
    ("tree of paths", dict(DRAFTED, tree=[[0], [1]]), r"entry 0 is \[0\]"),
    ("tree too wide", dict(DRAFTED, tree=(17,)), "17 draws at a node, more than the vocabulary's 16"),
    ("builder of nothing", dict(DRAFTED, tree=lambda model, law: None), "builder.*Drafter"),
    ("other vocabulary", dict(drafts=[SMALL], tree=(2,)), "5 tokens and the target's 16"),
    ("two vocabularies", dict(drafts=[TARGET, SMALL], tree=(2,)), r"one vocabulary; got sizes \[16, 5\]"),
    ("unknown mode", dict(DRAFTED, draft_mode="topk"), "unknown draft_mode 'topk'; did you mean 'top_k'"),
    ("mode None", dict(DRAFTED, draft_mode=None), "draft_mode"),
    # verifiers
    ("unknown verifier", dict(verifier="naive_sampler"), "did you mean 'naive_sampling'"),
    ("far verifier", dict(verifier="xyz"), "expected one of .*multi_step"),
    ("verifier None", dict(verifier=None), "verifier is a NoneType; expected a name or a Verifier"),
    ("verifier a rule", dict(verifier=max), "expected a name or a Verifier"),
    ("biased pair", dict(DRAFTED, verifier="multi_step"), "would bias .*deterministic draws; exact .*naive_sampling"),
    (
        "biased without replacement",
        dict(DRAFTED, draft_mode="without_replacement", verifier="multi_step"),
        "would bias .*without_replacement draws",
    ),
    ("biased ensemble", dict(drafts=[TARGET] * 2, tree=(2,), draft_mode="iid", verifier="spectr"), "iid x sources"),
    ("block on a tree", dict(DRAFTED, draft_mode="iid", verifier="block"), "takes chains.*room for 2; .*multi_step"),
    (
        "optimal over many tokens",
        dict(target=model(63), drafts=[model(63)], tree=(1,), verifier="optimal"),
        "at most 62 tokens; this one has 63; exact for deterministic draws in such trees: naive_sampling$",
    ),
    ("optimal of many draws", dict(DRAFTED, tree=(5,), draft_mode="iid", verifier="optimal"), r"16\^5; .*: khisti, "),
    (
        "a law of pairs on a tree",
        dict(DRAFTED, draft_mode="hub", verifier="multi_step"),
        "would bias .*hub draws; exact for them: hub, naive_sampling, naive_tree, optimal$",
    ),
    (
        "several laws",
        dict(drafts=[DRAFTER, ssm(TARGET, sj.Topology.chain(3), "hub")], verifier="naive_tree"),
        r"naive_tree' is not shown to be exact for iid \+ hub draws; exact for them: naive_sampling$",
    ),
    ("lossy", dict(DRAFTED, verifier=sj.Verifier("blur", never, None, True)), "allow_lossy=True"),
    # warps
    ("negative temperature", dict(warp=sj.Warp(-1.0)), "Warp.temperature must be"),
    ("temperature a text", dict(warp=sj.Warp("hot")), "Warp.temperature must be"),
    ("a temperature per row in one warp", dict(warp=sj.Warp(np.array([0.5, 0.7]))), "Warp.temperature must be"),
    ("warp a number", dict(warp=0.7), "warp is 0.7; expected one value or one per prompt"),
    ("warps of numbers", dict(warp=[0.7]), r"warp\[0\] is 0.7; expected Warp"),
    ("too many warps", dict(warp=[sj.Warp()] * 2), "warp has 2 entries for 1 prompts"),
    ("bad draft warp", dict(DRAFTED, draft_warp=sj.Warp(1.0, 0, 0.0)), "Warp.top_p must be"),
    ("draft warps missing", dict(DRAFTED, draft_warp=[]), "draft_warp has 0 entries for 1 prompts"),
    # stops and seeds
    ("stop outside", dict(eos_ids=[16]), r"eos_ids must be token ids in \[0, 16\)"),
    ("stop negative", dict(eos_ids=[-1]), "eos_ids must be token ids"),
    ("stop a number", dict(eos_ids=5), "eos_ids"),
    ("stop a text", dict(eos_ids="</s>"), "eos_ids must be token ids"),
    ("stop a float", dict(eos_ids=[1.0]), "eos_ids must be token ids"),
    ("seed negative", dict(seeds=-1), "seed 0 is -1"),
    ("seed too large", dict(seeds=2**32), "seed 0 is"),
    ("seed a float", dict(seeds=1.5), "seeds"),
    ("seed a bool", dict(seeds=True), "seed 0 is True"),
    ("seeds too many", dict(seeds=[1, 2]), "seeds has 2 entries for 1 prompts"),
    ("seed in a list a text", dict(seeds=["1"]), r"seeds\[0\] is '1'"),
]


@pytest.mark.parametrize("call", [sj.generate, sj.stream])
@pytest.mark.parametrize(("options", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_is_named_before_anything_is_traced(call, options, message):
    """B27 and the rest: a stream says so when it is called, not at its first step."""
    inputs = dict(target=TARGET, prompts=[[1, 2]], max_new_tokens=5) | options
    with pytest.raises(ValueError, match=message):
        call(inputs.pop("target"), inputs.pop("prompts"), **inputs)


def test_good_input_reaches_the_model():
    """The models above do raise when they are traced: the cases prove that errors come first."""
    for eos_ids in ([3], (), np.array([3, 4]), range(2)):
        with pytest.raises(AssertionError, match="traced"):
            sj.generate(TARGET, [[1, 2], np.array([3])], max_new_tokens=[np.int64(5), 0], eos_ids=eos_ids, **DRAFTED)
    with pytest.raises(AssertionError, match="traced"):
        sj.generate(TARGET, np.array([[1, 2], [3, 4]]), max_new_tokens=np.array([5, 62]), seeds=np.array([1, 2]))


def test_a_lossy_verifier_runs_when_asked_for():
    verifier = sj.Verifier("blur", never, None, lossy=True)
    with pytest.raises(AssertionError, match="traced"):
        sj.generate(TARGET, [[1]], verifier=verifier, allow_lossy=True, max_new_tokens=5, **DRAFTED)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(draft_mode=["x"]),
        dict(max_new_tokens=np.array(3)),
        dict(max_new_tokens=10**22),
        dict(eos_ids=[True]),
        dict(warp=sj.Warp(1e50)),
        dict(warp=sj.Warp(1e-50)),
        dict(warp=sj.Warp(1.0, 2**31)),
    ],
    ids=str,
)
def test_values_that_would_overflow_or_turn_into_others_are_refused(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"(?i){name}"):
        sj.generate(TARGET, [[1]], **{"max_new_tokens": 4, **arguments})


@pytest.mark.parametrize("parents", [[-1, 2, 1], [-1, 9], [], [[-1]], [-1.0, 0.0]], ids=str)
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(ValueError, match="parents"):
        sj.ancestor_mask(parents)


@pytest.mark.parametrize("schedule", [(10**9,), (300, 300, 300)], ids=str)
def test_mistyped_schedules_are_refused_before_they_are_built(schedule):
    with pytest.raises(ValueError, match="at most 4096"):
        sj.Topology.from_schedule(schedule)
