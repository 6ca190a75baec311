# SPDX-License-Identifier: Apache-2.0
"""The tokenizer files of a Hugging Face folder, read and checked."""

import codecs
import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models
import tokenizers.processors

from detjax.models.chat_template import check_template, start_template
from detjax.models.hf_values import read_object

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
"""Folder of further templates, each in a file of its name."""

JSON_TEMPLATE_FILE = "chat_template.json"
"""Of a model that sees images, whose processor has the template."""

_MAP_FILE = "special_tokens_map.json"
_CONVERTIBLE = (
    "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "vocab.json",
    "vocab.txt",
)  # fmt: skip
"""Files of tokenizers of which transformers makes a tokenizer.json."""

_ADDS_BOS = {
    "CodeLlamaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
    "GemmaTokenizer": True,
    "LlamaTokenizer": True,
}
"""Classes whose `add_bos_token` and `add_eos_token` count, and whether one without the first adds
a begin token: those of transformers 4.57. No class of 5.24 reads them beside a tokenizer.json."""

_CLASS_OF_TYPE = {
    **dict.fromkeys(("ernie4_5", "llama", "mistral", "mixtral", "phi3"), "LlamaTokenizer"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    "olmo2": "GPTNeoXTokenizer",
}
"""The class of a `model_type` whose folder names none, of those in `_ADDS_BOS`."""

MAX_FILE_BYTES = 2**28
"""Longest file of a tokenizer; those of large vocabularies have a tenth of it."""

MAX_GROWTH = 16
"""How many times as long replacements and templates may make a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRules:
    """How a token's text becomes bytes: the decoder of a tokenizer.json, token by token.

    Attributes:
        is_byte_level: Each character stands for one byte, as in GPT-2 (Llama 3, Qwen).
        replacements: (old, new) in each token, in order: "▁" to " " (Llama 2, Mistral).
        has_byte_fallback: The token `<0xE4>` is the byte 0xE4.
        strips_first_space: A text that begins with a space is shown without it.
    """

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_fallback: bool = False
    strips_first_space: bool = False

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that `token` adds to a text; they need not be whole characters."""
        if self.is_byte_level:
            byte_of = _byte_of_character()
            if all(character in byte_of for character in token):
                return bytes(byte_of[character] for character in token)
            return token.encode()  # as the library does
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return token.encode()
        return token.encode()


def read_eos_id(folder: Path) -> int | None:
    """Return the end token that a folder's tokenizer_config.json names.

    The same as `Tokenizer.from_folder(folder).eos_id`, without making a tokenizer, so that whoever
    asks with token ids can have it, too. None where there is no tokenizer or it names none.

    Raises:
        ValueError: If a file is broken, or the tokenizer does not have the token.
    """
    path = folder / CONFIG_FILE
    config = read_config(folder)
    if not config.get("eos_token") or not (folder / TOKENIZER_FILE).is_file():
        return None
    try:
        text = token_text(config["eos_token"])
        for token_id, token in config.get("added_tokens_decoder", {}).items():
            if token_text(token) == text:
                return int(token_id)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is malformed ({error!r:.200}); copy the file again") from error
    return _token_id_in(folder, text, _state_of(folder / TOKENIZER_FILE))


@functools.lru_cache(
    maxsize=8
)  # WHY: a start asks three times, and reading takes a tenth of a second
def _token_id_in(folder: Path, text: str, state: tuple[int, ...]) -> int:
    path = folder / TOKENIZER_FILE
    backend = read_backend(path)
    _read_last()[path] = state, backend
    return token_id_of(backend, text, folder)


@functools.cache
def _read_last() -> dict[Path, tuple[tuple[int, ...], tokenizers.Tokenizer]]:
    """What was read to look up a token, for `take_backend`."""
    return {}


def _state_of(path: Path) -> tuple[int, ...]:
    """Another one for a file that was written anew."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def take_backend(path: Path) -> tokenizers.Tokenizer:
    """`read_backend`, or what `read_eos_id` has just read: a tokenizer that nobody else has.

    Raises:
        ValueError: As `read_backend`.
    """
    state, backend = _read_last().pop(path, (None, None))
    is_same = backend is not None and path.is_file() and state == _state_of(path)
    return backend if is_same and backend is not None else read_backend(path)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json, without its padding and truncation.

    Raises:
        ValueError: If it is missing, broken or too large, or makes a text far longer.
    """
    if not path.is_file():
        raise ValueError(_why_no_backend(path))
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes, more than any tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"{path} is not a tokenizer.json that tokenizers {tokenizers.__version__} can read: "
            f"{error}; copy the file again"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    for part in (backend.normalizer, backend.decoder, backend.post_processor):
        growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{path} makes a text {growth} times as long ({type(part).__name__}), more than "
                f"the {MAX_GROWTH} times that are allowed; it is no tokenizer of a language model"
            )
    return backend


