# SPDX-License-Identifier: Apache-2.0
"""A saved model is the folder that it came from, and what trained weights become in one."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import detjax
from detjax.cli.errors import BAD_INPUT
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.bundled import bundled_model_path
from detjax.models.folder_kind import check_kind
from detjax.models.hf_config import load_config
from detjax.models.loading import LoadedModel, load_model
from detjax.models.params import EMBED_NAME
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights import reading, write
from detjax.models.weights.files import write_tensors
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import answers, dummy_config, dummy_model

GOLDENS = Path(__file__).parents[1] / "golden" / "hf"
CASES = tuple(sorted(path.name for path in GOLDENS.iterdir()))
QUICK = "gemma3", "phi3", "glm", "qwen3_5_moe"
"""A tied table with a factor and gains of 1 + w; joined projections; pairs of neighbours; experts
in one tensor, tensors of other parts."""


def load(folder: Path, *, tp: int = 1, dtype: str | None = None) -> LoadedModel:
    """In the dtype of its files."""
    if dtype is None:
        with safe_open(folder / "model.safetensors", framework="np") as file:
            dtype = {"BF16": "bfloat16", "F32": "float32"}[file.get_slice(EMBED_NAME).get_dtype()]
    return load_model(
        str(folder),
        profile=NumericsProfile(weight_dtype=dtype, compute_dtype=dtype),
        mesh=make_mesh(1, tp),
        backend=Backend.PORTABLE,
        max_len=64,
    )


def assert_same_weights(found: LoadedModel, expected: LoadedModel) -> None:
    pairs = zip(
        jax.tree.leaves_with_path(found.own_weights()),
        jax.tree.leaves(expected.own_weights()),
        strict=True,
    )
    for (path, got), want in pairs:
        assert_bitwise_equal(got, want, claim=jax.tree_util.keystr(path))


def assert_same_files(found: Path, expected: Path) -> None:
    """The same tensors, bit for bit."""
    got, want = (load_file(path / "model.safetensors") for path in (found, expected))
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert_bitwise_equal(got[name], tensor, claim=name)


@pytest.mark.parametrize("case", quick_and_slow(QUICK, CASES))
def test_a_saved_model_has_the_tensors_of_the_folder_that_it_came_from(case, tmp_path):
    source, folder = GOLDENS / case, tmp_path / "saved"
    model = load(source)
    model.save(folder)
    assert load_config(folder) == load_config(source)
    assert_same_weights(load(folder), model)
    if case != "gpt_oss":  # whose experts are MXFP4
        assert_same_files(folder, source)
        assert json.loads((folder / "config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )


@pytest.mark.invariance
def test_a_saved_model_answers_with_the_bits_it_was_saved_with(tmp_path):
    """Saved from two ranks, in several files."""
    model = bundled(tp=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "FILE_BYTES", 2 * 10**6)
        model.save(tmp_path / "saved")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 2.1 * 10**6 for path in files[1:])
    again = bundled(tmp_path / "saved")
    assert_same_weights(again, bundled())
    assert again.fingerprint == model.fingerprint
    ids = tuple(Tokenizer.from_folder(tmp_path / "saved").encode("The old house by the sea"))
    request = Request(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=4))
    (expected,), (found,) = (answers(it, [request], max_len=64) for it in (model, again))
    assert found.digest() == expected.digest()


def bundled(folder: Path | None = None, *, tp: int = 1) -> LoadedModel:
    return load(folder or bundled_model_path(), tp=tp, dtype="bfloat16")


def test_weights_that_were_trained_are_written_so_that_they_are_read(tmp_path):
    """Gains of Gemma 3 are 1 + w in float32; its table is the head times a factor."""
    model = load(GOLDENS / "gemma3")
    rng = np.random.default_rng(1)
    params = dict(model.own_weights())
    gain = np.asarray(params["final_norm"])
    gain = gain + rng.standard_normal(gain.shape).astype(np.float32) / 99
    params["final_norm"] = jax.device_put((gain - np.float32(1)) + np.float32(1))
    model.replace_weights(params)
    model.save(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")["model.norm.weight"]
    assert stored.dtype == np.float32
    assert_same_weights(load(tmp_path / "saved"), model)

    params["embed"] = -params["embed"]
    model.replace_weights(params)
    with pytest.raises(ValueError, match="cannot hold what is read as 'model.embed_tokens.weight'"):
        model.save(tmp_path / "of another head")


def test_what_no_file_holds_is_refused():
    """The quotient of 1 and the factor is subnormal, and too coarse."""
    one = reading.Reading(name="a", source="b", source_rows=2, start=0, num_rows=2, scale=3e38)
    values = np.array([[1.0], [2.0]], np.float32)
    with pytest.raises(ValueError, match="values of 'a' are what no value of 'b' is read as"):
        reading.written_tensor((one,), {"a": values}, np.dtype(np.float32))


def test_names_and_other_parts_are_those_of_the_folder(tmp_path):
    """Of a model that sees images: what is for images is copied."""
    case = "ministral3"
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / case, source, copy_function=shutil.copyfile)
    held = load_file(source / "model.safetensors")
    longer = {name.replace("model.", "model.language_model.", 1): x for name, x in held.items()}
    spare = {"vision_tower.a": np.arange(4, dtype=np.float32).reshape(2, 2)}
    save_file(longer | spare, source / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    for key in ("architectures", "transformers_version", "dtype"):
        del text[key]
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral"},
        "text_config": text,
        "dtype": "float16",
    }
    (source / "config.json").write_text(json.dumps(config))
    load(source, dtype="bfloat16").save(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", source)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written == config | {"dtype": "bfloat16"}


def test_a_folder_is_not_written_over(tmp_path):
    model = bundled()
    for name in ("config.json", "model-00001-of-00002.safetensors", "params"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(ValueError, match=f"holds {name} already; give another folder"):
            model.save(folder)
    with pytest.raises(ValueError, match="has random weights: it has no config.json"):
        dummy_model(dummy_config()).save(tmp_path / "random")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "detjax_params.json").write_text("{}")
    with pytest.raises(ValueError, match="in a form that detjax wrote before it wrote safetensors"):
        check_kind(tmp_path / "old")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_weights_may_be_read_by_those_who_may_read_other_new_files(tmp_path, umask, mode):
    """So a server of another user can open a folder that was made for it."""
    before = os.umask(umask)
    try:
        for _ in range(2):  # a new file, and one that is replaced
            write_tensors({"a": np.zeros(3, np.float32)}, tmp_path / "m.safetensors")
            assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


SMALL_FILES = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
"""
"""A limit on the size of files, which ends a write as a full disk does."""

