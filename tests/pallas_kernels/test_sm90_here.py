# SPDX-License-Identifier: Apache-2.0
"""Whoever has a GPU that JAX does not use is told what to install, or what hides it."""

import importlib.util

import jax
import pytest

from detjax.pallas_kernels import sm90_here


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine: with a driver or not, with plugins or not, and no GPU that JAX sees."""

    def make(*, has_driver: bool, plugins: tuple[str, ...] = (), **variables: str) -> str | None:
        def no_devices(platform):
            raise RuntimeError(f"no {platform}")

        driver = tmp_path / "version"
        if has_driver:
            driver.touch()
        monkeypatch.setattr(jax, "devices", no_devices)
        monkeypatch.setattr(sm90_here, "DRIVER", driver)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in plugins or None)
        for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return sm90_here.why_not_here()

    return make


def test_a_machine_without_a_driver_has_no_gpu(machine):
    assert machine(has_driver=False) == "no GPU that JAX can use"


def test_a_gpu_without_jaxs_plugin_is_told_what_to_install(machine):
    assert 'pip install "jax[cuda13]", or cuda12' in machine(has_driver=True)


@pytest.mark.parametrize("plugin", sm90_here.PLUGINS)
def test_a_gpu_that_is_hidden_is_told_by_what(machine, plugin):
    said = machine(has_driver=True, plugins=(plugin,))
    assert said == "JAX cannot use the NVIDIA GPU that is here"
    said = machine(has_driver=True, plugins=(plugin,), CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    assert said.endswith("(JAX_PLATFORMS=cpu, CUDA_VISIBLE_DEVICES=)")
