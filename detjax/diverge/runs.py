# SPDX-License-Identifier: Apache-2.0
"""Run a prompt in a setting, for its answer alone or with every operation recorded."""

import dataclasses
from collections import abc
from collections.abc import Callable
from pathlib import Path

from detjax.diverge.recorder import TappedPrograms
from detjax.diverge.recording import Recording
from detjax.diverge.setting import RecordedAnswer, Setting
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.request_output import TokenEvent
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.programs import ProgramCache
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.opening import load_on_devices
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

ModelSource = str | Path | LoadedModel | Callable[[Setting], LoadedModel]
"""A folder or id, a model on its mesh, or what makes the model that a setting runs."""


class Models:
    """Gives each setting the model on its mesh, loaded once."""

    def __init__(self, source: ModelSource):
        """Load nothing yet."""
        self._source = source
        self._loaded: dict[tuple[int, int, str], LoadedModel] = {}

    def of(self, setting: Setting) -> LoadedModel:
        """Return the model that a setting runs.

        Raises:
            ValueError: If it cannot run there.
        """
        key = setting.dp, setting.tp, setting.backend
        if key not in self._loaded:
            self._loaded[key] = self._load(setting)
        return self._loaded[key]

    def _load(self, setting: Setting) -> LoadedModel:
        source = self._source
        if isinstance(source, LoadedModel):
            have = source.mesh.shape[DP_AXIS], source.mesh.shape[TP_AXIS], source.backend.value
            backend = have[2] if setting.backend == "auto" else setting.backend
            if have != (setting.dp, setting.tp, backend):
                raise ValueError(
                    f"the model is loaded with dp={have[0]}, tp={have[1]}, backend={have[2]}, and "
                    f"setting {setting} needs another; give the folder of the model"
                )
            return source
        if callable(source):
            return source(setting)
        model, _ = load_on_devices(
            find_model(source),
            profile=NumericsProfile(),
            backend=setting.backend,
            dp=setting.dp,
            tp=setting.tp,
        )
        return model


