# SPDX-License-Identifier: Apache-2.0
"""`quantization_config` of a config.json: which format its weights have, strictly read.

Every key is known or refused, as in `hf_config`: a key that is skipped may be one that changes a
weight.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

INERT = frozenset({"ignore", "modules_to_not_convert", "quantization_status", "version"})
"""Keys that change no weight. What is not quantised is seen in the files: a tensor has scales, or
it has not."""

LOAD_INSTEAD = "load the checkpoint that is not quantised, or one in another format"
LARGEST_SIZE = 2**20
"""Of a group or a block; more is a mistake."""

MXFP4 = "mxfp4"
"""Method and layout of experts of 4 bits in blocks of 32 inputs, which share an exponent."""

GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 0, None: 1, "": 1}
"""What is added to a stored zero point, by `checkpoint_format`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScheme:
    """How the weights of a checkpoint are stored.

    Attributes:
        method: `quant_method` and, of compressed-tensors, the format.
        layout: "plain" (one element a weight), "packed" (compressed-tensors, int32 along the input
            channels), "awq", "gptq" or "mxfp4".
        num_bits: Of a weight: 8 or 4.
        is_float: Whether a weight is float8_e4m3fn, or of MXFP4 float4_e2m1fn; else a signed or
            unsigned integer.
        block: Output and input channels that share one scale; 0 is all of them.
        has_zero_points: Whether a zero point is stored beside each scale.
        zero_offset: What is added to a stored zero point.
        activations: What the checkpoint does to activations, such as "8-bit float, dynamic by
            token"; empty if nothing.
        activation_bound: The most that a row's greatest value counts as; 0 for any.
        is_w8a8: Whether that is done; else activations stay as they are.
    """

    method: str
    layout: str
    num_bits: int
    is_float: bool
    block: tuple[int, int]
    has_zero_points: bool = False
    zero_offset: int = 0
    activations: str = ""
    activation_bound: float = 0.0
    is_w8a8: bool = False

    def __str__(self) -> str:
        """What identity and fingerprint say of it."""
        kind = "float8_e4m3fn" if self.is_float else f"int{self.num_bits}"
        if self.layout == MXFP4:
            kind = "float4_e2m1fn"
        channels = {(0, 0): "tensor", (1, 0): "output channel"}
        rows, columns = self.block
        share = channels.get(self.block) or (
            f"{columns} input channels" if rows == 1 else f"{rows} x {columns} block"
        )
        zero = " and a zero point" if self.has_zero_points else ""
        text = f"{self.method}: {kind} with a scale{zero} for each {share}"
        if self.is_w8a8:
            bound = f", peaks of at most {self.activation_bound:g}" if self.activation_bound else ""
            return f"{text}{W8A8_TEXT} {self.activations}{bound}"
        text += ", expanded to bfloat16"
        if self.activations:
            text += f"; activations stay bfloat16 where the checkpoint asks for {self.activations}"
        return text


W8A8_TEXT = ", multiplied with activations of"
"""Says in a fingerprint that a product's activations have 8 bits."""


STATIC = "static by tensor"
"""Of activations that have one scale, which the checkpoint holds."""


def _w8a8_activations(scheme: QuantizationScheme, group_len: int) -> tuple[str, ...]:
    """What detjax can do to the activations of such weights; () if it cannot multiply them."""
    rows, columns = scheme.block
    if scheme.layout != "plain" or scheme.num_bits != 8 or scheme.has_zero_points:
        return ()
    if not columns:
        kind = "float" if scheme.is_float else "int"
        return f"8-bit {kind}, dynamic by token", f"8-bit {kind}, {STATIC}"
    if not scheme.is_float or columns != group_len or not rows:
        return ()
    return (f"8-bit float, {_by_group(columns)}",)


def _by_group(columns: int) -> str:
    """Of activations whose groups of channels have scales."""
    return f"dynamic by group of {columns}"


def weights_option(quantization: str) -> str:
    """The `quantized_weights` that gives the bits of a fingerprint's quantisation."""
    return "w8a8" if W8A8_TEXT in quantization else "auto"


