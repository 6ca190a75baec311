# SPDX-License-Identifier: Apache-2.0
"""From the command line to a model on a mesh."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax

from detjax.certify.requests import check_max_len
from detjax.certify.subject import Subject, config_on
from detjax.defaults import GPU_MEMORY_UTILIZATION
from detjax.models.decoder import check_mesh
from detjax.models.hf_config import config_from_hf
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel, random_model
from detjax.models.params import check_tp
from detjax.numerics import Build, NumericsProfile
from detjax.opening import choose_placement, load_on_devices
from detjax.parallel.gpu_memory import claim_gpu_memory
from detjax.parallel.mesh import configure_virtual_devices


def start_devices(args: argparse.Namespace) -> None:
    """Make the requested virtual CPU devices; JAX starts here."""
    configure_virtual_devices(max(args.devices, args.dp * args.tp))
    claim_gpu_memory(_share(args))
    jax.devices("cpu")


def open_subject(args: argparse.Namespace, dp: int, tp: int) -> Subject:
    """Open the model and choose its engine's configuration on a mesh.

    Raises:
        ValueError: If model, mesh, sizes and memory do not go together.
        FileNotFoundError: If a file is missing.
    """
    model = _open_model(args, dp, tp)
    names = "batch_size", "prefill_chunk", "max_len", "num_pages", "mode", "decode_steps"
    asked = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if model.backend.platform == "cpu" and "max_len" not in asked:
        asked["max_len"] = min(768, model.config.max_position_embeddings)
    if (dp, tp) != (args.dp, args.tp):
        asked.pop("num_pages", None)  # of all replicas of the first mesh
    subject = Subject(model, config_on(model, asked, gpu_memory_utilization=_share(args)))
    check_max_len(subject.config.max_len, model.profile)
    return subject


def _share(args: argparse.Namespace) -> float:
    share = args.gpu_memory_utilization
    return GPU_MEMORY_UTILIZATION if share is None else share


def _open_model(args: argparse.Namespace, dp: int, tp: int) -> LoadedModel:
    profile = NumericsProfile.of(args.dtype, args.kv_cache_dtype)
    if args.random_weights is None:
        folder = find_model(args.model, revision=args.revision)
        model, _ = load_on_devices(
            folder, profile=profile, backend=args.backend, dp=dp, tp=tp,
            cast_weights=args.cast_weights, quantized_weights=args.quantized_weights,
        )  # fmt: skip
        return model
    config = config_from_hf(json.loads(Path(args.random_weights).read_text()))
    if args.max_len is not None and args.max_len < config.max_position_embeddings:
        config = dataclasses.replace(config, max_position_embeddings=args.max_len)
    place = choose_placement(config, profile, backend=args.backend, dp=dp, tp=tp)
    return random_model(config, seed=0, profile=profile, mesh=place.mesh, backend=place.backend)


def other_meshes(subject: Subject, args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield every (dp, tp) of the local devices except the first and those the model refuses.

    On virtual devices without `--minutes` there is one mesh for each tp, with the most replicas.
    """
    model = subject.model
    count = len(jax.devices(model.backend.platform))
    for tp in (1, 2, 4, 8):
        try:
            check_tp(model.config, tp)
            check_mesh(model.config, model.profile, tp)
        except ValueError:
            continue
        sizes = [dp for dp in range(1, count // tp + 1) if dp & (dp - 1) == 0]
        if model.backend.platform == "cpu" and not args.minutes:
            sizes = sizes[-1:] if tp != args.tp else []
        yield from ((dp, tp) for dp in sizes if (dp, tp) != (args.dp, args.tp))


def facts_of(subject: Subject, args: argparse.Namespace) -> dict[str, str]:
    """Return the facts of the certificate."""
    model = subject.model
    build = Build.current(model.backend.value, model.mesh.devices.flat[0])
    name = args.model if args.random_weights is None else f"random: {args.random_weights}"
    facts = {
        "model": name,
        "fingerprint": model.fingerprint,
        "dimensions": str(model.config),
        "profile": str(model.profile),
        "mesh": "dp {dp} x tp {tp}".format(**model.mesh.shape),
        "engine": str(subject.config),
    }
    return facts | {f"build: {key}": str(value) for key, value in dataclasses.asdict(build).items()}
