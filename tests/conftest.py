"""Settings that every test shares, made before jax starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # parity with torch needs full float32 products
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
# Programs of tiny models run for milliseconds: LLVM's optimiser would take longer than all they compute.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
