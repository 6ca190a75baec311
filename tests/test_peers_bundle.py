# SPDX-License-Identifier: Apache-2.0
"""A library keeps the code that a Hopper GPU runs, where it lay, and parts join to the folder."""

import io
import lzma
import tarfile

import pytest

from benchmarks import peers_bundle
from benchmarks.peers_bundle import CONTAINER, CUBIN, ENTRY, MAGIC, PTX


def container(*codes: tuple[int, int, bytes]) -> bytes:
    """GPU code as it lies in a library: (kind, architecture, code) of each entry."""
    entries = b"".join(
        ENTRY.pack(kind, 257, ENTRY.size, len(code), 0, 0, 0, arch, 0) + code
        for kind, arch, code in codes
    )
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(entries)) + entries


MAGIC_ALONE = MAGIC.to_bytes(4, "little") + b"is data here, as its version says"
BOTH = container((CUBIN, 80, b"ampere--"), (CUBIN, 90, b"hopper--"), (PTX, 90, b"text----"))
ONLY_PTX = container((PTX, 75, b"turing--"), (PTX, 80, b"portable"), (CUBIN, 120, b"blackwel"))
NEITHER = container((CUBIN, 100, b"blackwel"))


def test_code_of_other_gpus_becomes_zeros_and_nothing_moves():
    library = bytearray(b"host" + MAGIC_ALONE + BOTH + b"host" + ONLY_PTX + NEITHER + b"host")
    before, size = bytes(library), len(library)
    assert peers_bundle.keep_hopper(library) == 5 * 8 and len(library) == size
    want = before
    for code in (b"ampere--", b"text----", b"turing--", b"blackwel"):
        want = want.replace(code, bytes(8))
    assert bytes(library) == want
    for kept in (b"hopper--", b"portable", MAGIC_ALONE):
        assert kept in library
    codes = list(peers_bundle.gpu_code(before))
    assert [(code.kind, code.arch) for code in codes] == [
        (CUBIN, 80), (CUBIN, 90), (PTX, 90), (PTX, 75), (PTX, 80), (CUBIN, 120), (CUBIN, 100),
    ]  # fmt: skip
    assert before[codes[1].start : codes[1].stop] == b"hopper--"
    assert [code.container for code in codes] == sorted(code.container for code in codes)


MAINLOOP = b"CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi128EE"


@pytest.mark.parametrize(
    ("width", "dtype", "is_kept"),
    [(128, "bfloat16_t", True), (64, "bfloat16_t", False), (128, "half_t", False),
     (128, "float_e4m3_t", False)],
)  # fmt: skip
def test_of_attention_only_bfloat16_heads_of_128_channels_are_kept(width, dtype, is_kept):
    code = MAINLOOP + f"ENS7_ILi176EEESA_EEELi{width}ENS_10{dtype}EfNS_4arch".encode()
    combine = b"FlashAttnFwdCombine half_t "
    library = bytearray(container((CUBIN, 90, code)) + container((CUBIN, 90, combine)))
    assert peers_bundle.has_other_heads(code) != is_kept
    assert peers_bundle.keep_heads(library) == (0 if is_kept else len(code))
    assert (code in library) == is_kept and combine in library


@pytest.mark.control
def test_control_a_container_that_ends_within_an_entry_is_refused():
    damaged = bytearray(BOTH)
    entry_size = CONTAINER.size + 8
    damaged[entry_size] += 1
    with pytest.raises(ValueError, match="GPU code at byte 0 ends at"):
        peers_bundle.keep_hopper(damaged)


def test_parts_join_to_the_folder(tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    files = {"vllm/a.py": b"a" * 5000, "vllm/b.so": bytes(range(256)) * 99, "c.py": b""}
    for name, data in files.items():
        (site / name).write_bytes(data)
    monkeypatch.setattr(peers_bundle, "DICTIONARY_BYTES", 1 << 20)
    parts = peers_bundle.pack(site, tmp_path, 3)
    assert [part.name for part in parts] == ["part.00", "part.01", "part.02"]
    joined = lzma.decompress(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=io.BytesIO(joined)) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    found = {name: (tmp_path / "unpacked" / name).read_bytes() for name in files}
    assert found == files


def test_a_folder_that_is_not_empty_is_refused_before_anything_is_fetched(tmp_path, capsys):
    (tmp_path / "kept").touch()
    for argv, message in (
        (["--out", str(tmp_path)], f"--out {tmp_path} is not empty"),
        (["--out", str(tmp_path / "new"), "--parts", "0"], "--parts 0 must be at least 1"),
    ):
        with pytest.raises(SystemExit) as end:
            peers_bundle.main(argv)
        assert end.value.code == 2 and message in capsys.readouterr().err