def as_w8a8(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme with the activations that the checkpoint asks for.

    Raises:
        ValueError: If it asks for others than 8-bit ones of the weights' kind, dynamic by token,
            static by tensor, or for blocks dynamic by group; or its weights are not symmetric ones
            of 8 bits with one scale a tensor or output channel, or float8 with one for blocks of
            `FLOAT8_CHUNK` columns.
    """
    # WHY: it imports JAX, and commands read configurations before that.
    from detjax.pallas_kernels.linear.quantized import FLOAT8_CHUNK

    wanted = _w8a8_activations(scheme, FLOAT8_CHUNK)
    if not wanted:
        refused = f"weights of the format {str(scheme)!r}"
    elif scheme.activations not in wanted:
        others = " or ".join(map(repr, wanted))
        refused = f"activations of {scheme.activations or 'bfloat16'!r}, not {others}"
    else:
        return dataclasses.replace(scheme, is_w8a8=True)
    raise ValueError(
        "quantized_weights='w8a8' needs symmetric 8-bit weights with a scale for each tensor or "
        f"output channel, or float8 with one for blocks of {FLOAT8_CHUNK} input channels, and "
        f"activations of the same kind; this checkpoint has {refused}; use "
        "quantized_weights='auto'"
    )


def parse_quantization(config: Mapping[str, Any]) -> QuantizationScheme | None:
    """Read what a parsed config.json says of quantisation.

    Args:
        config: The parsed file. compressed-tensors called the key `compression_config` once.

    Returns:
        None if the weights are not quantised.

    Raises:
        ValueError: If the format, or a setting of it, is not supported; the message names it.
    """
    given = [config.get(key) for key in ("quantization_config", "compression_config")]
    found = [value for value in given if value is not None]
    if not found:
        return None
    settings = found[0]
    if not isinstance(settings, Mapping) or len(found) > 1:
        raise ValueError(f"quantization_config={found!r:.120} must be one JSON object")
    method = settings.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ValueError(
            f"quantization_config.quant_method={method!r:.60} is not supported; detjax reads "
            f"{', '.join(sorted(_READERS))} ({LOAD_INSTEAD})"
        )
    return reader(_Settings(settings, f"quantization_config of {method}"))


class _Settings:
    """A JSON object of which every key must be asked for."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where
        self._unread = set(values) - INERT - {"quant_method"}

    def take(self, key: str, default: Any = None) -> Any:
        """A value that the caller checks."""
        self._unread.discard(key)
        return self._values.get(key, default)

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """A value that must be one of some."""
        value = self.take(key, default)
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise ValueError(
                f"{self._where}: {key}={value!r:.80} is not supported, only "
                f"{' or '.join(repr(each) for each in allowed)} ({LOAD_INSTEAD})"
            )
        return value

    def size(self, key: str, *, default: Any = None) -> int:
        """A positive integer."""
        value = self.take(key, default)
        return _positive(f"{self._where}: {key}", value)

    def inside(self, key: str) -> "_Settings":
        """An object inside this one."""
        value = self.take(key)
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._where}: {key}={value!r:.80} must be a JSON object")
        return _Settings(value, f"{self._where}, {key}")

    def each_inside(self, key: str) -> list["_Settings"]:
        """The objects that stand inside an object."""
        groups = self.inside(key)
        return [groups.inside(name) for name in groups._values]

    def all_read(self) -> None:
        """Refuse what nobody asked for."""
        if self._unread:
            key = min(self._unread)
            raise ValueError(
                f"{self._where}: {key}={self._values[key]!r:.80} is not a key that detjax knows, "
                f"and it may change the weights ({LOAD_INSTEAD})"
            )


def _compressed_tensors(settings: _Settings) -> QuantizationScheme:
    format_ = settings.one_of(
        "format", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
    )
    settings.one_of("kv_cache_scheme", None)
    settings.one_of("transform_config", None, {})
    if settings.take("sparsity_config", {}) not in ({}, None, {"format": "dense"}):
        settings.one_of("sparsity_config", {})
    settings.take("global_compression_ratio")
    schemes = [_group(group, format_) for group in settings.each_inside("config_groups")]
    settings.all_read()
    if len(set(schemes)) != 1:
        raise ValueError(
            f"quantization_config: {len(schemes)} config_groups of {len(set(schemes))} kinds; only "
            f"one kind for all layers is supported ({LOAD_INSTEAD})"
        )
    return schemes[0]


def _group(group: _Settings, format_: str) -> QuantizationScheme:
    """One of compressed-tensors' `config_groups`. Its `targets` are seen in the files."""
    group.take("targets")
    group.one_of("format", format_, None)
    group.one_of("output_activations", None)
    activations = _activations(group)
    weights = group.inside("weights")
    is_float = weights.one_of("type", "int", "float", default="int") == "float"
    num_bits = weights.one_of("num_bits", *((8,) if is_float else (8, 4)))
    has_zero_points = not weights.one_of("symmetric", True, False, default=True)
    block = _weight_block(weights)
    weights.one_of("dynamic", False, default=False)
    # Columns keep their places under "weight" and "static": only "group" permutes them.
    weights.one_of("actorder", None, False, "weight", "static")
    weights.one_of("scale_dtype", None, "torch.bfloat16", "torch.float16", "torch.float32")
    weights.one_of("zp_dtype", None, "torch.int8", "torch.int32", "torch.uint8")
    for observer in ("observer", "observer_kwargs"):
        weights.take(observer)
    weights.all_read()
    group.all_read()
    return QuantizationScheme(
        method=f"compressed-tensors {format_}",
        layout="packed" if format_ == "pack-quantized" else "plain",
        num_bits=num_bits,
        is_float=is_float,
        block=block,
        has_zero_points=has_zero_points,
        activations=activations,
    )


