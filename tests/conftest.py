"""What every test runs under: the CPU unless asked otherwise, key-reuse checks, reproducible examples in CI."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is first imported

import hypothesis
import jax

jax.config.update("jax_debug_key_reuse", True)

# Deadlines would measure compilation. Derandomised in CI, so that a red run is red again at the same commit.
hypothesis.settings.register_profile("specjax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("specjax")
