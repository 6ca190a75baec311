# SPDX-License-Identifier: Apache-2.0
"""What is given as a model and is none: told by the names of its files."""

import json
import re
from pathlib import Path

_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")
_FORMAT = "the folder or the id in Hugging Face format"


def check_kind(path: Path) -> None:
    """Refuse a file, and a folder that holds something else than a model in Hugging Face format.

    A folder without anything that is known is left to those who read it.

    Raises:
        ValueError: Saying what it is, and what to give instead.
    """
    why = _why_no_model(path) if path.is_dir() else _what_file(path)
    if why is not None:
        raise ValueError(f"{path} {why}")


def _what_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return (
            f"is a GGUF file, for llama.cpp; give {_FORMAT} that it was converted from, or make "
            "one with python -m detjax.convert_gguf"
        )
    shard = _SHARD.fullmatch(path.name)
    if shard is not None:
        return (
            f"is shard {int(shard[1])} of {int(shard[2])} of a model; give the folder that holds "
            "all of them and config.json"
        )
    return "is a file; give the folder it stands in"


def _why_no_model(folder: Path) -> str | None:
    files = {path.name for path in folder.iterdir()}
    shards = sorted(name for name in files if _SHARD.fullmatch(name))
    has_weights = bool({"model.safetensors", "model.safetensors.index.json"} & files)
    if _is_mlx(folder, files):
        return f"is a model in MLX's format, with its own weights; give {_FORMAT} it was made from"
    if has_weights:
        return None
    if "adapter_config.json" in files:
        base = _read(folder / "adapter_config.json").get("base_model_name_or_path")
        base = base if isinstance(base, str) and base else "its base model"
        return (
            f"is an adapter (LoRA) of {base}, not a model; give that as the model, and this folder "
            "with --lora-modules NAME=DIR, or lora_request of LLM.generate"
        )
    if "detjax_params.json" in files:
        return (
            "holds weights in a form that detjax wrote before it wrote safetensors; load it with "
            "the version that saved it, or save the model again"
        )
    if gguf := sorted(name for name in files if name.endswith(".gguf")):
        return (
            f"holds a GGUF file, {gguf[0]}, for llama.cpp; give {_FORMAT} it was converted from, "
            "or make one with python -m detjax.convert_gguf"
        )
    if shards:
        total = int(_SHARD.fullmatch(shards[0])[2])  # pyright: ignore[reportOptionalSubscript]
        return (
            f"holds {len(shards)} of {total} shards of a model and no "
            "model.safetensors.index.json; download the whole repository"
        )
    if "consolidated.safetensors" in files:
        return f"holds consolidated.safetensors, Mistral's own format; give {_FORMAT}"
    return None


def _is_mlx(folder: Path, files: set[str]) -> bool:
    if any(name.endswith(".npz") for name in files & {"weights.npz", "weights.00.npz"}):
        return True
    of_mlx = _read(folder / "config.json").get("quantization")
    return isinstance(of_mlx, dict) and {"bits", "group_size"} <= of_mlx.keys()


def _read(path: Path) -> dict:
    """A JSON object; empty where there is none: who needs the file says what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