QUANTIZES = f"""{SMALL_FILES}
from detjax.quantize import main
sys.exit(main(["-m", "novels-6m", "--scheme", "int8-w8a8", "-q", "-o", sys.argv[1]]))
"""

WRITES = f"""{SMALL_FILES}
from pathlib import Path
import numpy as np
from detjax.models.weights.files import write_tensors
for path in map(Path, sys.argv[1:]):
    try:
        write_tensors({{"a": np.ones(10_000, np.float32)}}, path)
    except OSError as error:
        print(error.errno, error.filename)
"""


def test_a_file_that_cannot_be_written_is_named_and_no_part_of_it_stays(tmp_path):
    out = tmp_path / "copy"
    command = [sys.executable, "-c", QUANTIZES, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == BAD_INPUT, done.stderr
    assert done.stderr.splitlines() == [f"error: {out / 'model.safetensors'}: File too large"]
    assert not list(out.iterdir())


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path):
    path, new = tmp_path / "m.safetensors", tmp_path / "new.safetensors"
    write_tensors({"a": np.zeros(3, np.float32)}, path)
    before = path.read_bytes()
    command = [sys.executable, "-c", WRITES, str(path), str(new)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{errno.EFBIG} {path}", f"{errno.EFBIG} {new}"]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_no_module_writes_weights_with_a_mode_of_its_own():
    package = Path(detjax.__file__).parent
    written = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "import save_file" in path.read_text()
    }
    assert {name for name in written if not name.startswith("testing/")} == {
        "models/weights/files.py"
    }
