# SPDX-License-Identifier: Apache-2.0
"""The options that several commands share, each defined once. No JAX.

An option has the name of the field that it sets, and is accepted in vLLM's spelling too. A command
whose option must differ says so with `dataclasses.replace`; `tests/cli/test_options.py` lists why.
"""

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detjax import defaults
from detjax.cli.errors import InputError, bad_input
from detjax.compilation.source import NO_CACHE as NO_CACHE
from detjax.compilation.source import default_cache_dir
from detjax.defaults import AUTO, EAGLE3, KV_CACHE_DTYPES, MTP, NO_CAST
from detjax.engine.config import MODES, SELF_CHECKS, EngineConfig
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.speculative_config import METHODS, SpeculativeConfig
from detjax.models.bundled import BUNDLED_NAME
from detjax.pallas_kernels.backend import Backend

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a command line.

    Attributes:
        name: Of its value in the parsed arguments.
        help: What it does, without its default.
        flags: Its spellings; messages use the first that has two dashes. None is made of the name.
        default: A bool makes it a switch, a tuple one that may be given several times.
        default_text: The default in `--help`, where the value does not say it.
        parse: Reads a value, or one of several.
        metavar: Stands for a value in `--help`.
        choices: All values that it may have; none allows any.
        nargs: As argparse has it.
        sets: The class whose field of this name it sets.
        is_required: There is no default.
    """

    name: str
    help: str
    flags: tuple[str, ...] = ()
    default: Any = None
    default_text: str = ""
    parse: Callable[[str], Any] = str
    metavar: str = "N"
    choices: tuple[Any, ...] = ()
    nargs: str | None = None
    sets: type | None = None
    is_required: bool = False

    def __post_init__(self):
        """Make the flag of the name."""
        if not self.flags:
            object.__setattr__(self, "flags", (flag_like(self.name),))

    @property
    def flag(self) -> str:
        """The spelling that messages use."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def off_flag(self) -> str:
        """What turns a switch off that is on by default."""
        return f"--no-{self.flag.removeprefix('--')}"

    @property
    def shown_default(self) -> str:
        """The default as `--help` shows it."""
        if isinstance(self.default, bool):
            return self.default_text or ("on" if self.default else "off")
        is_none = self.default is None or self.default in ("", ())
        return self.default_text or ("none" if is_none else f"{self.default}").replace("%", "%%")

    def add_to(self, parser: "argparse._ActionsContainer") -> None:
        """Add it to a parser or a group of one."""
        kind: dict[str, Any]
        if isinstance(self.default, bool):
            with_no = argparse.BooleanOptionalAction
            kind = {"action": with_no if self.default else "store_true"}
        else:
            kind = {"type": self.parse, "nargs": self.nargs, "required": self.is_required}
            kind |= {"choices": self.choices} if self.choices else {"metavar": self.metavar}
            if isinstance(self.default, tuple):
                kind["action"] = "extend" if self.nargs else "append"
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        # A parser that sets only what was given says so.
        if parser.argument_default is not argparse.SUPPRESS:
            kind["default"] = default
        shown = "required" if self.is_required else f"default: {self.shown_default}"
        told = f"{self.help} ({shown})"
        parser.add_argument(*self.flags, dest=self.name, help=told, **kind)


def flag_like(name: str) -> str:
    """The flag of a name: `--max-tokens` of `max_tokens`."""
    return "--" + name.replace("_", "-")


def add_options(
    parser: argparse.ArgumentParser, title: str, options: Sequence[Option], text: str = ""
) -> None:
    """Add options to a parser, as a group with a title and, if there is one, a description."""
    group = parser.add_argument_group(title, text or None)
    for option in options:
        option.add_to(group)


