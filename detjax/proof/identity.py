# SPDX-License-Identifier: Apache-2.0
"""What made an answer: model, numerics and build, as facts that two people can compare.

The fingerprint (`detjax.numerics.fingerprint`) covers numerics and build, and is equal on every
mesh. The hashes here name the model.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from detjax.compilation.toolchain import driver
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.hashing import hash_weights
from detjax.numerics import Build
from detjax.pallas_kernels.backend import Backend
from detjax.proof.canonical_json import canonical_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Everything that decides an answer, except the request.

    Attributes:
        model: `name`, `hub_commit` (of a Hugging Face snapshot whose weights these are, else
            null), `weights` (of the tensors as they lie on the devices: see `hash_weights`; null in
            a job of several processes, where no process has all of them), `config` (sha256 of the
            dimensions, canonical JSON), `tokenizer` and `chat_template` (sha256 of the files and of
            the template), `weight_cast`, `quantization`.
        numerics: `fingerprint`, and every field of `NumericsProfile` under `profile`.
        build: Every field of `Build` that says something, and on a GPU the `driver`.
    """

    model: dict[str, Any]
    numerics: dict[str, Any]
    build: dict[str, Any]

    @property
    def bits(self) -> str:
        """See `bits_fingerprint`."""
        return bits_fingerprint(self.model, self.numerics, self.build)


def bits_fingerprint(
    model: Mapping[str, Any], numerics: Mapping[str, Any], build: Mapping[str, Any]
) -> str:
    """Hash what decides the bits of an answer to 16 hexadecimal digits.

    These are the profile with its version, the function of the tensor core, the weights, the
    dimensions, and how the weights were rounded or expanded. Two machines of one such fingerprint
    give the same answers. A backend whose bits no page defines adds its whole build.

    Args:
        model: As `Identity` or a receipt has it, like the others.
        numerics: With the profile.
        build: With the name of the backend.
    """
    names = [backend.value for backend in Backend]
    mma = Backend(build["backend"]).mma if build["backend"] in names else ""
    decides = {name: model[name] for name in ("weights", "config", "weight_cast", "quantization")}
    decides |= {"profile": numerics["profile"], "mma": mma}
    if not mma:
        decides["build"] = {name: value for name, value in build.items() if name != "driver"}
    return hashlib.sha256(canonical_json(decides)).hexdigest()[:16]


class Identifier:
    """Identifies a model. Its weights are hashed when first needed, and when they change."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer | None, *, name: str):
        """Hash nothing yet.

        Args:
            model: On its devices.
            tokenizer: Of the model, if answers are texts.
            name: The name that the user gave.
        """
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._hashed: list[jax.Array] = []  # what the hash is of; arrays never change
        self._weights = ""
        self._hashes: dict[int, str | None] = {}

    def identity(self, index: int = 0) -> Identity:
        """Return the facts for the current weights.

        Args:
            index: Which weights of the engine these are (`WeightHistory.current`), for
                `with_weights`.
        """
        model = self._model
        weights = self.weights()
        if self._hashes.setdefault(index, weights) != weights:
            raise ValueError(
                "the weights were replaced behind the engine, so no receipt can name those that "
                "made an answer; use Engine.load_weights"
            )
        build = Build.current(model.backend.value, model.mesh.devices.flat[0])
        return Identity(
            model={
                "name": self._name,
                "hub_commit": None if index else _hub_commit(model.folder),
                "weights": weights,
                "config": _config_hash(model.config),
                "tokenizer": self._tokenizer and self._tokenizer.files_sha256,
                "chat_template": self._tokenizer and self._tokenizer.templates_sha256,
                "weight_cast": model.weight_cast,
                "quantization": model.quantization,
            },
            numerics={
                "fingerprint": model.fingerprint,
                "profile": model.profile.facts(),
            },
            build=build.facts() | ({"driver": driver()} if model.backend.platform == "gpu" else {}),
        )

    def with_weights(self, identity: Identity, index: int) -> Identity:
        """Return the facts for earlier weights, if `identity` was called while they computed.

        Raises:
            ValueError: If it was not.
        """
        if index not in self._hashes:
            raise ValueError(
                "the weights that made the answer were replaced before their hash was taken, so no "
                "receipt can name them; make receipts, or call identity(), before load_weights"
            )
        commit = None if index else _hub_commit(self._model.folder)
        model = identity.model | {"weights": self._hashes[index], "hub_commit": commit}
        return dataclasses.replace(identity, model=model)

    def weights(self) -> str | None:
        """Hash of the weights as they are now; None in a job of several processes."""
        if jax.process_count() > 1:
            return None
        params = self._model.own_weights()
        leaves = jax.tree.leaves(params)
        is_known = len(leaves) == len(self._hashed) and all(
            new is old for new, old in zip(leaves, self._hashed, strict=True)
        )
        if not is_known:
            self._weights = hash_weights(
                params,
                self._model.config,
                self._model.mesh,
                vocab_block=self._model.profile.vocab_block,
            )
            self._hashed = leaves
        return self._weights


def _hub_commit(folder: Path | None) -> str | None:
    """The commit of a snapshot in Hugging Face's cache, which its folder is named after."""
    if folder is None or folder.parent.name != "snapshots":
        return None
    return folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else None


def _config_hash(config: ModelConfig) -> str:
    """Hash the dimensions. A shorter context is left out, because it changes no bit."""
    values = config.facts()
    del values["max_position_embeddings"]
    return hashlib.sha256(canonical_json(values)).hexdigest()
