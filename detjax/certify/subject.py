# SPDX-License-Identifier: Apache-2.0
"""The model under proof on any mesh, and engines of it that share compiled programs."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from detjax.certify.requests import AnswerBits, answer_of
from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.running.memory import enough_local, local_reach
from detjax.engine.running.program_key import program_keys
from detjax.engine.running.programs import Candidates, ProgramCache, keep_candidates
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.quantized import expanded
from detjax.parallel.mesh import DP_AXIS
from detjax.sizing import choose_sizes

CompileTask = Callable[[], object]


class Subject:
    """One model on one mesh.

    Attributes:
        model: The model with its weights.
        config: Of the engine under proof.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig):
        """Begin with the configuration that would serve it."""
        self.model, self.config = model, config
        self._programs: dict[tuple, ProgramCache] = {}

    def disagree(self, token_ids, positions):
        """Make drafts wrong at every third position; for `Engine`, on the device."""
        other = (token_ids + 1) % self.model.config.vocab_size
        return jnp.where(positions % 3 == 0, other, token_ids)

    def engine(self, *, candidates: Candidates = keep_candidates, **changes) -> Engine:
        """Make an engine with an empty prefix cache and the programs of earlier equal ones."""
        gc.collect()  # the cache of the engine before
        config = self._changed(changes)
        programs = self._programs_of(config, candidates)
        return Engine(self.model, config, programs=programs)

    def _changed(self, changes: Mapping[str, Any]) -> EngineConfig:
        """The configuration with other values, and local pages that go with them."""
        config = dataclasses.replace(self.config, **changes)
        if not config.num_local_pages or "num_local_pages" in changes:
            return config
        enough = enough_local(self.model, config, config.num_pages)
        return dataclasses.replace(config, num_local_pages=enough)

    def replica(self, config: EngineConfig) -> ReplicaConfig:
        """Return the configuration of each replica of such an engine."""
        return ReplicaConfig.of(
            config,
            dp=self.model.mesh.shape[DP_AXIS],
            page_len=self.model.profile.attention_block,
            steps_beat_xla=KERNELS[self.model.backend].steps_beat_xla,
            local_reach=local_reach(self.model),
        )

    def _programs_of(self, config: EngineConfig, candidates: Candidates) -> ProgramCache:
        sizes = self.replica(config).program_sizes
        key = *sizes.values(), candidates
        is_plain = candidates is keep_candidates
        if key not in self._programs:
            self._programs[key] = ProgramCache(
                self.model,
                **sizes,
                candidates=candidates,
                others=None if is_plain else self._programs_of(config, keep_candidates),
            )
        return self._programs[key]

    def likely_programs(
        self,
        requests: Sequence[Request],
        *,
        counts: Sequence[int],
        candidates: Candidates = keep_candidates,
        **changes,
    ) -> Iterator[CompileTask]:
        """Return jobs that compile what an engine is likely to run for these requests.

        This is a guess that decides no result: a missing program is compiled when it is needed.

        Args:
            requests: To be asked.
            counts: So many at once.
            candidates: Of the engine, as `engine` takes it.
            changes: Likewise.
        """
        dp, page_len = self.model.mesh.shape[DP_AXIS], self.model.profile.attention_block
        longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
        config = self._changed(changes)
        replica = self.replica(config)
        table_len = next(n for n in replica.table_lens if n * page_len >= longest)
        rows = [min(-(-n // dp), replica.num_slots) for n in counts]
        sizes = {next(size for size in replica.decode_sizes if size >= n) for n in rows}
        programs = self._programs_of(config, candidates)
        for key in program_keys(replica):
            if key.kind != "prefill" and key.table_len != table_len:
                continue
            if key.kind == "decode" and (key.rows not in sizes or key.length > 1):
                continue
            yield functools.partial(programs.get, key, self.model.params)

    def answers(self, requests: Sequence[Request], **changes) -> list[AnswerBits]:
        """Return the answers of a new engine to all requests at once."""
        return ask(self.engine(**changes), requests)

    def alone(self, requests: Sequence[Request], **changes) -> list[AnswerBits]:
        """Return its answers, one request after the other, without shared prefixes."""
        engine = self.engine(has_prefix_cache=False, **changes)
        return [answer for request in requests for answer in ask(engine, [request])]


def ask(engine: Engine, requests: Sequence[Request]) -> list[AnswerBits]:
    """Return answers in the order of the requests."""
    return [answer_of(completion) for completion in engine.generate(requests)]


def config_on(model: LoadedModel, asked: dict, *, gpu_memory_utilization: float) -> EngineConfig:
    """Return the engine's configuration on a mesh: requested sizes, the rest by the hardware.

    A decode step of few rows is compiled in addition to that of all rows. Self-checks are on.
    """
    dp = model.mesh.shape[DP_AXIS]
    batch_size = asked.get("batch_size")
    if batch_size is not None and batch_size % dp:
        asked = asked | {"batch_size": -(-batch_size // dp) * dp}
    config = choose_sizes(model, asked, gpu_memory_utilization=gpu_memory_utilization)
    if not config.decode_batches and config.batch_size > dp:
        config = dataclasses.replace(config, decode_batches=(dp,))
    return dataclasses.replace(config, self_check="start")


def order_probe(model: LoadedModel) -> str:
    """Return whether a sum of the model depends on its order, and the finding as text.

    Adds float32 products of rows of `down`, or of the first expert's, forwards and backwards.
    """
    layer = model.params["layers"][0]
    down = expanded(layer["down"]) if "down" in layer else layer["expert_down"][0]
    w = np.asarray(jnp.asarray(down)[:64], np.float32)
    terms = w * np.linspace(0.5, 2.0, w.shape[1], dtype=np.float32)
    forwards = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1]
    backwards = np.add.accumulate(terms[:, ::-1], axis=1, dtype=np.float32)[:, -1]
    count = int((forwards.view(np.uint32) != backwards.view(np.uint32)).sum())
    if not count:
        return ""
    return f"{count} of {len(w)} sums of down_proj change when they are added backwards"