def _weight_block(weights: _Settings) -> tuple[int, int]:
    """Output and input channels that share a scale."""
    strategy = weights.one_of("strategy", "tensor", "channel", "group", "block")
    group_size = weights.take("group_size")
    shape = weights.take("block_structure")
    if strategy == "group":
        return (1, _positive("weights: group_size", group_size))
    if group_size not in (None, -1):
        raise ValueError(f"weights: {strategy=} does not go with {group_size=}")
    if strategy == "block":
        return _block_shape("weights: block_structure", shape)
    return {"tensor": (0, 0), "channel": (1, 0)}[strategy]


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < LARGEST_SIZE:
        raise ValueError(f"{name}={value!r:.80} must be an integer from 1 to {LARGEST_SIZE - 1}")
    return value


def _block_shape(name: str, shape: Any) -> tuple[int, int]:
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"{name}={shape!r:.80} must be two positive integers")
    return (_positive(name, shape[0]), _positive(name, shape[1]))


def _activations(group: _Settings) -> str:
    """What a group of compressed-tensors does to the inputs of its layers, in words."""
    if group.take("input_activations") is None:
        return ""
    inputs = group.inside("input_activations")
    kind = inputs.one_of("type", "int", "float", default="int")
    inputs.one_of("num_bits", 8)
    strategy = inputs.one_of("strategy", "tensor", "token", "group")
    dynamic = inputs.one_of("dynamic", True, False, "local", default=False)
    is_symmetric = inputs.one_of("symmetric", True, False, default=True)
    for key in (
        *("block_structure", "actorder", "observer"),
        *("observer_kwargs", "scale_dtype", "zp_dtype"),
    ):
        inputs.take(key)
    group_size = inputs.take("group_size")
    inputs.all_read()
    zeros = "" if is_symmetric else " with zero points"
    if strategy == "group" and dynamic is True:
        share = _by_group(_positive("input_activations: group_size", group_size))
    else:
        share = f"{'dynamic' if dynamic else 'static'} by {strategy}"
    return f"8-bit {kind}{zeros}, {share}"


def _fp8(settings: _Settings) -> QuantizationScheme:
    settings.one_of("fmt", "e4m3", None)
    settings.one_of("scale_fmt", None)
    scheme = settings.one_of("activation_scheme", "dynamic", "static")
    shape = settings.take("weight_block_size")
    settings.take("dequantize")
    settings.all_read()
    block = (0, 0) if shape is None else _block_shape("weight_block_size", shape)
    # A checkpoint of blocks has activations of groups that are as long as a block is wide.
    share = STATIC if scheme == "static" else _by_group(block[1]) if block[1] else "dynamic"
    return QuantizationScheme(
        method="fp8",
        layout="plain",
        num_bits=8,
        is_float=True,
        block=block,
        activations=f"8-bit float, {share}",
    )


def _fbgemm_fp8(settings: _Settings) -> QuantizationScheme:
    bound = settings.take("activation_scale_ub")
    is_number = type(bound) in (int, float) and 0 < bound < math.inf
    if bound is not None and not is_number:
        raise ValueError(f"fbgemm_fp8: activation_scale_ub={bound!r:.80} must be a positive number")
    settings.all_read()
    return QuantizationScheme(
        method="fbgemm_fp8",
        layout="plain",
        num_bits=8,
        is_float=True,
        block=(1, 0),
        activations="8-bit float, dynamic by token",
        activation_bound=float(bound or 0),
    )


def _awq(settings: _Settings) -> QuantizationScheme:
    settings.one_of("version", "gemm", "GEMM", default="gemm")
    num_bits = settings.one_of("bits", 4)
    has_zero_points = settings.one_of("zero_point", True)
    group_size = settings.size("group_size")
    for key in ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"):
        settings.take(key)
    settings.all_read()
    return QuantizationScheme(
        method="awq",
        layout="awq",
        num_bits=num_bits,
        is_float=False,
        block=(1, group_size),
        has_zero_points=has_zero_points,
    )


def _gptq(settings: _Settings) -> QuantizationScheme:
    num_bits = settings.one_of("bits", 4, 8)
    settings.one_of("desc_act", False, default=False)
    settings.one_of("lm_head", False, None)
    settings.one_of("dynamic", None, {})
    version = settings.one_of("checkpoint_format", *GPTQ_VERSIONS)
    group_size = settings.take("group_size")
    columns = 0 if group_size == -1 else settings.size("group_size")
    for key in (
        *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent"),
        *("dataset", "exllama_config", "max_input_length", "meta", "model_seqlen", "static_groups"),
        *("module_name_preceding_first_block", "modules_in_block_to_quantize", "pack_dtype"),
        *("pad_token_id", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
    ):
        settings.take(key)
    settings.all_read()
    return QuantizationScheme(
        method="gptq",
        layout="gptq",
        num_bits=num_bits,
        is_float=False,
        block=(1, columns),
        has_zero_points=True,
        zero_offset=GPTQ_VERSIONS[version],
    )


def _mxfp4(settings: _Settings) -> QuantizationScheme:
    settings.one_of("dequantize", True, False, default=False)
    settings.all_read()
    return QuantizationScheme(method=MXFP4, layout=MXFP4, num_bits=4, is_float=True, block=(1, 32))


_READERS: dict[str, Callable[[_Settings], QuantizationScheme]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    MXFP4: _mxfp4,
}
