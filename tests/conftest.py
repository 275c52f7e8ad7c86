"""What every test runs under: the CPU unless asked otherwise, key-reuse checks, reproducible examples in CI."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is first imported

import hypothesis
import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)

# Deadlines would measure compilation. Derandomised in CI, so that a red run is red again at the same commit.
hypothesis.settings.register_profile("specjax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("specjax")


def pytest_configure(config):
    # Most of the time goes into compiling, and most of that is the same as in the run before. The key of an entry holds
    # the program, the flags, jaxlib's version and the processor's features, so a stale one is never taken.
    # `pytest --cache-clear` empties it.
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True, scope="module")
def compiled_code(request):
    """How a module's code is compiled, and its end.

    Small models take longer to compile than to run, and unoptimised they compile in half the time; what enumerates
    thousands of laws runs longer, and is marked ``optimised``. Every executable holds memory maps, of which a process
    may have some 65,000; all tests together need more.
    """
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimised") is None)
    yield
    jax.clear_caches()
