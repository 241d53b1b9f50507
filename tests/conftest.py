"""Settings that every test shares, made before jax starts."""

import gc
import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # parity with torch needs full float32 products
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
# Programs of tiny models run for milliseconds: LLVM's optimiser would take longer than all they compute. The older
# emitters give LLVM half as much code to translate.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


def pytest_collection_finish():
    """Modules stay: the garbage collector need not walk them again and again, and may come more seldom."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory):
    """Where processes that tests start keep what they compiled."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def compiled_programs(program_folder):
    """One process uses what another has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(program_folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        yield
