# SPDX-License-Identifier: Apache-2.0
"""Google's Tunix over detjax: its learners train on exactly what was sampled.

Tunix samples with a rollout and trains an actor, an nnx module whose logits it normalises.
`DetjaxRollout` is the engine, `DetjaxActor` the training forward. Both compute the same bits, so
Tunix's own `sampler_trainer/logp_diff_max` is 0.0. docs/training.md says which versions fit.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.layers import ForwardContext
from detjax.models.loading import LoadedModel
from detjax.models.params import tensor_specs
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.reading import readings
from detjax.training.batch import Batch
from detjax.training.forward import final_hidden
from detjax.training.gradients import Backward
from detjax.training.logits import logits_lse, token_logits
from detjax.training.rounding import by_use
from detjax.training.score import Scorer
from detjax.training.weights import master_params, serving_params

try:  # neither is in an extra of detjax: see docs/training.md
    from flax import nnx  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"detjax.integrations.tunix needs Tunix ({error}), which pip cannot install beside detjax "
        "in one step; docs/training.md has the commands"
    ) from error

RAW_TEMPERATURES = (0.0, 1.0)
"""At these Tunix's trainer takes log-probabilities of the logits themselves, as the engine does."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Logits and their canonical log-sum-exp, which Tunix normalises by its own formula.

    The formula is `take_along_axis(logits, ids) - logsumexp(logits.astype(float32))`. Here the
    first reads the logits, and the second gets the log-sum-exp as a row of one element, of which
    `logsumexp` is that element, exactly. So the difference has the engine's bits.

    Attributes:
        values: float32 [B, T, V].
        lse: float32 [B, T].
    """

    values: Any
    lse: Any

    def __getitem__(self, index: tuple) -> "Logits":
        """Some of the rows; the vocabulary whole."""
        return Logits(self.values[index], self.lse[index[:2]])

    def __jax_array__(self) -> jax.Array:
        """What `jax.numpy` reads: the logits."""
        return self.values

    def astype(self, dtype: Any) -> jax.Array:
        """What Tunix sums the exponentials of: [B, T, 1]."""
        return self.lse[..., None].astype(dtype)

    def __truediv__(self, temperature: Any) -> "Logits":
        """Tunix divides where the temperature of its rollout is not 0 or 1."""
        raise ValueError(
            f"temperature {temperature} is not supported: the engine reports log-probabilities at "
            "temperature 1; set RolloutConfig(temperature=1.0)"
        )


class DetjaxActor(nnx.Module):
    """The model that Tunix trains: float32 masters, and the forward pass of `detjax.training`.

    Its parameters are the tensors of a Hugging Face checkpoint, by name, in `weights`.
    """

    def __init__(self, model: LoadedModel, *, remat: bool = True):
        """Copy a model's weights.

        Args:
            model: On a mesh of one device: Tunix's actor is not split.
            remat: Keep one activation a layer for the backward pass and compute the rest again.

        Raises:
            ValueError: If the model is on several devices, or its checkpoint does not store the
                tensors that are trained.
        """
        if model.mesh.size != 1:
            raise ValueError(f"the actor's model is on {model.mesh.size} devices; load it on one")
        if found := readings(model.config, model.profile.param_dtype):
            raise ValueError(
                f"an actor of {model.config.family!r} is not supported: its checkpoint does not "
                f"store {next(iter(found))!r} as it is trained"
            )
        self.ctx = ForwardContext(
            config=model.config, profile=model.profile, backend=model.backend, tp=1
        )
        self.remat = remat
        masters = jax.tree.leaves(master_params(model))
        specs = jax.tree.leaves(_master_specs(self.ctx))
        # WHY: copies, since Tunix donates what it trains.
        self.weights = nnx.Dict(
            {
                spec.hf_name: nnx.Param(jnp.array(master))
                for spec, master in zip(specs, masters, strict=True)
            }
        )
        self.cos, self.sin = (nnx.Variable(jnp.array(table)) for table in model.rope_tables)

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array,
        cache: Any = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[Logits, None]:
        """Logits of every token, as Tunix's models return them.

        Args:
            input_tokens: int32 [B, T]; padding may stand anywhere.
            positions: int32 [B, T], counted over the tokens that are no padding.
            cache: Must be None: the engine samples.
            attention_mask: bool [B, T, T]; its diagonal tells padding.

        Raises:
            ValueError: If there is a cache, or no mask, as with packed sequences.
        """
        if cache is not None or attention_mask is None:
            raise ValueError(
                "the actor trains on padded sequences: no cache (sample with DetjaxRollout) and no "
                "packing (leave max_seq_token_per_tpu out)"
            )
        num_sequences, length = input_tokens.shape
        num_rows = num_sequences * length
        is_real = jnp.diagonal(attention_mask, axis1=1, axis2=2).astype(bool)
        row = jnp.arange(num_rows, dtype=jnp.int32).reshape(input_tokens.shape)
        first = jnp.arange(num_sequences, dtype=jnp.int32)[:, None] * length
        batch = Batch(
            ids=input_tokens.reshape(-1).astype(jnp.int32),
            targets=jnp.zeros(num_rows, jnp.int32),
            weights=jnp.zeros(num_rows, jnp.float32),
            places=jnp.where(is_real, first + positions, num_rows + row).reshape(-1),
            lengths=is_real.sum(axis=1, dtype=jnp.int32),
            length=length,
        )
        weights = {name: param[...] for name, param in self.weights.items()}
        params = by_use(_masters(self.ctx, weights), self.ctx.config, self.ctx.profile.param_dtype)
        tables = self.cos[...], self.sin[...]
        hidden = final_hidden(
            self.ctx, params, tables, batch, remat=self.remat, backward=Backward.XLA
        )
        logits = token_logits(self.ctx, hidden, params["lm_head"])
        lse = logits_lse(self.ctx, logits)
        return Logits(logits.reshape(num_sequences, length, -1), lse.reshape(row.shape)), None


def _master_specs(ctx: ForwardContext) -> dict[str, Any]:
    """The tree of masters, a `TensorSpec` for each."""
    specs = tensor_specs(ctx.config, tp=1, vocab_block=ctx.profile.vocab_block)
    if ctx.config.tie_word_embeddings:
        del specs["lm_head"]
    return specs


def _masters(ctx: ForwardContext, weights: dict[str, jax.Array]) -> dict[str, Any]:
    """The tree of masters from tensors by name."""
    return jax.tree.map(lambda spec: weights[spec.hf_name], _master_specs(ctx))


class DetjaxRollout(base_rollout.BaseRollout):
    """The rollout of Tunix's cluster, over an engine.

    `ClusterConfig(rollout_engine=functools.partial(DetjaxRollout, model=model), ...)`. Calls may
    come from several threads; their requests share the engine's steps.

    A sample depends on `RolloutConfig.seed`, the weights' version, the prompt, and how often this
    version was asked for the prompt before: not on which thread asks first.
    """

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: Any,
        model: LoadedModel,
        batch_size: int = 64,
    ):
        """Make the engine. Tunix gives the first four arguments.

        Args:
            rollout_actor: The actor, whose weights are taken.
            tokenizer: Tunix's adapter of the tokenizer.
            mesh: Not used: the engine runs on the mesh of `model`.
            rollout_config: Sizes: `max_prompt_length` and `max_tokens_to_generate`.
            model: On any (dp, tp) mesh; its weights are replaced.
            batch_size: Samples that run at once.

        Raises:
            ValueError: If the actor is another, lies on several devices, or trains another model.
        """
        del mesh
        if not isinstance(rollout_actor, DetjaxActor):
            raise ValueError(
                f"the actor is a {type(rollout_actor).__name__}; with DetjaxRollout give "
                "RLCluster(actor=DetjaxActor(model)), whose bits are the engine's"
            )
        for leaf in jax.tree.leaves(nnx.state(rollout_actor)):
            if len(leaf.sharding.device_set) != 1:
                raise ValueError(
                    f"the actor lies on {len(leaf.sharding.device_set)} devices; give Role.ACTOR a "
                    "mesh of one device"
                )
        ctx = rollout_actor.ctx
        if (ctx.config, ctx.profile) != (model.config, model.profile):
            raise ValueError("the actor and the rollout are of different models or profiles")
        self._ctx, self._model, self._tokenizer = ctx, model, tokenizer
        self._max_prompt = rollout_config.max_prompt_length
        self._max_tokens = rollout_config.max_tokens_to_generate
        self._engine = Engine(
            model,
            EngineConfig(
                batch_size=batch_size,
                prefill_chunk=self._max_prompt,
                max_len=self._max_prompt + self._max_tokens,
            ),
        )
        self._scorer = Scorer(model)
        self._lock = threading.RLock()
        self._live: dict[int, _Sample] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._version = -1
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: str | Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Sample an answer to each prompt.

        Args:
            prompts: Texts.
            rollout_config: A `RolloutConfig`: `max_tokens_to_generate`, `temperature`, `top_p`,
                `top_k`, `seed`, `eos_tokens` and `return_logprobs` are used. The model's own end
                tokens end an answer too.
            **kwargs: None is known.

        Returns:
            A `RolloutOutput`. Tokens include the one that ended the answer; log-probabilities are
            float32, at temperature 1 before any filter; no logits.

        Raises:
            ValueError: If a prompt or an answer is longer than the rollout was made for, the
                temperature does not go with log-probabilities, or an argument is not known.
            RuntimeError: If a request fails.
        """
        if kwargs:
            raise ValueError(f"DetjaxRollout.generate knows no {sorted(kwargs)}")
        config = rollout_config
        if config.return_logprobs and config.temperature not in RAW_TEMPERATURES:
            raise ValueError(
                f"return_logprobs with temperature={config.temperature}: the engine reports "
                "log-probabilities at temperature 1; set temperature=1.0 (or 0.0, greedy)"
            )
        if config.max_tokens_to_generate > self._max_tokens:
            raise ValueError(
                f"max_tokens_to_generate={config.max_tokens_to_generate} is more than the "
                f"{self._max_tokens} that the rollout was made for"
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        encoded = [self._encoded(text) for text in texts]
        for text, ids in zip(texts, encoded, strict=True):
            if not 1 <= len(ids) <= self._max_prompt:
                raise ValueError(
                    f"the prompt {text[:40]!r} has {len(ids)} tokens; it must have 1 to "
                    f"max_prompt_length={self._max_prompt}"
                )
        stop_ids = tuple(config.eos_tokens or [self.eos_id()])
        samples = []
        with self._lock:
            for ids in encoded:
                sampling = SamplingParams(
                    max_tokens=config.max_tokens_to_generate,
                    temperature=config.temperature,
                    top_p=1.0 if config.top_p is None else config.top_p,
                    top_k=0 if config.top_k in (None, -1) else config.top_k,
                    seed=self._seed(config.seed, ids),
                    stop_token_ids=stop_ids,
                )
                samples.append(_Sample())
                self._live[self._engine.add_request(ids, sampling)] = samples[-1]
        for sample in samples:
            while sample.finish_reason is None:
                self._step(sample)
        if failed := [s.error for s in samples if s.finish_reason is FinishReason.ERROR]:
            raise RuntimeError(f"{len(failed)} of {len(samples)} requests failed: {failed[0]}")
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(sample.token_ids) for sample in samples],
            logits=[],
            tokens=[np.asarray(sample.token_ids, np.int32) for sample in samples],
            left_padded_prompt_tokens=np.asarray([self._padded(ids) for ids in encoded], np.int32),
            logprobs=(
                [np.asarray(sample.logprobs, np.float32) for sample in samples]
                if config.return_logprobs
                else None
            ),
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probability of each token of the completions, float32 [B, T], on the engine's mesh.

        Args:
            prompt_tokens: int32 [B, P], padded on the left.
            completion_tokens: int32 [B, T], padded on the right; padding has a value of no meaning.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        rows = [
            [*prompt[prompt != self.pad_id()].tolist(), *completion.tolist()]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        with self._lock:
            found = self._scorer.logprobs(rows)
        return jnp.asarray(np.stack([row[-completions.shape[1] :] for row in found]))

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take the actor's weights, rounded once to the profile's dtype, as its forward does.

        Args:
            params: `nnx.state(actor, nnx.Param)`.
            filter_types: What Tunix picked by.

        Raises:
            ValueError: If they are adapters (LoRA), or a request is under way.
        """
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ValueError("LoRA is not supported: DetjaxActor trains all of its weights")
        weights = nnx.to_pure_dict(params)["weights"]
        # WHY: on a CPU Tunix forbids transfers here, and weights move to the engine's mesh.
        with self._lock, jax.transfer_guard("allow"):
            placed = serving_params(_masters(self._ctx, weights), self._model)
            self._engine.load_weights(placed, version=self._version + 1)
            self._version += 1
            self._asked.clear()

    def pad_id(self) -> int:
        """Of Tunix's tokenizer. Must not occur in prompts; in answers only as their end."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Of Tunix's tokenizer."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the engine's weights are no nnx module, so Tunix gives it them by `update_params`.

        With it `ClusterConfig(offload_to_cpu=True)` fails in Tunix.
        """

    def _step(self, wanted: "_Sample") -> None:
        """Step the engine, unless another thread has ended the sample meanwhile."""
        with self._lock:
            if wanted.finish_reason is not None:
                return
            for output in self._engine.step():
                sample = self._live[output.request_id]
                sample.token_ids += output.token_ids
                sample.logprobs += output.logprobs
                sample.finish_reason, sample.error = output.finish_reason, output.error
                if output.finish_reason is not None:
                    del self._live[output.request_id]

    def _seed(self, base: Any, prompt: tuple[int, ...]) -> int:
        """Of the next sample of this prompt from these weights."""
        count, self._asked[prompt] = self._asked[prompt], self._asked[prompt] + 1
        base = [] if base is None else np.asarray(base).reshape(-1).tolist()
        text = repr((base, self._version, prompt, count))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def _encoded(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens; a begin token that a template wrote is not added again."""
        ids = self._tokenizer.encode(text)
        return tuple(int(token_id) for token_id in self._tokenizer.dedup_bos_ids(ids))

    def _padded(self, ids: tuple[int, ...]) -> list[int]:
        """A prompt behind its padding."""
        return [self.pad_id()] * (self._max_prompt - len(ids)) + list(ids)


@dataclass
class _Sample:
    """An answer so far."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[np.float32, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""


class TunixTokenizer:
    """A detjax tokenizer with the methods that Tunix asks for."""

    def __init__(self, tokenizer: Tokenizer, *, pad_id: int | None = None):
        """Wrap a tokenizer.

        Args:
            tokenizer: Of the model; knows its begin and end tokens.
            pad_id: A token that no prompt has; None takes the end token.

        Raises:
            ValueError: If the model has no end token and no `pad_id` is given.
        """
        if tokenizer.eos_id is None:
            raise ValueError(f"{tokenizer.source} names no end token, which Tunix needs")
        self._tokenizer, self._eos_id = tokenizer, tokenizer.eos_id
        self._pad_id = tokenizer.eos_id if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        """Token ids, the begin token included; control tokens of a template are such."""
        return self._tokenizer.encode(text, has_control=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode([int(token_id) for token_id in ids])

    def bos_id(self) -> int | None:
        """The begin token; None where the model has none."""
        return self._tokenizer.bos_id

    def eos_id(self) -> int:
        """The end token."""
        return self._eos_id

    def pad_id(self) -> int:
        """What Tunix pads with."""
        return self._pad_id

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool,
        **variables: Any,
    ) -> str | list[int]:  # fmt: skip
        """As in transformers, by the model's own template.

        Raises:
            ValueError: If the model has no chat template.
        """
        variables["add_generation_prompt"] = add_generation_prompt
        if tokenize:
            return self._tokenizer.apply_chat_template(
                messages, variables=variables, has_control=True
            )
        return self._tokenizer.render_chat(messages, variables=variables)