def in_flags(message: str, options: Iterable[Option]) -> str:
    """A message about values of fields as one about the options that set them.

    `max_len=9 is above it` becomes `--max-len 9 is above it`. Of names that are ordinary words only
    those with a value are replaced.
    """
    flags = {option.name: option.flag for option in options}
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    message = re.sub(
        rf"(?<![\w.-])({names})(?:\[[^]]*\])?=(?:'([\w.]+)')?",
        lambda found: f"{flags[found[1]]} {found[2] or ''}",
        message,
    )
    return re.sub(
        rf"(?<![\w.-])({names})(?![\w=-])",
        lambda found: flags[found[1]] if "_" in found[1] else found[1],
        message,
    )


def of_field(of: type, name: str) -> Option:
    """An option that sets a field of `EngineConfig` or `SamplingParams`.

    Its default is the field's, and its help what the class's docstring says of the field.
    """
    (field,) = (field for field in dataclasses.fields(of) if field.name == name)
    is_number = isinstance(field.default, int | float)
    return Option(
        name=name,
        help=_description(of, name),
        default=field.default,
        parse=type(field.default) if is_number else str,
        sets=of,
    )


def _description(of: type, name: str) -> str:
    """What the docstring of a class says of a field, as a line of `--help`."""
    found = re.search(
        rf"^    {name}: (.*?)(?=^    \w+: |^\S|\n\n|\Z)", inspect.getdoc(of) or "", re.M | re.S
    )
    text = " ".join(found[1].split()) if found else ""
    return (text[:1].lower() + text[1:]).removesuffix(".").replace("%", "%%")


# -------------------------------------------------------------------------------------- the model

MODEL = Option(
    name="model",
    flags=("-m", "--model"),
    default=BUNDLED_NAME,
    default_text=f"{BUNDLED_NAME}, the small model that comes with detjax",
    metavar="DIR_OR_ID",
    help="folder in Hugging Face format, or a Hugging Face id, which is downloaded once",
)
REVISION = Option(
    name="revision",
    metavar="REV",
    default_text="its main branch",
    help="branch, tag or commit of a Hugging Face id",
)
CHAT_TEMPLATE = Option(
    name="chat_template",
    metavar="FILE",
    default_text="that of the model",
    help="a Jinja chat template to use in place of the model's own",
)
GENERATION_CONFIG = Option(
    name="generation_config",
    default=AUTO,
    choices=(AUTO, "none"),
    help="default values of sampling options. auto: those of the model's generation_config.json, "
    "if there is one; a server does not read the number of tokens from it. none: those of detjax",
)
DTYPE = Option(
    name="dtype",
    default="bfloat16",
    choices=DTYPES,
    help="dtype of weights and of compute. It changes the bits",
)
CAST_WEIGHTS = Option(
    name="cast_weights",
    default=NO_CAST,
    choices=(NO_CAST, "bfloat16"),
    help="round a checkpoint of float16 or float32 to this dtype (to nearest, ties to even). "
    "Without it a float16 checkpoint needs --dtype float32. It changes the bits",
)
QUANTIZED_WEIGHTS = Option(
    name="quantized_weights",
    default="auto",
    choices=("auto", "packed", "expanded", "w8a8"),
    help="how the matrices of a quantised model are stored on the devices. packed: as codes of 4 "
    "or 8 bits. expanded: as bfloat16. auto: packed on Hopper GPUs. These three give the same "
    "bits. w8a8: 8-bit weights are multiplied with activations of 8 bits, which are quantised as "
    "the checkpoint says (by token, by group, or with its own scales). It changes the bits",
)
KV_CACHE_DTYPE = Option(
    name="kv_cache_dtype",
    default=AUTO,
    choices=(*KV_CACHE_DTYPES, "fp8"),
    help="dtype of the key and value cache. auto: the dtype of compute. fp8_e4m3, or fp8: half the "
    "bytes of bfloat16. It changes the bits",
)
BACKEND = Option(
    name="backend",
    default=AUTO,
    choices=(AUTO, *(backend.value for backend in Backend)),
    help="which kernels run. sm90: those for Hopper GPUs. reference: the bits of sm90 on a CPU. "
    "portable: every model on a CPU, with other bits. auto: the first of sm90, reference and "
    "portable that the hardware and the model allow",
)

