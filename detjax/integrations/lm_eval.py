# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's lm-evaluation-harness on detjax: importing this registers the model `detjax`.

Every score and every response is the canonical one: the same at any batch size, order of the
requests, mesh and schedule. Needs the extra `eval`.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f'{error}; pip install "detjax[eval]"', name=error.name) from error

import detjax
from detjax.engine.outputs.request_output import PromptLogprobs
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.llm import LLM
from detjax.llm_config import LLMConfig
from detjax.models.bundled import BUNDLED_NAME

LOG = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_UNDERSTOOD = {*_SAMPLING, "until", "max_gen_toks", "do_sample", "seed"}

_OTHER_NAMES = {
    "max_length": "max_len",
    "max_model_len": "max_len",
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
}

_HARNESS_DEVICE = "cuda:0"

LoglikelihoodRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""(what the harness caches the answer under, token ids of the context, of the continuation)."""


@register_model("detjax")
class DetjaxLM(TemplateLM):
    """The harness's model `detjax`.

    A `loglikelihood` is the sum, left to right in float64, of the canonical float32 logprobs of the
    continuation's tokens; `is_greedy` says that greedy decoding would have chosen each.

    Attributes:
        llm: What answers.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        seed: int = 0,
        llm: LLM | None = None,
        **options: Any,
    ):
        """Open a model.

        Args:
            model: As `LLM` takes it: a folder, a Hugging Face id, or the bundled `novels-6m`, which
                it is by default.
            pretrained: The same, as the harness calls it.
            batch_size: Sequences that run at once; None and "auto" are `LLM`'s choice. It changes
                no answer.
            max_batch_size: Only None: `batch_size` says it.
            device: Only None, or `cuda:0`, which is what the harness passes where nobody says: the
                hardware and `backend` decide.
            max_gen_toks: Most tokens of a response where a task does not say.
            add_bos_token: Put the special tokens that the model expects around a text, unless the
                text begins with them.
            seed: Of sampled responses; the i-th response to the same request draws noise stream i.
            llm: A model that is open already, in place of `model`, `batch_size` and `options`.
            options: Further options of `LLM`: tp, dp, max_len, dtype, mode, ... Some have the
                harness's and vLLM's names too: `max_length`, `max_model_len`,
                `tensor_parallel_size`, `data_parallel_size`.

        Raises:
            ValueError: If `max_batch_size` or `device` is given, or as `LLM` says.
            TypeError: If `LLM` has no such option, or options are given beside `llm`.
        """
        super().__init__()
        if max_batch_size is not None:
            raise ValueError(f"{max_batch_size=} has no meaning for detjax; give batch_size")
        if device not in (None, _HARNESS_DEVICE):
            raise ValueError(
                f"{device=} has no meaning for detjax, which goes by the hardware; leave it out "
                "or give backend in --model_args"
            )
        if pretrained is not None and model not in (None, pretrained):
            raise ValueError(f"{model=} and {pretrained=} say the same; give one")
        model, options = model or pretrained, _own_names(options)
        if llm is not None and (options or batch_size is not None):
            given = [*options, *(["batch_size"] if batch_size is not None else [])]
            raise TypeError(f"{', '.join(given)} cannot be chosen for an LLM that is open already")
        if llm is None:
            is_ours = batch_size in (None, "auto")
            sizes = {} if is_ours else {"batch_size": _integer("batch_size", batch_size)}
            llm = LLM(str(model or BUNDLED_NAME), **sizes, **options)
        self.llm = llm
        self.tokenizer = llm.tokenizer
        self.batch_size, self.max_length = llm.config.engine.batch_size, llm.config.engine.max_len
        self._max_gen_toks = _integer("max_gen_toks", max_gen_toks)
        self._seed = _integer("seed", seed)
        self._adds_bos = bool(add_bos_token)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results: everything that decides a bit."""
        config: LLMConfig = self.llm.config
        return {
            "detjax_version": detjax.__version__,
            "detjax_fingerprint": config.fingerprint,
            "detjax_mode": config.engine.mode,
            "detjax_backend": config.backend.value,
            "detjax_numerics": dataclasses.asdict(config.profile),
            "detjax_weight_cast": config.weight_cast,
        }

    # --------------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            ValueError: If the model has none.
        """
        ends = [self.tokenizer.eos_id, *self.llm.config.model.eos_token_ids]
        found = [token_id for token_id in ends if token_id is not None]
        if not found:
            raise ValueError(f"{self.llm.config.name} has no end token, which this task needs")
        return found[0]

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows: the begin token, or the end token."""
        begin = self.tokenizer.bos_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """What tells the harness's cache of requests whose tokens they are."""
        return f"{Path(self.llm.config.name).name}-{self.llm.config.fingerprint}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unknown: Any
    ) -> list[int]:
        """Token ids of a text; special tokens written out in it are these tokens."""
        if unknown:
            raise TypeError(f"tok_encode has no {', '.join(unknown)}")
        if add_special_tokens is None:
            begin = self.tokenizer.template_tokens.get("bos_token")
            add_special_tokens = self._adds_bos and not (begin and string.startswith(begin))
        if add_special_tokens:
            return self.tokenizer.encode(string, has_control=True)
        return self.tokenizer.encode_raw(string)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt it ends in the last message.

        Raises:
            ValueError: If the model has no template, or it refuses or changes the messages.
        """
        variables = {} if add_generation_prompt else {"continue_final_message": True}
        return self.tokenizer.render_chat(chat_history, variables=variables)

    # --------------------------------------------------------------------------------------- scores

    def _loglikelihood_tokens(
        self,
        requests: Sequence[LoglikelihoodRequest],
        disable_tqdm: bool = False,
        **unknown: Any,
    ) -> list[tuple[float, bool]]:
        """(logprob, is_greedy) of each continuation. The engine batches all of them."""
        if unknown:
            raise TypeError(f"_loglikelihood_tokens has no {', '.join(unknown)}")
        sequences, num_wanted = [], []
        for _, context, continuation in requests:
            if not context:
                raise ValueError("a continuation follows no token; give a context of one at least")
            whole = [*context, *continuation]
            tokens = whole[-self.max_length :]
            if len(tokens) < len(whole):
                LOG.warning(
                    "a context of %d and a continuation of %d tokens are more than max_len=%d: the "
                    "context is cut from the left",
                    len(context), len(continuation), self.max_length,
                )  # fmt: skip
            if len(continuation) >= len(tokens) and continuation:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens leaves no room for a context in "
                    f"max_len={self.max_length}"
                )
            sequences.append(tokens)
            num_wanted.append(len(continuation))
        answers = []
        for request, wanted, scores in zip(
            requests, num_wanted, self._scores(sequences), strict=True
        ):
            found = scores[len(scores) - wanted :]
            answer = (_total(found), all(one.is_greedy for one in found))
            answers.append(answer)
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[PromptLogprobs]:
        """Of each sequence. Equal ones are computed once."""
        distinct = list(dict.fromkeys(map(tuple, sequences)))
        outputs = self.llm.score(distinct, top=0) if distinct else []
        found = {
            tokens: out.prompt_logprobs or () for tokens, out in zip(distinct, outputs, strict=True)
        }
        return [found[tuple(sequence)] for sequence in sequences]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Logprob of each whole text: in windows of `max_len`, each token scored once."""
        windows, counts = [], []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # beside one token of context
                context_len=1,
            )
            found = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += found
            counts.append(len(found))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            total = 0.0
            for _ in range(count):
                total += next(scored)[0]
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ------------------------------------------------------------------------------------ responses

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The response to each request, which ends before the first text of its `until`.

        A request that is there k times gets k samples: the sequences 0 to k - 1 of its seed.
        """
        pairs: list[Sequence[Any]] = [request.args for request in requests]
        asked = [(str(context), json.dumps(kwargs, sort_keys=True)) for context, kwargs in pairs]
        times: dict[tuple[str, str], int] = {}
        for key in asked:
            times[key] = times.get(key, 0) + 1
        prompts, samplings = [], []
        for (context, kwargs), count in times.items():
            tokens, sampling = self._sampling(context, json.loads(kwargs))
            # A greedy response is the same every time.
            samplings.append(dataclasses.replace(sampling, n=count if sampling.temperature else 1))
            prompts.append(tokens)
        outputs = self.llm.generate(prompts, samplings) if prompts else []
        texts = {
            key: [one.text for one in out.outputs] for key, out in zip(times, outputs, strict=True)
        }
        taken = dict.fromkeys(times, 0)
        responses = []
        for request, key in zip(requests, asked, strict=True):
            of_key = texts[key]
            responses.append(of_key[taken[key] % len(of_key)])
            taken[key] += 1
            self.cache_hook.add_partial("generate_until", request.args, responses[-1])
        return responses

    def _sampling(self, context: str, asked: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """The tokens of a context, cut from the left if need be, and how to continue them.

        Raises:
            ValueError: If a task asks for what detjax does not have, naming it.
        """
        normal = normalize_gen_kwargs(asked, default_max_gen_toks=self._max_gen_toks)
        kwargs: dict[str, Any] = dict(normal)
        unknown = sorted(set(kwargs) - _UNDERSTOOD)
        if unknown:
            raise ValueError(
                f"the task asks for {', '.join(unknown)}, which detjax would have to ignore; it "
                f"understands {', '.join(sorted(_UNDERSTOOD))}"
            )
        tokens, room = self.tok_encode(context), self.max_length - kwargs["max_gen_toks"]
        if room < 1:
            raise ValueError(
                f"max_gen_toks={kwargs['max_gen_toks']} leaves no room for a prompt in "
                f"max_len={self.max_length}; lower it, or raise max_len"
            )
        if len(tokens) > room:
            LOG.warning(
                "a prompt of %d tokens and a response of %d are more than max_len=%d: the prompt "
                "is cut from the left",
                len(tokens), kwargs["max_gen_toks"], self.max_length,
            )  # fmt: skip
        if kwargs.get("top_k") == -1:  # vLLM's, and in tasks: all tokens
            kwargs["top_k"] = 0
        sampling = SamplingParams(
            max_tokens=kwargs["max_gen_toks"],
            stop=tuple(text for text in kwargs.get("until") or () if text),
            seed=kwargs.get("seed", self._seed),
            **{name: kwargs[name] for name in _SAMPLING if name in kwargs},
        )
        return tokens[-room:], sampling


def _integer(name: str, value: Any) -> int:
    """An integer that may be given as text."""
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        also = " or 'auto'" if name == "batch_size" else ""
        raise ValueError(f"{name}={value!r} must be an integer{also}") from error


def _own_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `LLM` under its own names.

    Raises:
        ValueError: If one is given under two.
    """
    named: dict[str, Any] = {}
    for name, value in options.items():
        own = _OTHER_NAMES.get(name, name)
        if own in named and named[own] != value:
            raise ValueError(f"{own} is given twice, as {named[own]!r} and {name}={value!r}")
        named[own] = value
    return named


def _total(scores: PromptLogprobs) -> float:
    """Sum of the logprobs.

    # ORDER: left to right in float64; not math.fsum, which another implementation may not have.
    """
    total = 0.0
    for one in scores:
        total += float(one.logprob)
    if not math.isfinite(total):
        raise ValueError(f"a continuation has the logprob {total}; its weights or tokens are wrong")
    return total
