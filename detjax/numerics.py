# SPDX-License-Identifier: Apache-2.0
"""Every choice that can change a bit of an answer, in one frozen type.

What decides a bit is the order of an element's additions, whether a multiply and an add are fused,
and where it is rounded. The functions here that pick a reduction structure take dimensions of the
model and the profile. Neither has a field for a batch, a schedule or a mesh, so a structure that
depends on one of them cannot be written down.

The specification is `docs/numerics.md`.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jaxlib

import detjax
from detjax.compilation.source import cpu_arch, source_hash
from detjax.compilation.toolchain import DATA_DIR_FLAG, toolchain
from detjax.defaults import AUTO, FP8_CACHE, NO_CAST, check_cache_dtype, kv_cache_dtype_of

NUMERICS_VERSION = 2
"""Raised by every change that alters an output bit; each has a Bits entry in CHANGELOG.md."""

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}

LOG2_E = 1.4426950408889634
"""log2(e): the softmax of attention takes powers of two of scores that are multiplied by it."""

NOT_QUANTIZED = "none"
"""The `quantization` of a model whose checkpoint holds its weights themselves."""

MOST_OF_A_SIZE = 2**16
"""Of leaves and blocks of a profile. A receipt names them, and larger ones would take hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsProfile:
    """The numerics of a run: same profile, build and inputs, same bits.

    Attributes:
        version: Which revision of the specification this follows.
        num_leaves: Most leaves of a row-parallel sum (o_proj, down_proj); bounds tp.
        attention_block: Keys of one online-softmax step; also the tokens of a cache page.
        attention_split: Keys of one split; splits are merged left to right.
        vocab_block: Logits of one partial sum of the log-softmax.
        weight_dtype: What weights are stored in.
        compute_dtype: What activations, the residual stream and the cache are rounded to.
            Products and sums are float32 in either. float32 with 16-bit weights is the LayerCast
            profile (Yuan et al. 2025, arXiv:2506.09501).
        kv_cache_dtype: What keys and values are rounded to when they are written to the cache,
            which is what all queries read: "auto" for the compute dtype, or "fp8_e4m3".

    Raises:
        ValueError: If a field is out of range, float32 weights would be rounded to bfloat16, or
            8-bit keys do not go with float32 compute.
    """

    version: int = NUMERICS_VERSION
    num_leaves: int = 8
    attention_block: int = 128
    attention_split: int = 512
    vocab_block: int = 128
    weight_dtype: str = "bfloat16"
    compute_dtype: str = "bfloat16"
    kv_cache_dtype: str = AUTO

    def __post_init__(self):
        """Refuse what is not specified."""
        if self.version != NUMERICS_VERSION:
            raise ValueError(
                f"numerics version {self.version} is not in this build, which has "
                f"{NUMERICS_VERSION}; install the detjax release that had it"
            )
        for name in ("num_leaves", "attention_block", "attention_split", "vocab_block"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_OF_A_SIZE or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two up to {MOST_OF_A_SIZE}")
        if self.attention_split % self.attention_block:
            raise ValueError(
                f"attention_split={self.attention_split} must be a multiple of "
                f"attention_block={self.attention_block}"
            )
        for name in ("weight_dtype", "compute_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {list(DTYPES)}")
        if self.weight_dtype == "float32" and self.compute_dtype == "bfloat16":
            raise ValueError(
                "float32 weights with bfloat16 compute would round the weights inside the "
                "products; use dtype='bfloat16', or activations of float32"
            )
        if kv_cache_dtype_of(self.kv_cache_dtype) != self.kv_cache_dtype:
            raise ValueError(f"{self.kv_cache_dtype=} must be {FP8_CACHE!r} in a profile")
        check_cache_dtype(self.kv_cache_dtype, self.compute_dtype)

    @property
    def activation_dtype(self) -> jnp.dtype:
        """`compute_dtype` as a JAX dtype."""
        return jnp.dtype(DTYPES[self.compute_dtype])

    @classmethod
    def of(cls, dtype: str, kv_cache_dtype: str = AUTO) -> "NumericsProfile":
        """The profile of options: weights and compute of a dtype, and a cache by vLLM's names."""
        cache = kv_cache_dtype_of(kv_cache_dtype)
        return cls(weight_dtype=dtype, compute_dtype=dtype, kv_cache_dtype=cache)

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the cache holds keys and values as float8_e4m3fn."""
        return self.kv_cache_dtype == FP8_CACHE

    @property
    def cache_dtype(self) -> jnp.dtype:
        """What an array of keys and values is stored as: the bits of a float8 as uint8."""
        # WHY: XLA's CPU backend converts a whole array of float8 to scatter into it.
        return jnp.dtype(jnp.uint8) if self.has_fp8_cache else self.activation_dtype

    def facts(self) -> dict[str, object]:
        """The fields by name, without the dtype of the cache where that is "auto"."""
        values = dataclasses.asdict(self)
        if self.kv_cache_dtype == AUTO:
            del values["kv_cache_dtype"]
        return values

    @property
    def param_dtype(self) -> jnp.dtype:
        """`weight_dtype` as a JAX dtype."""
        return jnp.dtype(DTYPES[self.weight_dtype])


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How a linear layer sums over K: `num_leaves` equal runs of `leaf_len`, added as a tree."""

    num_leaves: int
    leaf_len: int


def tree_reduction(k_len: int, profile: NumericsProfile) -> Reduction:
    """The leaves of a row-parallel sum over `k_len` (o_proj, down_proj).

    The largest power of two up to `profile.num_leaves` for which a leaf is a multiple of 16, the
    depth of one tensor-core instruction; 1 where there is none. A rule of K alone.
    """
    leaves = profile.num_leaves
    while leaves > 1 and k_len % (16 * leaves):
        leaves //= 2
    return Reduction(num_leaves=leaves, leaf_len=k_len // leaves)


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """What compiled and ran the kernels: no claim is made across two different builds.

    Attributes:
        detjax: Its version.
        source: `source_hash()`: another line of detjax's code is another build.
        jax: Its version.
        jaxlib: Its version.
        backend: Whose kernels: "portable" or "sm90".
        arch: Of the processor or the GPU.
        compiler: Its version, and the XLA flags that may change a bit.
        toolchain: On a GPU `toolchain.toolchain()`, between semicolons: the plugin, ptxas and
            libdevice by their bytes. Empty on a CPU, whose compiler is in jaxlib.
    """

    detjax: str
    source: str
    jax: str
    jaxlib: str
    backend: str
    arch: str
    compiler: str
    toolchain: str = ""

    @classmethod
    def current(cls, backend: str, device: jax.Device) -> "Build":
        """Describe this process. `backend` is the kernels' backend, `device` one that runs them."""
        if device.platform == "cpu":
            arch, compiler, files = cpu_arch(), "xla:cpu", ()
        else:
            files = toolchain()
            arch = f"{device.device_kind} sm_{device.compute_capability}"
            compiler = device.client.platform_version.replace("\n", " ")
        flags = _flags_that_may_count(os.environ.get("XLA_FLAGS", ""))
        return cls(
            detjax=detjax.__version__,
            source=source_hash(),
            jax=jax.__version__,
            jaxlib=jaxlib.__version__,
            backend=backend,
            arch=arch,
            compiler=" ".join([compiler, *sorted(flags)]),
            toolchain="; ".join(files),
        )

    def facts(self) -> dict[str, str]:
        """The fields by name, without a toolchain where there is none."""
        values = dataclasses.asdict(self)
        return values if self.toolchain else {k: v for k, v in values.items() if k != "toolchain"}


def _flags_that_may_count(text: str) -> list[str]:
    """XLA flags, the last of each name, less those of dumps, device counts and CUDA's folder.

    What lies in that folder counts by its bytes (`toolchain`).
    """
    flags = {flag.partition("=")[0]: flag for flag in text.split()}
    return [
        flag
        for name, flag in flags.items()
        if "device_count" not in name and not name.startswith(("--xla_dump_", DATA_DIR_FLAG))
    ]


def fingerprint(
    profile: NumericsProfile,
    build: Build,
    *,
    weight_cast: str = NO_CAST,
    quantization: str = NOT_QUANTIZED,
) -> str:
    """Hash the profile and the build to 16 hexadecimal digits.

    Covers everything that may change a bit and nothing that may not: mesh, batch, schedule and
    serving mode are left out. Every output that makes a claim carries it.

    Args:
        profile: The numerics of the run.
        build: What compiled it.
        weight_cast: Such as "float16 to bfloat16": what the weights were asked to be rounded from
            and to when they were read.
        quantization: The format that the weights were expanded from.
    """
    parts: dict[str, object] = {
        "profile": profile.facts(),
        "build": build.facts(),
    }
    if weight_cast != NO_CAST:
        parts["weight_cast"] = weight_cast
    if quantization != NOT_QUANTIZED:
        parts["quantization"] = quantization
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