# ------------------------------------------------------------------- batch, mesh and schedule

TP = Option(
    name="tp",
    flags=("--tp", "--tensor-parallel-size"),
    default=1,
    parse=int,
    help="devices that share each layer: a power of two that divides the model's number of heads "
    "and the leaves of its sums, 8 in most models. Without GPUs the devices are virtual",
)
DP = Option(
    name="dp",
    flags=("--dp", "--data-parallel-size"),
    default=1,
    parse=int,
    help="replicas of the model, which share the prompts; each runs on --tp devices",
)
COORDINATOR = Option(
    name="coordinator",
    metavar="HOST:PORT",
    default_text="from SLURM or Kubernetes, else one process",
    help="address of process 0, if a job has several processes. All processes get the same "
    "command, except for --process-id. Only process 0 answers",
)
NUM_PROCESSES = Option(
    name="num_processes",
    parse=int,
    default_text="from SLURM or Kubernetes, else 1",
    help="processes of the job, which share the --dp times --tp devices",
)
PROCESS_ID = Option(
    name="process_id",
    parse=int,
    metavar="I",
    default_text="from SLURM or Kubernetes",
    help="number of this process in the job, from 0",
)
JOB = COORDINATOR, NUM_PROCESSES, PROCESS_ID
MAX_LEN = replace(
    of_field(EngineConfig, "max_len"),
    flags=("--max-len", "--max-model-len"),
    default=None,
    parse=int,
    default_text="the model's context, or the tokens that the cache can hold if those are fewer",
    help="most tokens of a prompt plus its completion",
)
BATCH_SIZE = replace(
    of_field(EngineConfig, "batch_size"),
    flags=("--batch-size", "--max-num-seqs"),
    default=None,
    parse=int,
    default_text="per replica 8 on a CPU and 256 on a GPU, or 512 for offline work if the cache "
    "has room; fewer if there are fewer sequences",
    help="most sequences that run at once, over all replicas; a multiple of --dp",
)
PREFILL_CHUNK = replace(
    of_field(EngineConfig, "prefill_chunk"),
    default=None,
    parse=int,
    default_text="64 on a CPU, 512 on a GPU; less if all prompts are shorter",
    help="most prompt tokens of one sequence in one prefill step",
)
NUM_PAGES = replace(
    of_field(EngineConfig, "num_pages"),
    flags=("--cache-pages", "--num-pages"),
    default_text="0: enough for --batch-size sequences of --max-len tokens, or as many as fit",
    help="pages of the key and value cache, a multiple of --dp. If they run out, sequences are "
    "preempted and computed again",
)
GPU_MEMORY_UTILIZATION = Option(
    name="gpu_memory_utilization",
    flags=("--gpu-memory-utilization", "--kv-memory"),
    parse=float,
    metavar="SHARE",
    default_text=f"{defaults.GPU_MEMORY_UTILIZATION}",
    help="share of each GPU's memory that this process takes, as in vLLM. Nine tenths of it are "
    "for weights and cache, the rest for activations. If XLA_PYTHON_CLIENT_MEM_FRACTION is set, "
    "the process takes that share, and the smaller of both counts. GPUs only",
)
MODE = replace(
    of_field(EngineConfig, "mode"),
    choices=MODES,
    help="invariant: every step runs the batch-invariant kernels. dvr (decode, verify, roll back): "
    "fast steps draft tokens, batch-invariant steps verify them in windows, and only verified "
    "tokens are returned; the bits are those of invariant. On Hopper dvr drafts only with a draft "
    "model or 8-bit draft weights (`generate --draft-weights`), because the fast steps of the "
    "model itself are slower than the batch-invariant ones. fast: XLA's own kernels, whose bits "
    "depend on the batch; no claim holds",
)
CANONICAL_MODE = replace(
    MODE,
    choices=("invariant", "dvr"),
    help=MODE.help.partition(" fast: XLA's")[0].removesuffix("."),
)
"""`--mode` of a command whose answers must be canonical."""
SPECULATIVE_CONFIG = Option(
    name="speculative_config",
    metavar="JSON",
    help="speculative decoding; it changes no bit, because every draft is verified. A JSON object: "
    f"`method` is one of {', '.join(METHODS)}. `model` is the folder or Hugging Face id of a draft "
    "model or an EAGLE-3 head; an MTP head is in the folder of --model. `quantization` of a head "
    f"is {', '.join(defaults.HEAD_QUANTIZATIONS)}. `num_speculative_tokens` is 3 by default, and 8 "
    "for suffix. `disable_by_batch_size` (default 32): no drafts while more sequences decode",
)
ENABLE_LORA = Option(
    name="enable_lora",
    default=False,
    help="compile the programs for LoRA adapters, so that adapters can be loaded. --lora-modules "
    "implies it",
)
LORA_MODULES = Option(
    name="lora_modules",
    default=(),
    nargs="+",
    metavar="NAME=DIR",
    help="LoRA adapters: a name and the folder that PEFT has saved, or vLLM's JSON object with "
    "`name` and `path`",
)
MAX_LORAS = Option(
    name="max_loras", parse=int, default=defaults.MAX_LORAS,
    help="most LoRA adapters in one batch. So many stay on the devices, the last used ones",
)  # fmt: skip
MAX_LORA_RANK = Option(
    name="max_lora_rank", parse=int, default=defaults.MAX_LORA_RANK,
    help="highest rank of a LoRA adapter, rounded up to a power of two from 16 to 128",
)  # fmt: skip
MAX_EXPERT_LORA_RANK = Option(
    name="max_expert_lora_rank", parse=int, default=0,
    help="highest rank of a LoRA adapter of a mixture's experts, rounded up likewise; 0: no such "
    "adapters",
)  # fmt: skip
DECODE_STEPS = replace(
    of_field(EngineConfig, "decode_steps"),
    default=None,
    parse=int,
    default_text="8 for a model so small that a GPU waits for the host, 4 with drafts of another "
    "model; else 1",
    help="steps of the model per launch, if every running sequence decodes: tokens of each "
    "sequence, or windows of a draft model or head. More are faster for small models, where the "
    "host needs longer to launch a step than the device to run it. The tokens of a launch are "
    "returned together, those after the end of a completion are dropped, and a new request waits "
    "for the launch to end. With --mode dvr at most the drafts of a verification window, 31 by "
    "default",
)
SELF_CHECK = replace(
    of_field(EngineConfig, "self_check"),
    choices=SELF_CHECKS,
    help="start: compare each batch-invariant program with prefill when it has been compiled; a "
    "difference is an error. always: a server also checks some answers while it is idle. off: "
    "no checks",
)
CACHE_DIR = Option(
    name="cache_dir",
    default=default_cache_dir(),
    metavar="DIR",
    help=f"folder of compiled programs, which the next start reads; {NO_CACHE}: keep no programs",
)
WARM = Option(
    name="warm",
    default=False,
    help="compile all programs that requests can need, write them to --cache-dir, and exit",
)

