"""The configs that name models of the hub: their grammar, their pairs, and the shapes of what they would load."""

import jax
import pytest

from experiments import config, shapes, sweep

# Parameters as the hub counts them in the models' files.
PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-125m": 125_239_296,
}


@pytest.mark.parametrize("name", shapes.CONFIGS)
def test_configs_are_the_runners(name):
    """Every cell makes sense, every model is used and known, and a draft's context holds what the run asks for."""
    experiment = config.load(sweep.Experiment, config.REPOSITORY / f"configs/{name}.toml")
    cells = sweep.cells(experiment)
    assert {draft for cell in cells for draft in cell.config.models.drafts} == set(experiment.models.drafts)
    for model in shapes.models_of(name):
        architecture = shapes.architectures()[model]
        assert experiment.run.max_prompt_tokens + experiment.run.max_new_tokens <= architecture.max_positions


def test_every_known_architecture_is_some_configs():
    assert {model for name in shapes.CONFIGS for model in shapes.models_of(name)} == set(shapes.architectures())


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameters_are_as_many_as_the_hub_counts(model):
    step, (params, *_) = shapes.abstract_step(shapes.architectures()[model], "bfloat16", "xla", rows=1, capacity=8)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS[model]


@pytest.mark.parametrize("name", shapes.CONFIGS)
def test_a_step_of_every_model_has_its_shapes(name):
    """`make shapes` compiles the same step for a TPU."""
    for model in shapes.models_of(name):
        architecture = shapes.architectures()[model]
        step, arguments = shapes.abstract_step(architecture, "bfloat16", "xla", rows=6, capacity=64)
        best, cache = jax.eval_shape(step, *arguments)
        assert best.shape == (1, 6)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), arguments[1]
        )
        assert cache.k[0].shape == (1, architecture.num_kv_heads, 64, architecture.head_dim)
