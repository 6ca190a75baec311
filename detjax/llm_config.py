# SPDX-License-Identifier: Apache-2.0
"""What an `LLM` or a command runs with, as values and as lines for people."""

from dataclasses import dataclass
from pathlib import Path

from detjax.defaults import NO_CAST
from detjax.engine.config import EngineConfig
from detjax.engine.running.memory import cache_bytes
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.config import ModelConfig
from detjax.models.heads.head import AnyDraftModel
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

_MODES = {
    "invariant": "invariant: every step uses canonical kernels",
    "dvr": "dvr: drafts by fast kernels, verified by canonical ones",
    "fast": "fast: no claim; digests may differ from run to run",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LLMConfig:
    """What an `LLM` runs with, chosen or asked for; `print` shows it.

    Attributes:
        name: As it was asked for.
        folder: Where its files lie.
        model: Its dimensions.
        profile: Every choice of numerics.
        weight_cast: What the weights were rounded from and to when they were read.
        fingerprint: Of everything that decides a bit.
        backend: Which kernels run.
        backend_reason: Why these.
        dp: Replicas.
        tp: Devices that share each layer.
        engine: Sizes and policies, none of which changes a bit.
        cache_bytes: Of the cache, over all devices, a draft model's included.
        speculative: Where its drafts come from, if `speculative_config` says it.
    """

    name: str
    folder: Path
    model: ModelConfig
    profile: NumericsProfile
    weight_cast: str
    fingerprint: str
    backend: Backend
    backend_reason: str
    dp: int
    tp: int
    engine: EngineConfig
    cache_bytes: int
    speculative: SpeculativeConfig | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        engine: EngineConfig,
        *,
        name: str,
        folder: Path,
        backend_reason: str,
        speculative: SpeculativeConfig | None = None,
        draft_model: AnyDraftModel | None = None,
    ) -> "LLMConfig":
        """Return what an engine on a model runs with."""
        return cls(
            name=name,
            folder=folder,
            model=model.config,
            profile=model.profile,
            weight_cast=model.weight_cast,
            fingerprint=model.fingerprint,
            backend=model.backend,
            backend_reason=backend_reason,
            dp=model.mesh.shape[DP_AXIS],
            tp=model.mesh.shape[TP_AXIS],
            engine=engine,
            cache_bytes=cache_bytes(
                model, engine.num_pages, draft_model, num_local_pages=engine.num_local_pages
            ),
            speculative=speculative,
        )

    def facts(self) -> dict[str, str]:
        """Return what runs, and what decides its bits, as lines for people."""
        model, engine, profile = self.model, self.engine, self.profile
        cast = "" if self.weight_cast == NO_CAST else f" (cast from {self.weight_cast})"
        count = engine.num_local_pages
        local = f" ({count} of layers with a window or linear attention)" if count else ""
        cache = f", {profile.kv_cache_dtype} cache" if profile.has_fp8_cache else ""
        return {
            "model": f"{self.name}: {model.family}, {model.num_layers} layers of "
            f"{model.hidden_size}, vocabulary {model.vocab_size}, context "
            f"{model.max_position_embeddings}",
            "numerics": f"{profile.weight_dtype} weights{cast}, {profile.compute_dtype} compute"
            f"{cache}, fingerprint {self.fingerprint}",
            "mode": _MODES[engine.mode],
            **({} if self.speculative is None else {"drafts": str(self.speculative)}),
            "backend": f"{self.backend.value} ({self.backend_reason})",
            "mesh": f"dp {self.dp} x tp {self.tp}",
            "batch": f"{engine.batch_size} at once, prompts in chunks of {engine.prefill_chunk} "
            f"tokens, room for {engine.max_len}"
            + (f", {engine.decode_steps} steps a launch" if engine.decode_steps > 1 else ""),
            "cache": f"{engine.num_pages} pages{local}, {self.cache_bytes / 2**30:.2f} GiB",
        }

    def __str__(self) -> str:
        """Return a line for each fact."""
        return "\n".join(f"{name:<11} {value}" for name, value in self.facts().items())
