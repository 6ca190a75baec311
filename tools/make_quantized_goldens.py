# SPDX-License-Identifier: Apache-2.0
"""Make quantised matrices and the bfloat16 ones that they stand for, by compressed-tensors' code.

Nothing here imports detjax. tests/golden/README.md says which environment to use.

    python tools/make_quantized_goldens.py --out tests/golden/quantized

One file a case holds the parts as a checkpoint has them ("layer.*"), what `decompress` of
compressed-tensors makes of them ("expanded"), and in its metadata the `quantization_config`. AWQ's
and GPTQ's words are packed here, element by element, as their own packers do; their expansion is
the float32 product, rounded once.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

OUT_CHANNELS, IN_CHANNELS = 96, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

COMPRESSED: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "int4_group32": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        torch.bfloat16,
    ),
    "int4_group128_zero": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
        torch.bfloat16,
    ),
    "int8_packed_channel": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        torch.bfloat16,
    ),
    "int8_packed_group_zero": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
        torch.bfloat16,
    ),
    "int8_channel": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        torch.bfloat16,
    ),
    "int8_channel_zero": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        torch.bfloat16,
    ),
    "float8_channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        torch.bfloat16,
    ),
    "float8_channel_float32": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        torch.float32,
    ),
    "float8_tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        torch.bfloat16,
    ),
    "float8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]},
        torch.bfloat16,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for i, (name, (format_, args, scale_dtype)) in enumerate(COMPRESSED.items()):
        write(
            out / f"{name}.safetensors", *compressed(random_weight(i), format_, args, scale_dtype)
        )
    for i, bits in enumerate((4, 8)):
        write(out / f"gptq_int{bits}.safetensors", *gptq(50 + i, bits))
    write(out / "awq_int4.safetensors", *awq(60))
    return 0


def random_weight(seed: int) -> torch.Tensor:
    """Of normal values, some rows far larger than others, and one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUT_CHANNELS, IN_CHANNELS, generator=generator)
    weight *= 2.0 ** torch.randint(-6, 3, (OUT_CHANNELS, 1), generator=generator)
    weight[5] = 0
    return weight.to(torch.bfloat16)


def compressed(
    weight: torch.Tensor, format_: str, args: dict[str, Any], scale_dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Parts, expansion and settings, by compressed-tensors."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    assert scheme.weights is not None
    low, high = extremes(weight.float(), scheme.weights)
    scale, zero = calculate_qparams(low, high, scheme.weights)
    state = {"weight": weight, "weight_scale": scale.to(scale_dtype)}
    if not scheme.weights.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(format_)
    parts = compressor.compress(state, scheme)
    expanded = compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16)
    settings = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
        },
    }
    return parts, expanded, settings


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest value that each scale stands for."""
    n, k = weight.shape
    match str(args.strategy):
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            parts = weight.reshape(n, 1, k)
        case "group":
            parts = weight.reshape(n, -1, args.group_size)
        case _:
            rows, columns = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
            parts = padded.reshape(-(-n // rows), rows, -1, columns).transpose(1, 2).flatten(2)
    return parts.min(-1).values, parts.max(-1).values


def gptq(seed: int, bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """GPTQ's version 1: a stored zero point is one less."""
    group, per_word = 64, 32 // bits
    codes, zeros, scales = random_codes(seed, bits, group, lowest_zero=1)
    n, k = codes.shape
    words = torch.zeros(k // per_word, n, dtype=torch.int64)
    for i in range(k):
        words[i // per_word] |= codes[:, i] << (bits * (i % per_word))
    of_zeros = torch.zeros(k // group, n // per_word, dtype=torch.int64)
    for j in range(n):
        of_zeros[:, j // per_word] |= (zeros[j] - 1) << (bits * (j % per_word))
    parts = {
        "qweight": as_words(words),
        "qzeros": as_words(of_zeros),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(k, dtype=torch.int32) // group,
    }
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": False,
    }
    return parts, expand(codes, zeros, scales, group), settings


def awq(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """AWQ's gemm version."""
    bits, group = 4, 64
    codes, zeros, scales = random_codes(seed, bits, group, lowest_zero=0)
    n, k = codes.shape
    words = torch.zeros(k, n // 8, dtype=torch.int64)
    of_zeros = torch.zeros(k // group, n // 8, dtype=torch.int64)
    for column in range(n // 8):
        for i, element in enumerate(AWQ_ORDER):
            words[:, column] |= codes[column * 8 + element] << (bits * i)
            of_zeros[:, column] |= zeros[column * 8 + element] << (bits * i)
    parts = {
        "qweight": as_words(words),
        "qzeros": as_words(of_zeros),
        "scales": scales.T.contiguous(),
    }
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    return parts, expand(codes, zeros, scales, group), settings


def random_codes(
    seed: int, bits: int, group: int, *, lowest_zero: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `(n, k)`, zero points and float16 scales `(n, groups)`."""
    generator = torch.Generator().manual_seed(seed)
    groups = IN_CHANNELS // group
    codes = torch.randint(0, 2**bits, (OUT_CHANNELS, IN_CHANNELS), generator=generator)
    zeros = torch.randint(lowest_zero, 2**bits, (OUT_CHANNELS, groups), generator=generator)
    scales = torch.rand(OUT_CHANNELS, groups, generator=generator).to(torch.float16) / 64
    return codes, zeros, scales


def expand(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int
) -> torch.Tensor:
    """The weights: exact in float64, rounded once."""
    steps = codes - zeros.repeat_interleave(group, 1)
    return (steps.double() * scales.double().repeat_interleave(group, 1)).to(torch.bfloat16)


def as_words(values: torch.Tensor) -> torch.Tensor:
    """Unsigned words of 32 bits as int32."""
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def write(
    path: Path, parts: dict[str, torch.Tensor], expanded: torch.Tensor, settings: dict[str, Any]
) -> None:
    """One case."""
    tensors = {f"layer.{name}": part.contiguous() for name, part in parts.items()}
    save_file(
        {**tensors, "expanded": expanded.contiguous()},
        path,
        metadata={"quantization_config": json.dumps(settings)},
    )


if __name__ == "__main__":
    sys.exit(main())