class Runs:
    """Runs of one prompt; programs are compiled once for each setting.

    Attributes:
        prompt: Its token ids.
        sampling: How each token is chosen, always with the noise of this prompt.
    """

    def __init__(self, models: Models, prompt: abc.Sequence[int], sampling: SamplingParams):
        """Run nothing yet.

        Raises:
            ValueError: If there is more than one sequence to follow.
        """
        if sampling.n != 1 or sampling.stop:
            raise ValueError(
                f"n={sampling.n}, stop={sampling.stop}: one sequence is followed, and its tokens, "
                "not its text; use n=1 and no stop strings"
            )
        self.prompt, self.sampling = tuple(prompt), sampling.for_prompt(prompt)
        self._models = models
        self._plain: dict[tuple[Setting, int], ProgramCache] = {}
        self._tapped: dict[tuple[Setting, int], ProgramCache] = {}

    def model(self, setting: Setting) -> LoadedModel:
        """The model that a setting runs."""
        return self._models.of(setting)

    def answer(self, setting: Setting, like: RecordedAnswer | None = None) -> RecordedAnswer:
        """Return the answer of a setting by plain programs.

        Args:
            setting: On the path `prefill` each token is computed by a prefill of the tokens before
                it in `like`.
            like: An answer to follow; needed on the path `prefill`.
        """
        if setting.path == "prefill":
            assert like is not None
            parts = [
                self._run(setting, self.prompt + like.token_ids[:t], 1, num_tokens=1)
                for t in range(len(like.token_ids))
            ]
            return RecordedAnswer(
                prompt_token_ids=self.prompt,
                token_ids=tuple(part.token_ids[0] for part in parts),
                logprobs=tuple(part.logprobs[0] for part in parts),
            )
        most = self.sampling.max_tokens if like is None else len(like.token_ids)
        return self._run(setting, self.prompt, most, num_tokens=most)

    def record(
        self,
        setting: Setting,
        answer: RecordedAnswer,
        *,
        num_tokens: int,
        captured: int | None = None,
    ) -> tuple[Recording, RecordedAnswer]:
        """Run the first tokens of an answer by tapped programs.

        Args:
            setting: The setting of the answer.
            answer: To follow.
            num_tokens: How many of its tokens to compute.
            captured: The position whose values are kept.

        Returns:
            The recording, and the answer of the tapped programs: on the path `prefill` only the
            last token.
        """
        prompt, count = self.prompt, num_tokens
        # As `answer` asks, or schedules would differ.
        most = max(self.sampling.max_tokens, num_tokens)
        if setting.path == "prefill":
            prompt, count, most = self.prompt + answer.token_ids[: num_tokens - 1], 1, 1
        config = self._config(setting, len(prompt), most)
        programs = self._programs(setting, config, is_tapped=True)
        assert isinstance(programs, TappedPrograms)
        recording = Recording(
            self.model(setting),
            self.prompt + answer.token_ids,
            num_slots=config.batch_size // setting.dp,
            num_pages=programs.num_pages // setting.dp,
            captured=captured,
        )
        programs.on_launch, programs.on_choice = recording.on_launch, recording.on_choice
        try:
            got = self._run(setting, prompt, most, num_tokens=count, programs=programs)
            return recording, got
        finally:
            programs.on_launch = programs.on_choice = None

    def tapped(self, setting: Setting) -> TappedPrograms:
        """The tapped programs of a setting that was recorded."""
        programs = next(p for (its, _), p in self._tapped.items() if its == setting)
        assert isinstance(programs, TappedPrograms)
        return programs

    def _run(
        self,
        setting: Setting,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        num_tokens: int,
        programs: ProgramCache | None = None,
    ) -> RecordedAnswer:
        """Ask for `max_tokens` next to the other requests, and stop all after `num_tokens`.

        Every launch until then equals that of a run of `max_tokens`.
        """
        model = self.model(setting)
        config = self._config(setting, len(prompt), max_tokens)
        programs = programs or self._programs(setting, config, is_tapped=False)
        engine = Engine(model, config, programs=programs)
        num_told, is_over = 0, False

        def on_token(event: TokenEvent) -> bool:
            nonlocal num_told, is_over
            if event.request_idx == setting.row:
                num_told += 1
                is_over = num_told >= num_tokens or event.token_id in model.config.eos_token_ids
            return is_over

        requests = self._requests(setting, prompt, max_tokens, config.max_len)
        done = engine.generate(requests, on_token=on_token)[setting.row]
        return RecordedAnswer(
            prompt_token_ids=self.prompt,
            token_ids=done.token_ids[:num_tokens],
            logprobs=done.logprobs[:num_tokens],
        )

    def _programs(self, setting: Setting, config: EngineConfig, *, is_tapped: bool) -> ProgramCache:
        model = self.model(setting)
        page_len = model.profile.attention_block
        enough = config.batch_size * -(-config.max_len // page_len)
        key = setting, config.max_len
        kept = self._tapped if is_tapped else self._plain
        if key not in kept:
            num_pages, num_slots = config.num_pages or enough, config.batch_size
            make = TappedPrograms if is_tapped else ProgramCache
            kept[key] = make(
                model, num_pages=num_pages, num_slots=num_slots, window_len=config.verify_window
            )
        return kept[key]

    def _config(self, setting: Setting, prompt_len: int, max_tokens: int) -> EngineConfig:
        # The same room for every number of tokens, so that programs are shared.
        page_len = self.model(setting).profile.attention_block
        context = self.model(setting).config.max_position_embeddings
        most = len(self.prompt) + self.sampling.max_tokens
        if prompt_len + max_tokens > context:
            raise ValueError(
                f"{prompt_len} tokens and {max_tokens} more do not fit into the model's context of "
                f"{context}"
            )
        room = -(-max(most, prompt_len + max_tokens) // page_len) * page_len
        return EngineConfig(
            batch_size=setting.batch,
            prefill_chunk=setting.chunk,
            max_len=min(context, room),
            mode=setting.mode,
            num_pages=setting.pages,
            decode_steps=setting.decode_steps,
            max_draft_fraction=1.0 if setting.mode == "dvr" else None,
            self_check="off",  # its launches are of no sequence, and would be recorded
        )

    def _requests(
        self, setting: Setting, prompt: tuple[int, ...], max_tokens: int, max_len: int
    ) -> list[Request]:
        """Return the prompt in its row, and others without its tokens at the same positions."""
        vocab_size = self.model(setting).config.vocab_size
        if setting.batch > vocab_size:
            raise ValueError(f"batch={setting.batch} must be at most the vocabulary, {vocab_size}")
        requests = []
        for i in range(setting.batch):
            shift = (i - setting.row) % setting.batch
            length = max(1, len(prompt) - 7 * shift % len(prompt)) if shift else len(prompt)
            sampling = dataclasses.replace(
                self.sampling,
                seed=((self.sampling.seed or 0) + shift) % 2**64,
                max_tokens=max_len - length if shift else max_tokens,
            )
            requests.append(
                Request(
                    prompt_token_ids=tuple((t + shift) % vocab_size for t in prompt[:length]),
                    sampling=sampling,
                    is_deterministic=setting.mode != "fast",
                )
            )
        return requests
