# SPDX-License-Identifier: Apache-2.0
"""Fleets on Ray: the server as a Ray Serve deployment, and `LLM` as a `map_batches` class.

An answer has the same bits on every replica, so a retry may go to any of them, and what a lost
replica had begun is computed again by another. Both need the extra `ray`.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from detjax.cli.errors import InputError
from detjax.cli.options import flag_like
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.llm import LLM

try:
    import pyarrow as pa
    from ray import serve
    from starlette.applications import Starlette

    from detjax.serve import check_options, make_parser
    from detjax.server.app import make_app
    from detjax.server.options import ACCESS_LOG, access_filter, web_options
    from detjax.server.server import make_limits, open_model
    from detjax.server.service import Service, ServiceState
except ImportError as error:
    raise ImportError(f'{error}; pip install "detjax[ray]"') from error

_OF_RAY = frozenset(
    "config host port coordinator num_processes process_id drain_timeout help ssl_keyfile "
    "ssl_certfile ssl_ca_certs ssl_cert_reqs admin_api_key weights_dir".split()
)
"""Options of the command that Ray decides in its place. A fleet has no routes of an administrator:
Ray gives a request to one replica, and the others would keep their weights."""

# ------------------------------------------------------------------------------------- Ray Serve


class Server:
    """A replica: the model, and the application of `python -m detjax.serve`."""

    def __init__(self, argv: Sequence[str]):
        """Open the model of these options."""
        args = make_parser().parse(argv)
        logging.getLogger("detjax").setLevel(args.log_level.upper())
        logging.getLogger(ACCESS_LOG).addFilter(access_filter(args))
        self._service = Service(open_model(args), make_limits(args))
        # WHY: Ray's proxy listens, on an address and under names of its own.
        self._web = dataclasses.replace(web_options(args), is_local=False)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray Serve asks for the application here."""
        return make_app(self._service, self._web)

    def check_health(self) -> None:
        """Ray Serve asks this now and then, and replaces a replica that raises."""
        if self._service.state is ServiceState.FAILED:
            raise RuntimeError(self._service.why_failed)


def build(options: Mapping[str, Any]) -> serve.Application:
    """The application: `serve run detjax.ray:build model=DIR_OR_ID tp=2 gpus=2 num_replicas=4`.

    Args:
        options: Those of `python -m detjax.serve`, with underscores and without the dashes; of one
            that takes several values a list; of a flag true or false. `num_replicas`: 1 if not
            given. `gpus` must be given: those of a replica, dp * tp of them, or 0 for the CPU.

    Raises:
        ValueError: If there is no such option, Ray decides it, or its value cannot be.
    """
    given = dict(options)
    num_replicas = _count("num_replicas", given.pop("num_replicas", 1), least=1)
    if "gpus" not in given:
        raise ValueError("gpus is missing: give gpus=0 for the CPU, or dp * tp, those of a replica")
    gpus = _count("gpus", given.pop("gpus"), least=0)
    argv = _argv(given)
    try:
        args = make_parser().parse(argv)
        num_keys = len(args.api_key)
        check_options(args)
    except InputError as error:
        raise ValueError(str(error)) from error
    if args.admin_api_key:
        raise ValueError(
            "DETJAX_ADMIN_API_KEY is set, and a fleet has no administrator's routes; unset it"
        )
    # WHY: keys of this process' environment, which replicas do not have.
    argv += [f"--api-key={key}" for key in args.api_key[num_keys:]]
    if gpus not in (0, args.dp * args.tp):
        raise ValueError(f"gpus={gpus} must be 0 or dp * tp = {args.dp * args.tp}")
    deployment = serve.deployment(
        name="detjax",
        num_replicas=num_replicas,
        ray_actor_options={"num_gpus": gpus},
        # The engine has a queue of its own, whose end is a 429.
        max_ongoing_requests=2 * args.max_waiting,
    )
    return deployment(serve.ingress()(Server)).bind(argv)


