# SPDX-License-Identifier: Apache-2.0
"""A model folder without weights, a fake engine, and the command run with both."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from detjax import generate
from detjax.cli.model import OpenModel
from detjax.cli.processes import Processes
from detjax.engine.config import EngineConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import Completion, best
from detjax.engine.outputs.request_output import FinishReason, TokenEvent
from detjax.engine.requests.request import Request
from detjax.engine.scheduling.workload import Workload
from detjax.engine.trace import NO_TRACE, TracesEvents
from detjax.llm import LLM
from detjax.llm_config import LLMConfig
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.progress import Progress
from detjax.proof.identity import Identity
from detjax.testing.folders import byte_tokenizer

Answer = Callable[[Request, int], list[int]]


class Toy:
    """A model with one token a byte, then begin and end."""

    context = 64
    end = 257
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "bfloat16",
    }

    @staticmethod
    def backend() -> tokenizers.Tokenizer:
        """The tokenizer, as its library has it."""
        made = byte_tokenizer()
        made.add_special_tokens(["<s>", "</s>"])
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair=None, special_tokens=[("<s>", 256)]
        )
        return made

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a text, without the one that begins it."""
        return self.backend().encode(text, add_special_tokens=False).ids

    def write_model(self, folder: Path, *, chat_template: str | None = None) -> Path:
        """A folder with everything but weights."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        self.backend().save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        if chat_template is not None:
            config["chat_template"] = chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def echo(self, request: Request, seq: int) -> list[int]:
        """Answer with the prompt and the number of the sequence, then end."""
        prompt = [i for i in request.prompt_token_ids if i < 256]
        return [*prompt, *self.ids_of(str(seq)), self.end]


IDENTITY = Identity(
    model={"name": "toy", "weight_cast": "none"},
    numerics={"fingerprint": "0123456789abcdef"},
    build={"backend": "portable"},
)


class FakeEngine:
    """Says what `answer` says, a token of each sequence in turn, as an engine would."""

    def __init__(self, answer: Answer, config: EngineConfig, flip: tuple[int, int]):
        self._answer = answer
        self._config = config
        self._flip = flip  # (batch size, token position) of which a logprob's last bit is wrong

    def stats(self) -> EngineStats:
        return EngineStats(compile_s=0.5, prefill_tokens=10)

    def compile(
        self,
        progress: Progress,
        requests: Sequence[Request] | None = None,
        *,
        checked: Progress,
    ) -> None:
        names = ["prefill", "decode", "choice"]
        for told in (progress, checked):
            for done, name in enumerate(names, start=1):
                told(name, done, len(names))

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_token: Callable[[TokenEvent], bool],
        on_completion: Callable[[Completion], None],
    ) -> list[Completion]:
        keys = [
            (r, s)
            for r, request in enumerate(requests)
            for s in range(request.sampling.num_sequences)
        ]
        made: dict[tuple[int, int], list[TokenEvent]] = {key: [] for key in keys}
        reasons: dict[tuple[int, int], FinishReason] = {}
        done: dict[tuple[int, int], Completion] = {}
        for key in keys:
            if requests[key[0]].sampling.max_tokens == 0:
                reasons[key] = FinishReason.LENGTH
                done[key] = self._completion(requests, key, [], reasons[key])
                on_completion(done[key])
        while len(reasons) < len(keys):
            for key in [key for key in keys if key not in reasons][: self._config.batch_size]:
                event = self._event(requests[key[0]], key, len(made[key]))
                made[key].append(event)
                sampling = requests[key[0]].sampling
                assert not sampling.stop, "an engine knows no text"
                ends = sampling.end_token_ids({Toy.end})
                if on_token(event) or event.token_id in ends:
                    reasons[key] = FinishReason.STOP
                elif len(made[key]) == sampling.max_tokens:
                    reasons[key] = FinishReason.LENGTH
                if key in reasons:
                    done[key] = self._completion(requests, key, made[key], reasons[key])
                    on_completion(done[key])
        by_request = ([done[k] for k in keys if k[0] == r] for r in range(len(requests)))
        return [
            c
            for request, made in zip(requests, by_request, strict=True)
            for c in best(made, request.sampling)
        ]

    def _event(self, request: Request, key: tuple[int, int], position: int) -> TokenEvent:
        answer = self._answer(request, key[1])
        token_id = answer[position % len(answer)]
        logprob = np.float32(-0.1) * np.float32(1 + token_id + position)
        if self._flip == (self._config.batch_size, position):
            logprob = np.nextafter(logprob, np.float32(0))
        top = [(token_id, logprob), (0, np.float32(-9))][: request.sampling.logprobs]
        return TokenEvent(
            request_idx=key[0],
            sequence_idx=key[1],
            token_id=token_id,
            logprob=logprob,
            top_logprobs=tuple(top),
        )

    def _completion(self, requests, key, events, reason) -> Completion:
        return Completion(
            request_idx=key[0],
            sequence_idx=key[1],
            prompt_token_ids=requests[key[0]].prompt_token_ids,
            token_ids=tuple(e.token_id for e in events),
            logprobs=tuple(e.logprob for e in events),
            top_logprobs=tuple(e.top_logprobs for e in events),
            finish_reason=reason,
        )


class FakeLLM(LLM):
    """An `LLM` without weights, whose engine says what `answer` says."""

    def __init__(self, config: LLMConfig, tokenizer: Tokenizer, engine: Any):
        self.config, self.tokenizer, self.engine = config, tokenizer, engine

    def identity(self) -> Identity:
        return IDENTITY


@dataclass(frozen=True, kw_only=True)
class FakeModel(OpenModel):
    """A model without weights.

    Attributes:
        answer: Of its engines.
        flip: As `FakeEngine` has it.
        sizes: Those of the engines that were made.
    """

    answer: Answer
    flip: tuple[int, int] = (0, 0)
    sizes: list[EngineConfig] = field(default_factory=list)
    model: Any = None
    backend_reason: str = "a test"
    processes: Processes = Processes()

    def size_engine(self, asked: Mapping[str, Any], work: Workload) -> EngineConfig:
        """What is asked, and the defaults, with room for the work."""
        return EngineConfig(**{"max_len": work.longest, **asked})

    def config_of(self, engine: EngineConfig) -> LLMConfig:
        return LLMConfig(
            name=self.args.model,
            folder=self.files.folder,
            model=self.files.config,
            profile=NumericsProfile(),
            weight_cast="none",
            fingerprint="0123456789abcdef",
            backend=Backend.PORTABLE,
            backend_reason=self.backend_reason,
            dp=self.args.dp,
            tp=self.args.tp,
            engine=engine,
            cache_bytes=0,
        )

    def make_llm(self, engine: EngineConfig, *, tracer: TracesEvents = NO_TRACE) -> FakeLLM:
        self.sizes.append(engine)
        fake = FakeEngine(self.answer, engine, self.flip)
        return FakeLLM(self.config_of(engine), self.files.tokenizer, fake)


@pytest.fixture
def toy() -> Toy:
    """A model folder's tokens, configuration and files."""
    return Toy()


@pytest.fixture
def fake_model() -> type[FakeModel]:
    """A model whose engines say what they are told to."""
    return FakeModel


@pytest.fixture
def command(tmp_path, toy):
    """Run the command on a model folder: (options..., answer=, flip=, chat_template=) -> code."""

    def run(
        *argv: str,
        answer: Answer = toy.echo,
        flip: tuple[int, int] = (0, 0),
        chat_template: str | None = None,
        shapes: list[EngineConfig] | None = None,
    ) -> int:
        folder = toy.write_model(tmp_path / "model", chat_template=chat_template)

        def open_model(args, files, progress, max_len) -> OpenModel:
            assert files.folder == folder
            sizes = [] if shapes is None else shapes
            return FakeModel(args=args, files=files, answer=answer, flip=flip, sizes=sizes)

        return generate.main(["--model", str(folder), *argv], open_model=open_model)

    return run