# --------------------------------------------------------------------------------------- sampling

PROMPT = Option(
    name="prompt",
    flags=("-p", "--prompt"),
    default=(),
    metavar="TEXT",
    help="text to continue; may be given several times. - reads one prompt from standard input "
    "and drops its last newline. Write --prompt=-x for a text that begins with a dash",
)
PROMPTS_FILE = Option(
    name="prompts_file",
    metavar="FILE",
    help=".txt: one prompt per line. .jsonl: one JSON object per line, with `prompt`, "
    "`prompt_token_ids`, or `messages` ([{role, content}, ...]), to which the chat template is "
    "applied. Optional fields are `id`, `sampling` ({field of SamplingParams: value}), `lora` (a "
    'name of --lora-modules, or "" for the model alone), and for the chat template `tools`, '
    "`chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`. Blank lines "
    "are skipped",
)
MAX_TOKENS = replace(
    of_field(SamplingParams, "max_tokens"),
    help="most tokens of a completion, which also ends with the model's context",
)
TEMPERATURE = replace(
    of_field(SamplingParams, "temperature"),
    metavar="T",
    help="divides the logits: from 1e-30 to 1e30, or 0 for greedy (of equal logits, the first)",
)
TOP_K = replace(of_field(SamplingParams, "top_k"), metavar="K")
TOP_P = replace(of_field(SamplingParams, "top_p"), metavar="P")
MIN_P = replace(of_field(SamplingParams, "min_p"), metavar="P")
SEED = replace(
    of_field(SamplingParams, "seed"),
    metavar="S",
    parse=int,
    default_text="random if tokens are sampled, and written to the output",
    help="seed of the sampling noise, 0 to 2**64 - 1; the same seed and prompt give the same "
    "answer",
)
SAMPLING = MAX_TOKENS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED

