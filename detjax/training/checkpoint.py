# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring a training state with orbax, on any number of devices."""

import json
import re
import tempfile
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from detjax.interpreter_exit import finishes_before_exit
from detjax.models.identity import folder_hash
from detjax.training.trainer import Trainer, TrainState

FORMAT = 2
FACTS, ARRAYS, HASH = "detjax_training.json", "state", "arrays_sha256"


def check_no_state(folder: Path) -> None:
    """Refuse a folder that holds a finished state.

    Raises:
        ValueError: If it does.
    """
    if (folder / FACTS).exists():
        raise ValueError(f"{folder} holds a training state already; give another folder")


def check_can_save(folder: Path) -> None:
    """Make `folder` and check that a state can be written there, before any work is done.

    Arrays of a state that was never finished, as a process that is killed leaves them, are
    written over.

    Raises:
        ValueError: If `folder` holds a finished state.
        OSError: If it cannot be made or written to.
    """
    check_no_state(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@finishes_before_exit
def save_state(folder: Path, state: TrainState, *, facts: dict) -> None:
    """Write a state, and the facts that must be equal when it is continued.

    Args:
        folder: Created here; must not hold a state yet.
        state: Of a trainer.
        facts: Compared by `restore_state`: the build's fingerprint, the model, the task, sizes,
            the seed.

    Raises:
        ValueError: If `folder` holds a state.
        OSError: If it cannot be written to.
    """
    folder = folder.absolute()
    check_can_save(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ARRAYS, _as_dict(state), force=True)
    if jax.process_index() == 0:  # written last: its presence says that the arrays are complete
        own = {"format": FORMAT, HASH: folder_hash(folder / ARRAYS)}
        text = json.dumps(own | facts, indent=2)
        part = folder / f"{FACTS}.part"
        part.write_text(text + "\n")
        part.replace(folder / FACTS)  # whole or not there, if the process is killed


def newest_state(folder: Path) -> Path:
    """The folder of a state: `folder` itself, or of the finished ones in it that of the last step.

    Those in it are named `stepN` or `stepN-...`. If there is none, `folder` itself is returned.
    """
    if (folder / FACTS).is_file():
        return folder
    steps = {
        int(found[1]): path
        for path in folder.glob(f"step*/{FACTS}")
        if (found := re.fullmatch(r"step(\d+)(-.*)?", path.parent.name))
    }
    return steps[max(steps)].parent if steps else folder


@finishes_before_exit
def restore_state(folder: Path, trainer: Trainer, *, facts: dict) -> TrainState:
    """Read what `save_state` wrote, onto the trainer's devices: the same bits.

    Raises:
        FileNotFoundError: If `folder` holds no finished state.
        ValueError: If a fact differs, naming it, or a byte of the arrays: the continuation would
            not have the bits of an uninterrupted run.
    """
    folder = folder.absolute()
    path = folder / FACTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no finished state")
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); give another state") from error
    expected_hash = found.pop(HASH, None)
    wanted = {"format": FORMAT, **facts}
    wanted = json.loads(json.dumps(wanted))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} has {name}={found.get(name)!r}, this run {wanted.get(name)!r}; continue "
                "with what it was saved with, or start anew"
            )
    if folder_hash(folder / ARRAYS) != expected_hash:
        raise ValueError(
            f"{folder / ARRAYS} is damaged: its bytes are not those that were saved; give another "
            "state, or copy it again"
        )
    shapes = trainer.shapes()
    abstract = jax.tree.map(
        lambda shape, sharding: shape.update(sharding=sharding), shapes, trainer.shardings()
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / ARRAYS, _as_dict(abstract))
    return TrainState(**restored)


def _as_dict(state: TrainState) -> dict:
    return {"params": state.params, "opt_state": state.opt_state, "step": state.step}