def _argv(options: Mapping[str, Any]) -> list[str]:
    """Options as the command has them."""
    argv = []
    switches = {
        flag for action in make_parser()._actions if action.nargs == 0
        for flag in action.option_strings
    }  # fmt: skip
    for name, value in options.items():
        if name in _OF_RAY:
            raise ValueError(f"{name}={value!r} is no option of a replica: Ray decides it")
        flag = flag_like(name)
        if value is True or value == "true":
            argv.append(flag)
        elif (value is False or value == "false") and flag in switches:
            continue
        elif name == "api_key" and isinstance(value, list | tuple):
            argv += [f"{flag}={one}" for one in value]
        elif isinstance(value, list | tuple):
            argv += [flag, *map(str, value)]
        else:
            argv.append(f"{flag}={value}")
    return argv


def _count(name: str, value: Any, *, least: int) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = least - 1
    if count < least or count != float(value):
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
    return count


# -------------------------------------------------------------------------------------- Ray Data


class Generate:
    """Continues a column of prompts: `dataset.map_batches(detjax.ray.Generate, ...)`.

        dataset.map_batches(
            detjax.ray.Generate, batch_format="pyarrow", batch_size=256, concurrency=4, num_gpus=2,
            fn_constructor_kwargs={"model": "...", "tp": 2, "sampling": SamplingParams(...)},
        )

    Adds to each row: `generated_text`; `token_ids`, int32; `logprobs`, float32; `finish_reason`;
    `digest` and `fingerprint`. Other columns stay. The order of rows, the batches and the replicas
    change no bit of them.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams | None = None,
        prompt_column: str = "prompt",
        seed_column: str | None = None,
        **options: Any,
    ):
        """Open the model.

        Args:
            sampling: How; None is `SamplingParams()`: greedy.
            prompt_column: Texts, or lists of token ids.
            seed_column: Of each row's seed, in place of the one of `sampling`.
            options: Of `LLM`: `model`, `tp`, `max_len` and the others.

        Raises:
            ValueError: If `sampling` wants several sequences of a prompt; as `LLM` says.
        """
        self._sampling = SamplingParams() if sampling is None else sampling
        if self._sampling.n != 1:
            raise ValueError(
                f"n={self._sampling.n} must be 1 here: give each prompt as many rows, and each row "
                "a seed in seed_column"
            )
        self._prompt_column, self._seed_column = prompt_column, seed_column
        options.setdefault("show_progress", False)
        self._llm = LLM(**options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Answer the prompts of some rows.

        Raises:
            ValueError: If the rows are no pyarrow table, lack a column, or have one that is added.
        """
        if not isinstance(batch, pa.Table):
            raise ValueError(
                f'a batch is a {type(batch).__name__}; give map_batches batch_format="pyarrow"'
            )
        prompts = self._column(batch, self._prompt_column)
        samplings = [self._sampling] * len(prompts)
        if self._seed_column is not None:
            seeds = self._column(batch, self._seed_column)
            samplings = [dataclasses.replace(self._sampling, seed=seed) for seed in seeds]
        found = [out.outputs[0] for out in self._llm.generate(prompts, samplings)]
        columns = {
            "generated_text": pa.array([done.text for done in found], pa.string()),
            "token_ids": pa.array([done.token_ids for done in found], pa.list_(pa.int32())),
            "logprobs": pa.array([done.logprobs for done in found], pa.list_(pa.float32())),
            "finish_reason": pa.array([done.finish_reason.value for done in found], pa.string()),
            "digest": pa.array([done.digest() for done in found], pa.string()),
            "fingerprint": pa.array([done.fingerprint for done in found], pa.string()),
        }
        for name, column in columns.items():
            if name in batch.column_names:
                raise ValueError(f"the rows have a column {name!r} already; rename it")
            batch = batch.append_column(name, column)
        return batch

    def _column(self, batch: pa.Table, name: str) -> list:
        if name not in batch.column_names:
            raise ValueError(f"the rows have no column {name!r}, but {batch.column_names}")
        return batch.column(name).to_pylist()