# ----------------------------------------------------------------------------------------- output

FORMAT = Option(
    name="format",
    default="text",
    choices=("text", "json"),
    help="format of the result: text, or one JSON document",
)
OUTPUT = Option(
    name="output",
    flags=("-o", "--output", "--out"),
    metavar="FILE",
    default_text="standard output",
    help="file for the result",
)
REPORT = Option(
    name="report",
    flags=("--report", "--json"),
    metavar="FILE",
    parse=Path,
    help="also write the result as JSON to this file",
)
SIGN = Option(
    name="sign",
    metavar="KEY",
    help="sign receipts with this ed25519 private key, a PEM file",
)
QUIET = Option(
    name="quiet",
    flags=("-q", "--quiet"),
    default=False,
    help="write only errors and differing bits to standard error",
)
CONFIG = Option(
    name="config",
    metavar="FILE",
    help="TOML file of options, such as `batch-size = 16`; the command line takes precedence",
)


def read_lora_modules(given: Sequence[str]) -> dict[str, Path]:
    """The folder of each adapter of --lora-modules, by name.

    Raises:
        InputError: If one cannot be read, or is no folder.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, folder = _lora_module(text)
        if name in found:
            raise InputError(f"--lora-modules {name!r} is given twice; give each a name of its own")
        if not Path(folder).is_dir():
            raise InputError(
                f"--lora-modules {name}={folder} is no folder; give one that PEFT's "
                "save_pretrained has written"
            )
        found[name] = Path(folder)
    return found


def _lora_module(text: str) -> tuple[str, str]:
    """Name and folder of an adapter."""
    if not text.startswith("{"):
        name, _, folder = text.partition("=")
        values: Any = {"name": name, "path": folder}
    else:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"--lora-modules {text:.200} is not JSON ({error})") from error
    name, folder = (values.get(key) for key in ("name", "path"))
    if not all(isinstance(value, str) and value for value in (name, folder)):
        raise InputError(
            f"--lora-modules {text:.200} has no name or no folder; give NAME=DIR, such as "
            "sql=adapters/sql"
        )
    return name, folder


def check_drafts(given: str | None, model: str, revision: str | None) -> None:
    """See that what --speculative-config names is there, as `hub.check_model` does.

    An MTP head is in the folder of --model and --revision.

    Raises:
        InputError: If it is not.
    """
    from detjax.models.hub import check_draft_model, check_model

    speculative = read_speculative_config(given)
    if speculative is None:
        return
    with bad_input("--speculative-config: "):
        if speculative.method == MTP:
            check_model(model, revision=revision, head=MTP)
        elif speculative.model and speculative.method == EAGLE3:
            check_model(speculative.model, head=EAGLE3)
        elif speculative.model:
            check_draft_model(speculative.model, model, revision=revision)


def read_speculative_config(given: str | None) -> SpeculativeConfig | None:
    """Where drafts come from, if --speculative-config says it.

    Raises:
        InputError: If it cannot be read.
    """
    if given is None:
        return None
    with bad_input("--speculative-config: "):
        return SpeculativeConfig.of(given)
