# SPDX-License-Identifier: Apache-2.0
"""vLLM or SGLang as small files, for a Hopper machine without a network that has their PyTorch.

python -m benchmarks.peers_bundle --out /tmp/bundle
cat part.* | xz -dc | tar -x -C /tmp/vllm      # there, with /tmp/vllm as --vllm-path of peers

The wheels of `peers_vllm.txt` or `peers_sglang.txt` are fetched by pip, for Python 3.12, and
unpacked into one folder. Left out is what a dense model in bfloat16 does not need: kernels of
experts, Blackwell's kernels, test data; in vLLM FlashAttention 2 and the Rust front end. Of a
library's GPU code only what a Hopper GPU can run is kept, and of SGLang's FlashAttention 3 only
kernels for bfloat16 heads of 128 channels. The rest becomes zeros, which compress to nothing. No
layout changes, and the driver never reads those parts.
"""

import argparse
import itertools
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import VERSIONS

GLIBC = (28, 27, 24, 17, 5, 31, 34)
"""Minor versions of manylinux tags, those that are preferred first."""

CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIIIQ")
MAGIC, VERSION = 0xBA55ED50, 1
PTX, CUBIN = 1, 2
HOPPER = 90
DICTIONARY_BYTES = 192 << 20
"""Of the compression: copies of CUTLASS's kernels lie far apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """GPU code of one architecture in a library.

    Attributes:
        container: Offset of the container; the driver chooses one entry of each.
        kind: PTX or CUBIN.
        arch: Such as 90.
        start: Offset of the code.
        stop: Behind it.
    """

    container: int
    kind: int
    arch: int
    start: int
    stop: int


def gpu_code(library: bytes) -> Iterator[Code]:
    """All GPU code of a library, in order.

    Raises:
        ValueError: If a container does not end where its last entry does.
    """
    pos = 0
    while (pos := library.find(MAGIC.to_bytes(4, "little"), pos)) >= 0:
        _, version, header_bytes, size = CONTAINER.unpack_from(library, pos)
        first, end = pos + header_bytes, pos + header_bytes + size
        if version != VERSION or header_bytes != CONTAINER.size or end > len(library):
            pos += 4  # these four bytes stand for something else
            continue
        container = pos
        while first < end:
            kind, _, entry_bytes, code_bytes, *_, arch, _ = ENTRY.unpack_from(library, first)
            start = first + entry_bytes
            first = start + code_bytes
            yield Code(container=container, kind=kind, arch=arch, start=start, stop=first)
        if first != end:
            raise ValueError(f"GPU code at byte {container} ends at {first}, not at {end}")
        pos = end


def keep_hopper(library: bytearray) -> int:
    """Zero GPU code that no Hopper GPU runs; how many bytes.

    Kept of a container: its machine code for Hopper, or else its newest PTX up to Hopper.
    """
    found = list(gpu_code(bytes(library)))
    zeroed = 0
    for _, group in itertools.groupby(found, key=lambda code: code.container):
        codes = list(group)
        kept = [code for code in codes if (code.kind, code.arch) == (CUBIN, HOPPER)]
        ptx = [code for code in codes if code.kind == PTX and code.arch <= HOPPER]
        kept = kept or sorted(ptx, key=lambda code: code.arch)[-1:]
        for code in codes:
            if code not in kept:
                library[code.start : code.stop] = bytes(code.stop - code.start)
                zeroed += code.stop - code.start
    return zeroed


def has_other_heads(code: bytes) -> bool:
    """Whether code is of FlashAttention 3, and not for bfloat16 heads of 128 channels."""
    widths = {int(found) for found in _HEAD_WIDTHS.findall(code)}
    is_bfloat16 = b"half_t" not in code and b"e4m3" not in code
    return bool(widths) and (widths != {128} or not is_bfloat16)


_HEAD_WIDTHS = re.compile(
    rb"CollectiveMainloopFwdSm90ILi\dEN4cute5tupleIJNS\d_1CILi\dEEES\w+?_S\w+?_EEENS\w_IJ.*?EEELi(\d+)E"
)


def keep_heads(library: bytearray) -> int:
    """`keep_hopper`, less code that `has_other_heads`."""
    zeroed = keep_hopper(library)
    for code in gpu_code(bytes(library)):
        if has_other_heads(bytes(library[code.start : code.stop])):
            library[code.start : code.stop] = bytes(code.stop - code.start)
            zeroed += code.stop - code.start
    return zeroed


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """What travels of an engine.

    Attributes:
        left_out: Patterns of files and folders that do not.
        libraries: Those with GPU code, and what zeroes the rest of it.
        stubs: Modules that it imports and does not use, by their files.
    """

    left_out: tuple[str, ...]
    libraries: Mapping[str, Callable[[bytearray], int]]
    stubs: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    "vllm": Peer(
        left_out=(
            "bin", "vllm/vllm-rs", "vllm/third_party/fmha_sm100", "vllm/_qutlass_C.abi3.so",
            "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
            "vllm/third_party/deep_gemm/_C.cpython-31[0134]-*", "mistral_common/data",
            "pycountry/locales", "*/tests", "**/__pycache__",
        ),
        libraries={
            "vllm/_C_stable_libtorch.abi3.so": keep_hopper,
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": keep_hopper,
        },
    ),
    "sglang": Peer(
        left_out=(
            "bin", "include", "lib", "lib64", "mscclpp*", "_mscclpp*", "sgl_kernel/sm100",
            "sgl_kernel/flashmla_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so",
            "mistral_common/data", "flashinfer/data/cutlass/[demp]*", "*/tests", "**/__pycache__",
        ),
        libraries={
            "sgl_kernel/sm90/common_ops.abi3.so": keep_hopper,
            "sgl_kernel/flash_ops.abi3.so": keep_heads,
        },
        stubs={
            "IPython/__init__.py": "from . import display\n",
            "IPython/display.py": "HTML = display = None\n",
        },
    ),
}  # fmt: skip


def install(package: str, folder: Path) -> None:
    """Unpack the wheels into a folder, and leave out what is not needed."""
    peer = PEERS[package]
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    requirements = Path(__file__).parent / f"peers_{package}.txt"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
         "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms,
         "--target", str(folder), "--requirement", str(requirements),
         f"{package}=={VERSIONS[package]}"],
        check=True,
    )  # fmt: skip
    for pattern in peer.left_out:
        for path in list(folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, keep in peer.libraries.items():
        library = bytearray((folder / name).read_bytes())
        zeroed = keep(library)
        (folder / name).write_bytes(library)
        print(f"{name}: {zeroed / 1e6:.0f} MB of GPU code that is not needed are zeros")
    for name, text in peer.stubs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def pack(folder: Path, out: Path, count: int) -> list[Path]:
    """Compress a folder into so many files of one size."""
    # WHY: files of one kind side by side, and kernels after each other, compress better.
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.suffix, p))
    whole = out / "whole"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME,
                "dict_size": DICTIONARY_BYTES}]  # fmt: skip
    with lzma.open(whole, "wb", filters=filters) as packed:
        with tarfile.open(fileobj=packed, mode="w|") as tar:
            for path in files:
                tar.add(path, path.relative_to(folder))
    data = whole.read_bytes()
    whole.unlink()
    part_bytes = -(-len(data) // count)
    parts = [out / f"part.{i:02}" for i in range(count)]
    for i, part in enumerate(parts):
        part.write_bytes(data[i * part_bytes : (i + 1) * part_bytes])
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Fetch, prune, pack."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers_bundle", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="an empty folder, or a new one")
    parser.add_argument("--engine", choices=list(PEERS), default="vllm", help="default: vllm")
    parser.add_argument("--parts", type=int, default=4, help="files of the bundle")
    args = parser.parse_args(argv)
    if args.parts < 1:
        parser.error(f"--parts {args.parts} must be at least 1")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out {args.out} is not empty; give another folder")
    site = args.out / "site"
    site.mkdir(parents=True)
    install(args.engine, site)
    for part in pack(site, args.out, args.parts):
        print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
