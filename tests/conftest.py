# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices, strict promotion, and skips that a GPU runner may not take."""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Start JAX before a test runs the command, which would ask for devices of its own."""
    assert len(jax.devices("cpu")) == 8


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory):
    """Many tests compile the same programs: keep them, for this process and its time alone.

    What is proven of new processes is proven in processes of their own, which compile afresh.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _num_gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


def pytest_collection_modifyitems(config, items):
    """Skip GPU tests where there are too few GPUs; fail them there if DETJAX_NO_SKIP=1."""
    must_run = os.environ.get("DETJAX_NO_SKIP") == "1"
    for item in items:
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else int(item.get_closest_marker("gpu") is not None)
        if needed and not must_run and needed > _num_gpus():
            reason = f"needs {needed} Hopper GPU(s), {_num_gpus()} here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a skip into a failure under DETJAX_NO_SKIP=1: a skipped proof is a false green."""
    report = yield
    if (
        os.environ.get("DETJAX_NO_SKIP") == "1"
        and report.skipped
        and not hasattr(report, "wasxfail")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped under DETJAX_NO_SKIP=1: {report.longrepr}"
    return report
