# SPDX-License-Identifier: Apache-2.0
"""One canonical answer: bit-identical inference for language models in JAX and Pallas.

Names are imported when first used, so that `python -m detjax.generate --help` need not start JAX.
Import detjax before JAX starts: it sets the compiler flag that the claims rest on.
"""

import importlib
from typing import TYPE_CHECKING

from detjax.compilation.xla_flags import configure_xla

configure_xla()

__version__ = "0.2.0"

if TYPE_CHECKING:  # so that editors and type checkers know the names
    from detjax.engine.async_engine import AsyncEngine
    from detjax.engine.config import EngineConfig
    from detjax.engine.engine import Engine
    from detjax.engine.lora_request import LoRARequest
    from detjax.engine.outputs.completion import Completion, CompletionOutput
    from detjax.engine.outputs.prompt_output import PromptOutput
    from detjax.engine.outputs.request_output import PromptLogprob
    from detjax.engine.replicated_engine import ReplicatedEngine
    from detjax.engine.requests.request import Request
    from detjax.engine.requests.sampling_params import SamplingParams
    from detjax.engine.sampling.structured_output import StructuredOutput
    from detjax.llm import LLM
    from detjax.models.bundled import bundled_model_path
    from detjax.models.loading import load_model
    from detjax.models.tokenizer import Tokenizer
    from detjax.numerics import NumericsProfile
    from detjax.pallas_kernels.backend import Backend
    from detjax.pallas_kernels.backend_choice import choose_backend
    from detjax.parallel.mesh import configure_virtual_devices, make_mesh

_HOME = {
    "AsyncEngine": "detjax.engine.async_engine",
    "Backend": "detjax.pallas_kernels.backend",
    "Completion": "detjax.engine.outputs.completion",
    "CompletionOutput": "detjax.engine.outputs.completion",
    "Engine": "detjax.engine.engine",
    "EngineConfig": "detjax.engine.config",
    "LLM": "detjax.llm",
    "LoRARequest": "detjax.engine.lora_request",
    "NumericsProfile": "detjax.numerics",
    "PromptLogprob": "detjax.engine.outputs.request_output",
    "PromptOutput": "detjax.engine.outputs.prompt_output",
    "ReplicatedEngine": "detjax.engine.replicated_engine",
    "Request": "detjax.engine.requests.request",
    "SamplingParams": "detjax.engine.requests.sampling_params",
    "StructuredOutput": "detjax.engine.sampling.structured_output",
    "Tokenizer": "detjax.models.tokenizer",
    "bundled_model_path": "detjax.models.bundled",
    "choose_backend": "detjax.pallas_kernels.backend_choice",
    "configure_virtual_devices": "detjax.parallel.mesh",
    "load_model": "detjax.models.loading",
    "make_mesh": "detjax.parallel.mesh",
}

__all__ = [
    "AsyncEngine",
    "Backend",
    "Completion",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "LLM",
    "LoRARequest",
    "NumericsProfile",
    "PromptLogprob",
    "PromptOutput",
    "ReplicatedEngine",
    "Request",
    "SamplingParams",
    "StructuredOutput",
    "Tokenizer",
    "bundled_model_path",
    "choose_backend",
    "configure_virtual_devices",
    "load_model",
    "make_mesh",
]


def __getattr__(name: str):
    """Import a public name from its home."""
    if name not in _HOME:
        raise AttributeError(f"detjax has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, and those of the module."""
    return sorted({*globals(), *__all__})
