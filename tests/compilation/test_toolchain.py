# SPDX-License-Identifier: Apache-2.0
"""What makes a GPU's code is told apart by its bytes, wherever it lies."""

import dataclasses
import os
from pathlib import Path

import jax
import pytest
from jax._src import lib

from detjax.compilation import source, toolchain
from detjax.numerics import Build, NumericsProfile, fingerprint
from detjax.testing import aot


def write(path: Path, content: str, *, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def write_cuda(root: Path, version: str) -> Path:
    for tool in ("ptxas", "nvlink"):
        write(root / "bin" / tool, f"ELF {tool} {version}")
    write(root / "nvvm" / "libdevice" / "libdevice.10.bc", f"BC {version}")
    return root


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """JAX's CUDA plugin, with two toolchains beside it and no other in reach."""
    site = tmp_path / "site"
    plugin = write(site / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so", "plugin").parent
    for name in ("libmosaic_gpu_runtime.so", "_mosaic_gpu_ext.so"):
        write(site / "jax_cuda13_plugin" / name, name)
    here = {"jax_plugins.xla_cuda13": plugin}
    monkeypatch.setattr(toolchain, "_package", here.get)
    monkeypatch.setattr(toolchain, "_SYSTEM_ROOTS", ())
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    use(monkeypatch, write_cuda(site / "nvidia" / "cu13", "13.0.88"))
    return site


def use(monkeypatch, root: Path) -> None:
    """Take a folder as JAX does, which asks once for where NVIDIA's wheels lie."""
    monkeypatch.setattr(lib, "cuda_path", str(root))
    toolchain._described_as.cache_clear()


def found() -> dict[str, str]:
    return dict(text.split(" ", 1) for text in toolchain.toolchain())


def build() -> Build:
    """Of a GPU with the toolchain that is here."""
    cpu = Build.current("portable", jax.devices("cpu")[0])
    return dataclasses.replace(cpu, toolchain="; ".join(toolchain.toolchain()))


def test_two_assemblers_have_two_fingerprints_and_two_folders_of_programs(
    site, tmp_path, monkeypatch
):
    def all_of() -> tuple[str, str]:
        return fingerprint(NumericsProfile(), build()), source.compile_key()

    here = all_of()
    use(monkeypatch, write_cuda(tmp_path / "same", "13.0.88"))
    assert all_of() == here, "the place of a file says nothing"
    use(monkeypatch, write_cuda(tmp_path / "other", "13.3.41"))
    other = all_of()
    assert other[0] != here[0] and other[1] != here[1]


@pytest.mark.parametrize(
    "name", ["bin/ptxas", "bin/nvlink", "nvvm/libdevice/libdevice.10.bc"]
)  # fmt: skip
def test_each_file_counts(site, tmp_path, monkeypatch, name):
    here = fingerprint(NumericsProfile(), build())
    root = write_cuda(tmp_path / "other", "13.0.88")
    write(root / name, "another")
    use(monkeypatch, root)
    assert fingerprint(NumericsProfile(), build()) != here


def test_the_plugin_counts(site):
    here = fingerprint(NumericsProfile(), build())
    write(site / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so", "another")
    assert fingerprint(NumericsProfile(), build()) != here


def test_an_assembler_of_the_system_is_that_of_pallas_kernels_alone(site, tmp_path):
    """Mosaic GPU looks at PATH before NVIDIA's wheels; XLA is told the folder of the wheels."""
    before = found()
    assert before["ptxas"] == before["mosaic-ptxas"]
    write(tmp_path / "path" / "ptxas", "of the system")
    after = found()
    assert after["mosaic-ptxas"] != before["mosaic-ptxas"]
    assert {k: v for k, v in after.items() if k != "mosaic-ptxas"} == {
        k: v for k, v in before.items() if k != "mosaic-ptxas"
    }


def test_the_folder_of_xlas_flag_counts_by_its_bytes(site, tmp_path, monkeypatch):
    write(tmp_path / "path" / "ptxas", "of the system")
    for name in ("a", "b"):
        write_cuda(tmp_path / name, "13.3.41")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path / 'a'}")
    files = toolchain.toolchain_files()
    assert files["mosaic-ptxas"] == tmp_path / "a" / "bin" / "ptxas"
    assert files["ptxas"] == site / "nvidia" / "cu13" / "bin" / "ptxas", "JAX overrides the flag"
    here = fingerprint(NumericsProfile(), build())
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path / 'b'}")
    assert fingerprint(NumericsProfile(), build()) == here


def test_a_wrapper_script_counts_by_what_it_runs(site, tmp_path):
    def wrapper(version: str) -> str:
        real = write(tmp_path / "real", f"#!/bin/sh\necho 'release 13, V{version}'\n")
        write(tmp_path / "path" / "ptxas", f'#!/bin/sh\nexec {real} "$@"\n')
        toolchain._described_as.cache_clear()
        return found()["mosaic-ptxas"]

    first, second = wrapper("13.0.88"), wrapper("13.3.41")
    assert first.startswith("13.0.88 ") and second.startswith("13.3.41 ")
    assert first.split()[1] != second.split()[1]
    assert wrapper("13.0.88") == first


def test_a_later_process_reads_no_file_that_is_as_it_was(site, monkeypatch):
    before = found()
    toolchain._described_as.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(toolchain, "_hash_file")
        assert found() == before
    # Another of the same size and time, as an installer may leave it.
    ptxas = site / "nvidia" / "cu13" / "bin" / "ptxas"
    times = ptxas.stat()
    ptxas.write_text(ptxas.read_text().replace("13.0.88", "13.0.99"))
    os.utime(ptxas, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert found()["ptxas"] != before["ptxas"]
    assert found()["libdevice"] == before["libdevice"]


@pytest.mark.parametrize("held", ["{", "[]", None])
def test_without_kept_hashes_the_files_are_read_again(site, held):
    before = found()
    known = toolchain._known_file()
    known.unlink() if held is None else known.write_text(held)
    toolchain._described_as.cache_clear()
    assert found() == before


def test_without_a_folder_of_state_hashes_are_made_each_time(site, monkeypatch):
    before = found()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    toolchain._described_as.cache_clear()
    assert found() == before


def test_the_driver_names_kept_programs_and_no_answer(site, tmp_path, monkeypatch):
    kinds = iter(("Open Kernel Module for x86_64", "x86_64 Kernel Module") * 2)

    def with_driver(version: str) -> tuple[str, str]:
        text = f"NVRM version: NVIDIA UNIX {next(kinds)}  {version}  Release Build\nGCC 13.3\n"
        monkeypatch.setattr(toolchain, "_DRIVER", write(tmp_path / "version", text))
        assert toolchain.driver() == version
        return source.toolchain_key(), fingerprint(NumericsProfile(), build())

    first, second = with_driver("580.159.04"), with_driver("590.10.01")
    assert first[0] != second[0]
    assert first[1] == second[1], "programs are compiled before a driver sees them"
    (site / "nvidia" / "cu13" / "bin" / "ptxas").unlink()
    assert with_driver("580.159.04")[1] != with_driver("590.10.01")[1], "the driver compiles"


def test_a_folder_of_path_that_cannot_be_read_is_passed_over(site, monkeypatch):
    """On Python 3.12 `Path.is_file` raises there."""

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    before = found()
    monkeypatch.setenv("PATH", str(site / "of_others"))
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "is_file", refuse)
    assert found() == before


def test_what_an_assembler_could_not_say_is_asked_again(site, monkeypatch):
    monkeypatch.setattr(toolchain, "_version_text", lambda program: None)
    without = found()["ptxas"]
    toolchain._described_as.cache_clear()
    monkeypatch.setattr(toolchain, "_version_text", lambda program: "release, V13.0.88")
    assert found()["ptxas"] == f"13.0.88 {without}"


def test_a_cpu_has_no_toolchain_beside_jaxlib(site):
    build = Build.current("portable", jax.devices("cpu")[0])
    assert build.toolchain == "" and "toolchain" not in build.facts()
    assert "toolchain" in dataclasses.replace(build, toolchain="ptxas 1").facts()


def test_without_the_plugin_nothing_is_looked_for(monkeypatch):
    monkeypatch.setattr(toolchain, "_package", lambda name: None)
    assert toolchain.toolchain() == ()


@pytest.mark.aot
@pytest.mark.skipif(aot.why_unavailable() is not None, reason="no CUDA plugin")
def test_every_file_of_an_installed_plugin_is_found():
    files = toolchain.toolchain_files()
    assert [name for name, file in files.items() if file is None] == []
    assert all(len(text.split()[-1]) == 16 for text in toolchain.toolchain())