def _why_no_backend(path: Path) -> str:
    """What to do without a tokenizer.json: transformers converts other kinds, but not nothing."""
    folder = path.parent
    found = [name for name in _CONVERTIBLE if (folder / name).is_file()]
    if not found:
        return (
            f"{path} does not exist, nor does any other file of a tokenizer; copy {TOKENIZER_FILE} "
            f"and {CONFIG_FILE} of this model's repository into the folder"
        )
    return (
        f"{path} does not exist, but {found[0]} does, which transformers converts: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _growth(step: Any) -> int:
    """How many times as long a part of a tokenizer.json may make a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    texts = [step[key] for key in ("content", "prepend") if isinstance(step.get(key), str)]
    pieces = [step[key] for key in ("single", "pair") if isinstance(step.get(key), list)]
    nested = [step[key] for key in ("normalizers", "decoders", "processors") if key in step]
    return math.prod([*(max(1, len(x)) for x in texts), *map(_growth, nested)]) * max(
        [1, *map(len, pieces)]
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the tokenizer_config.json of a folder; empty where there is none.

    An older one, without `added_tokens_decoder`, has the tokens of special_tokens_map.json where
    there is one, as in transformers.

    Raises:
        ValueError: If a file is no JSON object, or too large.
    """
    config = _read_optional(folder / CONFIG_FILE)
    if "added_tokens_decoder" in config:
        return config
    for key, token in _read_optional(folder / _MAP_FILE).items():
        if key.endswith("_token"):
            config[key] = token
        elif key in ("additional_special_tokens", "extra_special_tokens"):
            has_lists = isinstance(token, list) and isinstance(config.get(key), list)
            config[key] = [*config[key], *token] if has_lists else token
    return config


def file_states(folder: Path) -> list[tuple[int, ...]]:
    """What changes with each file that `files_sha256` may read."""
    paths = [folder / name for name in (TOKENIZER_FILE, CONFIG_FILE, _MAP_FILE)]
    states = [path.stat() for path in paths if path.is_file()]
    return [(it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns) for it in states]


def files_sha256(folder: Path) -> str:
    """SHA-256 over the names and hashes of the files that tokens and their texts depend on.

    special_tokens_map.json is one of them where `read_config` reads it.
    """
    names = [TOKENIZER_FILE, CONFIG_FILE]
    if "added_tokens_decoder" not in _read_optional(folder / CONFIG_FILE):
        names.append(_MAP_FILE)
    total = hashlib.sha256()
    for name in names:
        file = folder / name
        if file.is_file():
            total.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def templates_sha256(templates: Mapping[str, str]) -> str | None:
    """SHA-256 of a chat template; of all by their names, where there are several."""
    if not templates:
        return None
    if list(templates) == ["default"]:
        return hashlib.sha256(templates["default"].encode("utf-8", "surrogatepass")).hexdigest()
    return hashlib.sha256(json.dumps(templates, sort_keys=True).encode()).hexdigest()


def _read_optional(path: Path) -> dict[str, Any]:
    return read_object(path, max_bytes=MAX_FILE_BYTES) if path.is_file() else {}


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name; one without a name is "default".

    As in transformers, files of templates count instead of what the config has. The template of a
    processor, chat_template.json, counts where there is no other.

    Raises:
        ValueError: If one cannot be read, or is no template.
    """
    paths = {"default": folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).is_file() else {}
    paths |= {path.stem: path for path in sorted((folder / OTHER_TEMPLATES).glob("*.jinja"))}
    if paths:
        return {name: read_template_file(path) for name, path in paths.items()}
    where, found = folder / CONFIG_FILE, config.get("chat_template")
    if found is None:
        where = folder / JSON_TEMPLATE_FILE
        found = _read_optional(where).get("chat_template")
    if found is None:
        return {}
    templates = {"default": found}
    if isinstance(found, list):  # several, each {"name": ..., "template": ...}
        try:
            templates = {entry["name"]: entry["template"] for entry in found}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{where} is malformed ({error!r:.200}): each entry of chat_template needs a name "
                "and a template; copy the file again"
            ) from error
    for template in templates.values():
        _check_template(where, template)
    return templates


def start_template_of(folder: Path) -> None:
    """Start the process of a folder's chat template, to be there when its tokenizer is read.

    Files that are broken are left to whoever reads them.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        template = read_templates(folder, read_config(folder)).get("default")
        if template is not None:
            start_template(template)


def read_template_file(path: Path) -> str:
    """Return the chat template of a file.

    Raises:
        ValueError: If it cannot be read, or is no template.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        template = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}; copy the file again") from error
    _check_template(path, template)
    return template


def _check_template(where: Path, template: Any) -> None:
    if not isinstance(template, str):
        raise ValueError(f"{where}: the chat template must be text, not {template!r:.80}")
    try:
        check_template(template)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_added_tokens(config: Mapping[str, Any], added: Mapping[int, str], folder: Path) -> None:
    """Refuse a config with tokens that tokenizer.json lacks: they would be cut into pieces."""
    for key, token in config.get("added_tokens_decoder", {}).items():
        text = token_text(token)
        if added.get(int(key)) != text:
            raise ValueError(
                f"{folder / CONFIG_FILE} has token {key} as {text!r}, but {TOKENIZER_FILE} has "
                f"{added.get(int(key))!r}; the files are of two tokenizers, copy both again"
            )


def token_text(token: Any) -> str:
    """Read a token as a config writes it: its text, or an object with its `content`."""
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{CONFIG_FILE}: {token!r} is not a token")
    return text


def token_texts(tokens: Any) -> list[str]:
    """Read a list of tokens, or an object of named ones."""
    return [token_text(t) for t in (tokens.values() if isinstance(tokens, dict) else tokens)]


def token_id_of(backend: tokenizers.Tokenizer, text: str, folder: Path) -> int:
    """The id of a token that a folder's config names.

    Raises:
        ValueError: If the tokenizer has no such token.
    """
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise ValueError(
            f"{folder / CONFIG_FILE} names the token {text!r}, which {TOKENIZER_FILE} does not "
            "have; the files are of two tokenizers, copy both again"
        )
    return token_id


def unk_id_of(backend: tokenizers.Tokenizer) -> int | None:
    """What the model of a tokenizer.json gives for a text that it has no token for."""
    model = backend.model
    if isinstance(model, tokenizers.models.Unigram):
        return json.loads(model.__getstate__())["unk_id"]
    return None if model.unk_token is None else backend.token_to_id(model.unk_token)


def template_tokens(
    named: Mapping[str, str], config: Mapping[str, Any], lists: Iterable[str]
) -> dict[str, Any]:
    """What a template sees of the tokens of a config: those with names, and one list."""
    seen: dict[str, Any] = dict(named)
    if isinstance(listed := config.get("additional_special_tokens"), list) and listed:
        seen["additional_special_tokens"] = token_texts(listed)
    for tokens in map(config.get, lists):
        if isinstance(tokens, dict):
            seen |= {name: token_text(token) for name, token in tokens.items()}
    return seen


def set_post_processor(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    folder: Path,
    *,
    named: Mapping[str, str],
    ids: Mapping[str, int],
) -> None:
    """Let `add_bos_token` and `add_eos_token` decide where a config has one and its class reads it.

    Where transformers 4.57 and 5.24 put the same tokens around a text, so does this. Where they
    differ, a flag that is given counts as in 4.57: 5.24 reads neither beside a tokenizer.json. With
    no flag the tokenizer.json decides, as in 5.24; 4.57 takes the defaults of the class.

    Args:
        backend: Is changed.
        config: Of the tokenizer.
        folder: With the config.json that may say the class.
        named: Tokens by their keys.
        ids: Of the tokens.

    Raises:
        ValueError: If config.json is needed and broken.
    """
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return  # the tokenizer.json says it
    adds_bos = _ADDS_BOS.get(_class_of(config, folder))
    if adds_bos is None:
        return
    adds_bos = config.get("add_bos_token", adds_bos)
    first = [named["bos_token"]] if adds_bos and "bos_token" in named else []
    last = [named["eos_token"]] if config.get("add_eos_token") and "eos_token" in named else []
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=None,
        special_tokens=[(text, ids[text]) for text in dict.fromkeys([*first, *last])],
    )


def _class_of(config: Mapping[str, Any], folder: Path) -> str:
    """The class of a tokenizer, less "Fast"; Llama's where nothing names one."""
    name = config.get("tokenizer_class")
    if name is None:
        model = _read_optional(folder / "config.json")
        kind = model.get("model_type")
        by_type = _CLASS_OF_TYPE.get(str(kind), "") if kind is not None else "LlamaTokenizer"
        name = model.get("tokenizer_class") or by_type
    return str(name).removesuffix("Fast")


def byte_rules_of(backend: tokenizers.Tokenizer, path: Path) -> ByteRules:
    """Read the decoder of a tokenizer.json.

    Raises:
        ValueError: If it has a step that is not known, which would show another text.
    """
    if backend.decoder is None:
        raise ValueError(f"{path} has no decoder; Llama, Mistral and Qwen tokenizers have one")
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return ByteRules(is_byte_level=True)
    is_known = all(map(_is_known_step, steps))
    if not is_known or kinds != sorted(kinds, key=_STEP_ORDER.index):
        raise ValueError(
            f"{path}: the decoder {json.dumps(decoder, ensure_ascii=False)} is not known; known "
            "are ByteLevel, and Replace, ByteFallback, Fuse, Strip of one first space in this order"
        )
    return ByteRules(
        replacements=tuple(
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace"
        ),
        has_byte_fallback="ByteFallback" in kinds,
        strips_first_space="Strip" in kinds,
    )


_STEP_ORDER = ("Replace", "ByteFallback", "Fuse", "Strip")


def _is_known_step(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    if step["type"] == "Strip":
        return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
    return step["type"] in _STEP_ORDER


@functools.cache
def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
