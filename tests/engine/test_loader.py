"""Bad checkpoints are refused by file and tensor; direct loading holds one copy of the weights, staged two."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.api import LLM, CheckpointError
from engine.loader.header import read_header
from engine.loader.load import Parameter, load
from tests.engine.checkpoints import make_checkpoint
from tests.engine.conftest import Reference

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit_bytes(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def edit_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = edit(header)
    text = json.dumps(header) if text is None else text
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + raw[8 + length :])


def edit_tensors(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def move_offset(header: dict[str, Any]) -> None:
    header[DOWN]["data_offsets"][0] += 4


def overlap(header: dict[str, Any]) -> None:
    """Let one tensor name the bytes of the one of the same size in the layer before."""
    header[DOWN]["data_offsets"] = header[DOWN.replace("1", "0")]["data_offsets"]


def swap_shape(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [63]


def duplicate(header: dict[str, Any]) -> str:
    return json.dumps(header)[:-1] + f', "{DOWN}": {json.dumps(header[DOWN])}}}'


BAD: list[tuple[str, Callable[[Path], Any], str]] = [
    ("truncated", lambda d: edit_bytes(d / WEIGHTS, lambda raw: raw[:-1000]), r"model\.safetensors: .* truncated"),
    ("truncated-header", lambda d: edit_bytes(d / WEIGHTS, lambda raw: raw[:100]), r"model\.safetensors: 100 bytes .*truncated"),
    ("trailing", lambda d: edit_bytes(d / WEIGHTS, lambda raw: raw + b"x"), r"model\.safetensors: .*bytes too many"),
    ("empty", lambda d: (d / WEIGHTS).write_bytes(b""), r"model\.safetensors: 0 bytes"),
    ("not-safetensors", lambda d: (d / WEIGHTS).write_bytes(b"PK\x03\x04" * 100), r"model\.safetensors: .*not a safetensors file"),
    ("not-json", lambda d: (d / WEIGHTS).write_bytes((3).to_bytes(8, "little") + b"{a}"), r"model\.safetensors: not a safetensors file"),
    ("nested", lambda d: (d / WEIGHTS).write_bytes((99999).to_bytes(8, "little") + b"[" * 99999),
     r"model\.safetensors: not a safetensors file"),
    ("gone", lambda d: (d / WEIGHTS).unlink(), r"model\.safetensors: no such file"),
    ("a-folder", lambda d: replace_by_folder(d / WEIGHTS), r"model\.safetensors: not a safetensors file"),
    ("span", lambda d: edit_header(d / WEIGHTS, move_offset), rf"model\.safetensors: tensor {DOWN} is F32"),
    ("overlap", lambda d: edit_header(d / WEIGHTS, overlap), rf"model\.safetensors: tensor {DOWN} begins at byte .*hole or overlap"),
    ("shape-span", lambda d: edit_header(d / WEIGHTS, swap_shape), r"tensor model\.norm\.weight is F32 \[63\] but spans 256 bytes"),
    ("duplicate", lambda d: edit_header(d / WEIGHTS, duplicate), r"model\.safetensors: not a safetensors file \(a name appears twice"),
    ("odd-dtype", lambda d: edit_header(d / WEIGHTS, lambda h: h[DOWN].update(dtype="F4")), f"tensor {DOWN} has dtype 'F4'"),
    ("malformed", lambda d: edit_header(d / WEIGHTS, lambda h: h[DOWN].update(shape="big")), f"tensor {DOWN} has a malformed entry"),
    ("missing", lambda d: edit_tensors(d / WEIGHTS, lambda t: t.pop(DOWN)), f"tensor {DOWN} is missing"),
    ("unknown", lambda d: edit_tensors(d / WEIGHTS, lambda t: t.update(extra=np.zeros(3))), r"model\.safetensors: tensor extra is unknown"),
    ("shape", lambda d: edit_tensors(d / WEIGHTS, lambda t: t.update({DOWN: t[DOWN].T.copy()})),
     rf"model\.safetensors: tensor {DOWN} has shape \[96, 64\], config\.json asks for \[64, 96\]"),
    ("integers", lambda d: edit_tensors(d / WEIGHTS, lambda t: t.update({DOWN: t[DOWN].astype("int32")})), f"tensor {DOWN} has dtype I32"),
    ("architecture", lambda d: edit_config(d, architectures=["GPT2LMHeadModel"]), r"config\.json: architectures is \['GPT2LMHeadModel'\]"),
    ("layers", lambda d: edit_config(d, num_hidden_layers=4), r"tensor model\.layers\.3\..* is missing"),
    ("fewer-layers", lambda d: edit_config(d, num_hidden_layers=2), r"tensor model\.layers\.2\..* is unknown"),
    ("bias", lambda d: edit_config(d, attention_bias=True), r"config\.json: attention_bias is True"),
    ("rope", lambda d: edit_config(d, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), r"config\.json: rope_type is 'yarn'"),
    ("act", lambda d: edit_config(d, hidden_act="gelu"), r"config\.json: hidden_act is 'gelu'"),
    ("no-size", lambda d: edit_config(d, hidden_size=None), r"config\.json: hidden_size is None"),
    ("heads", lambda d: edit_config(d, num_key_value_heads=3), r"config\.json: num_attention_heads 8 is no multiple of"),
    ("quantized", lambda d: edit_config(d, quantization_config={"bits": 4}), r"config\.json: quantization_config is"),
    ("no-config", lambda d: (d / "config.json").unlink(), r"config\.json: no such file"),
    ("config-text", lambda d: (d / "config.json").write_text("{"), r"config\.json: not readable as JSON"),
]


@pytest.mark.parametrize("load_way", ["direct", "staged"])
@pytest.mark.parametrize(("spoil", "message"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_a_bad_checkpoint_is_refused(
    tmp_path: Path, references: dict[str, Reference], spoil: Callable[[Path], Any], message: str, load_way: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(references["llama"].folder, folder)
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        LLM(folder, load=load_way)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda d, shards: shards[1].unlink(), r"model-00002-of-.*\.safetensors: no such file; the checkpoint is incomplete"),
    (lambda d, shards: shards[1].write_bytes(shards[0].read_bytes()), r"model-00002-of-.*\.safetensors: holds model\..* index places in"),
    (lambda d, shards: edit_tensors(shards[1], lambda t: t.pop(next(iter(t)))), r"model-00002-of-.*\.safetensors: tensor .* is missing"),
    (lambda d, shards: (d / "model.safetensors.index.json").write_text("{}"), r"index\.json: no readable weight_map"),
    (lambda d, shards: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "is no file of the folder"),
    (lambda d, shards: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'), "is no file of the folder"),
    (lambda d, shards: (d / "model.safetensors.index.json").write_text("[" * 99999), r"index\.json: no readable weight_map"),
])
def test_bad_shards(tmp_path: Path, spoil: Callable[[Path, list[Path]], Any], message: str) -> None:
    make_checkpoint(tmp_path, "qwen3", shard="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    spoil(tmp_path, shards)
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(references["llama"].folder, folder)
    whole = read_header(folder / WEIGHTS)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])
    monkeypatch.setattr("engine.loader.load.read_headers", lambda _: whole)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ended at byte .*, before tensor model\..* does"):
        LLM(folder)


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_rows_and_dtypes_are_exact(tmp_path: Path, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loader.direct.WINDOW", 64)
    random, sizes = np.random.default_rng(0), {"b": 5, "a": 9, "c": 1}
    tensors = {name: random.standard_normal((rows, 7)).astype("float32") for name, rows in sizes.items()}
    save_file(tensors, tmp_path / WEIGHTS)
    merged = Parameter("m", (15, 7), (("a", 9), ("c", 1), ("b", 5)))
    found = load(tmp_path, [merged], lambda _: False, dtype, way)["m"]
    assert torch.equal(found, torch.from_numpy(np.concatenate([tensors[name] for name in "acb"])).to(dtype))


MEASURE = """
import sys, pathlib, torch
from engine.models.build import MODELS, build_model
from engine.models.config import read_config
def status(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name + ":"))) * 1024
folder, way = pathlib.Path(sys.argv[1]), sys.argv[2]
torch.ones(64, 64) @ torch.ones(64, 64)
config = read_config(folder)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = build_model(folder, config, torch.float32, 64, way)
weights = sum(weight.nbytes for weight in model.weights.values())
print((status("VmHWM") - before) / weights, (status("VmRSS") - before) / weights)
"""


def test_direct_holds_one_copy_and_staged_two(tmp_path: Path) -> None:
    """Peak and remaining resident memory over the weights' bytes, in a process of its own (VmHWM is reset after the imports)."""
    make_checkpoint(tmp_path, "llama", hidden_size=512, intermediate_size=1536, vocab_size=16384, num_hidden_layers=8)
    peak, left = {}, {}
    for way in ("direct", "staged"):
        done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), way], check=True, capture_output=True, text=True)
        peak[way], left[way] = map(float, done.stdout.split())
    assert 0.95 < peak["direct"] < 1.1
    assert 1.9 < peak["staged"] < 2.15
    assert left["direct"] < 1.1 and left["staged"] < 1.1
