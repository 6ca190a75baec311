# SPDX-License-Identifier: Apache-2.0
"""A GGUF file, llama.cpp's format, as a folder in Hugging Face format.

Weights are what the `gguf` package makes of their blocks, rounded to bfloat16 once. Rows of the
query and key matrices of a Llama are stored for interleaved rotation; they are put back. Needs the
extra `gguf`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from detjax.models.hf_config import config_from_hf
from detjax.models.weights.files import write_tensors
from detjax.progress import Progress

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError as error:
    raise ImportError(f'{error}; pip install "detjax[gguf]"', name=error.name) from error

CONTROL_TOKEN, USER_TOKEN = 3, 4
"""GGUF's types of tokens that are matched whole: control tokens, and added text."""

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a GGUF architecture is in Hugging Face's terms.

    Attributes:
        model_class: In config.json.
        is_interleaved: Whether rows of q and k are stored for interleaved rotation.
    """

    model_class: str
    is_interleaved: bool = False


ARCHITECTURES = {
    "llama": Architecture(model_class="LlamaForCausalLM", is_interleaved=True),
    "qwen2": Architecture(model_class="Qwen2ForCausalLM"),
    "qwen3": Architecture(model_class="Qwen3ForCausalLM"),
}

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(file: Path, out: Path, *, progress: Progress) -> str:
    """Write a folder in Hugging Face format.

    Args:
        file: One GGUF file that holds a whole model.
        out: Made here; must not exist, or be empty.
        progress: Called after each tensor.

    Returns:
        What was read, for people.

    Raises:
        ValueError: If the file is none or damaged, or its architecture, tokenizer or a setting is
            not supported; the message names it.
        FileNotFoundError: If there is no such file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist or is no file; give a .gguf file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; give another one")
    with file.open("rb") as opened:
        begin = opened.read(4)
    if begin != b"GGUF":
        raise ValueError(f"{file} is not a GGUF file: it begins with {begin!r}, not b'GGUF'")
    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); download it again") from error
    facts = {name: field.contents() for name, field in reader.fields.items()}
    name, architecture = _architecture(facts)
    config = _config(facts, name, architecture)
    tokenizer, tokenizer_config = _tokenizer(facts)
    tensors = _tensors(reader, facts, name, architecture, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config_from_hf(config)  # a setting that cannot be served is found before anything is written
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    generation = {"eos_token_id": config["eos_token_id"]}
    for file_name, values in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (out / file_name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    kinds = ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
    return f"{facts.get('general.name', file.stem)}, {len(tensors)} tensors of {kinds}"


def _architecture(facts: Mapping[str, Any]) -> tuple[str, Architecture]:
    name = facts.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={name!r} is not supported; only {', '.join(ARCHITECTURES)}"
        )
    if facts.get("split.count", 1) != 1:
        raise ValueError(f"the model lies in {facts['split.count']} files; merge them first")
    return name, ARCHITECTURES[name]


def _config(facts: Mapping[str, Any], name: str, architecture: Architecture) -> dict[str, Any]:
    """config.json, from `<architecture>.*`, every key of which is known."""
    of_model = {
        key.removeprefix(f"{name}."): value
        for key, value in facts.items()
        if key.startswith(f"{name}.")
    }

    def take(key: str, default: Any = None) -> Any:
        value = of_model.pop(key, default)
        if value is None:
            raise ValueError(f"{name}.{key} is missing; the file is damaged")
        return value

    heads, width = take("attention.head_count"), take("embedding_length")
    head_dim = take("attention.key_length", width // heads)
    config = {
        "architectures": [architecture.model_class],
        "model_type": name,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": take("feed_forward_length"),
        "num_hidden_layers": take("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": take("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": take("context_length"),
        "rms_norm_eps": _decimal(take("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(take("rope.freq_base", 10000.0)),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    for key, only in (
        ("vocab_size", config["vocab_size"]),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("rope.scaling.type", "none"),
    ):
        if (value := of_model.pop(key, only)) != only:
            raise ValueError(f"{name}.{key}={value!r} is not supported; only {only!r}")
    if of_model:
        key, value = min(of_model.items())
        raise ValueError(
            f"{name}.{key}={value!r:.60} is not a key that detjax knows, and it may change the "
            "model"
        )
    return config


def _decimal(value: float) -> float:
    """The number that was meant by a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tensors(
    reader: Any,
    facts: Mapping[str, Any],
    name: str,
    architecture: Architecture,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Every tensor under its name in a checkpoint, bfloat16."""
    found = {}
    heads = {
        "attn_q": facts[f"{name}.attention.head_count"],
        "attn_k": facts.get(f"{name}.attention.head_count_kv"),
    }
    for done, tensor in enumerate(reader.tensors, 1):
        values = dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if architecture.is_interleaved and kind in heads:
            values = _put_back(values, heads[kind] or heads["attn_q"])
        # ROUND: to nearest, ties to even; what a block holds has fewer bits or is so rounded.
        found[_hf_name(tensor.name)] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
        progress(tensor.name, done, len(reader.tensors))
    return found


def _hf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ValueError(
        f"the tensor {name!r} is not one that detjax knows, and it may change the model; convert "
        "from the folder in Hugging Face format that the file was made from"
    )


def _put_back(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head in halves, as Hugging Face rotates them, from pairs."""
    shape = values.shape
    pairs = values.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return pairs.swapaxes(1, 2).reshape(shape)


def _tokenizer(facts: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json."""
    kind, split = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={split!r} is not supported; "
            f"only 'gpt2' with {', '.join(_SPLITS)}: take tokenizer files from the folder in "
            "Hugging Face format that the file was made from"
        )
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True)])
        elif type_ == USER_TOKEN:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "padding", "unknown"):
        index = facts.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            key = {"padding": "pad", "unknown": "unk"}.get(name, name)
            config[f"{key}_token"] = tokens[index]
    if facts.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"):
        _begin_with(tokenizer, tokens, facts["tokenizer.ggml.bos_token_id"])
    if (template := facts.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return tokenizer, config


def _begin_with(tokenizer: Tokenizer, tokens: list[str], bos_id: int) -> None:
    """Put the begin token before every text, as the file asks."""
    from tokenizers.processors import TemplateProcessing

    bos = tokens[bos_id]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "llama-bpe": lambda: _by_pattern(LLAMA3_SPLIT),
    "qwen2": lambda: _by_pattern(QWEN2_SPLIT),
    "smollm": _smollm,
}
"""How a text is cut before pairs are merged, by llama.cpp's name."""
