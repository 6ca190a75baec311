# SPDX-License-Identifier: Apache-2.0
"""Make adapters and the logits that PEFT computes with them, on the models of tests/golden/hf.

Nothing here imports detjax. Needs torch, transformers and peft:

    python tools/make_peft_goldens.py --models tests/golden/hf --out tests/golden/peft
"""

import argparse
import json
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import transformers

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
JOINED_MLP = [*ALL[:4], "gate_up_proj", "down_proj"]
JOINED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SEPARATE_LINEAR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
JOINED_LINEAR = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "few": ("llama31", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    "all": (
        "qwen3",
        {
            "r": 16,
            "lora_alpha": 24,
            "use_rslora": True,
            "target_modules": ALL,
            "rank_pattern": {"down_proj": 4, "layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {"gate_proj": 5},
        },
    ),
    "regex": (
        "llama_bias",
        {"r": 5, "lora_alpha": 10, "target_modules": r".*layers\.1\..*(o_proj|k_proj|up_proj)"},
    ),
    "layers": (
        "llama_bias",
        {"r": 2, "lora_alpha": 3, "target_modules": ["down_proj"], "layers_to_transform": [0]},
    ),
    "experts": (
        "qwen3_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 3},
        },
    ),
    "experts_gate_up": (
        "mixtral",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": [],
            "target_parameters": ["experts.gate_up_proj"],
        },
    ),
    # As PEFT saves it of a model of transformers 4, where every expert has modules of its own.
    "expert_modules": (
        "qwen3_moe",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["v_proj", "gate_proj", "up_proj", "down_proj"],
        },
    ),
    # Models whose modules the decoder reads otherwise, or whose layers are others.
    "joined_pairs": ("glm", {"r": 4, "lora_alpha": 8, "target_modules": JOINED_MLP}),
    "joined": ("phi4_longrope", {"r": 4, "lora_alpha": 8, "target_modules": JOINED}),
    "pairs": ("ernie4_5", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "share_rotated": ("glm4_moe", {"r": 4, "lora_alpha": 8, "target_modules": ALL[:4]}),
    "norms_both": ("gemma3", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "norms_after": ("olmo3", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "sinks": ("gpt_oss_bfloat16", {"r": 4, "lora_alpha": 8, "target_modules": ALL[:4]}),
    "linear_attention": (
        "qwen3_5",
        {"r": 4, "lora_alpha": 8, "target_modules": [*ALL, *SEPARATE_LINEAR]},
    ),
    "linear_attention_joined": (
        "qwen3_next",
        {"r": 4, "lora_alpha": 8, "target_modules": [*ALL[:4], *JOINED_LINEAR]},
    ),
    "shared_expert": (
        "qwen2_moe",
        {"r": 4, "lora_alpha": 8, "target_modules": [*ALL, "shared_expert_gate"]},
    ),
    # PEFT adapts the parameters of experts for these names, and no shared expert.
    "experts_by_name": ("glm4_moe", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
}
EXPERT_MODULES = ("expert_modules",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def adapted(models: Path, case: str, seed: int, folder: Path) -> peft.PeftModel:
    """The model of a case with random adapters, whose values bfloat16 holds."""
    base, options = CASES[case]
    # Its other products of experts do not take float64.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models / base, dtype=torch.float32, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    if case in EXPERT_MODULES:
        write_expert_modules(model, options, generator, folder)
        return peft.PeftModel.from_pretrained(model, folder)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    for name, value in made.named_parameters():
        if "lora_" in name:
            value.data = drawn(value.shape, generator)
    return made


def drawn(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Random values of one side, which bfloat16 holds."""
    return (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(torch.bfloat16).float()


def write_expert_modules(
    model: torch.nn.Module, options: dict[str, Any], generator: torch.Generator, folder: Path
) -> None:
    """An adapter with the names of transformers 4; PEFT converts it when it reads it."""
    peft.LoraConfig(task_type="CAUSAL_LM", inference_mode=True, **options).save_pretrained(folder)
    config, tensors = model.config, {}
    width, expert_width = config.hidden_size, config.moe_intermediate_size
    shapes = {
        "gate_proj": (expert_width, width), "up_proj": (expert_width, width),
        "down_proj": (width, expert_width),
    }  # fmt: skip
    for i, layer in enumerate(model.model.layers):
        modules = {"self_attn.v_proj": tuple(layer.self_attn.v_proj.weight.shape)}
        for expert in range(config.num_local_experts):
            modules |= {f"mlp.experts.{expert}.{name}": shape for name, shape in shapes.items()}
        for name, (num_out, num_in) in modules.items():
            path = f"base_model.model.model.layers.{i}.{name}"
            sides = {"A": (options["r"], num_in), "B": (num_out, options["r"])}
            for side, shape in sides.items():
                tensors[f"{path}.lora_{side}.weight"] = drawn(shape, generator)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")


def logits_of(model: peft.PeftModel, ids: list[int], dtype: str) -> torch.Tensor:
    """Logits of every position, as float64."""
    model = model.to(DTYPES[dtype])
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


def main() -> None:
    """Write every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    for seed, (case, (base, _)) in enumerate(CASES.items()):
        if case not in args.cases:
            continue
        folder = args.out / case
        folder.mkdir(parents=True, exist_ok=True)
        if case in EXPERT_MODULES:
            adapted(args.models, case, seed, folder)
        else:
            adapted(args.models, case, seed, folder).save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(8, 320, (21,), generator=generator).tolist()
        logits = {
            dtype: logits_of(adapted(args.models, case, seed, folder), ids, dtype)
            for dtype in DTYPES
        }
        model = adapted(args.models, case, seed, folder).double()
        with model.disable_adapter(), torch.no_grad():
            plain = model(torch.tensor([ids])).logits[0]
        reference = logits["float64"]
        facts = {
            "base": base,
            "ids": ids,
            "max_abs_float32_minus_float64": (logits["float32"] - reference).abs().max().item(),
            "max_abs_bfloat16_minus_float64": (logits["bfloat16"] - reference).abs().max().item(),
            "max_abs_without_adapter": (plain - reference).abs().max().item(),
            "versions": {"peft": peft.__version__, "transformers": transformers.__version__},
        }
        (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
        safetensors.torch.save_file(
            {"logits_float64": reference.contiguous()}, folder / "expected.safetensors"
        )


if __name__ == "__main__":
    main()
