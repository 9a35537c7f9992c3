"""Make the ids that a correct engine must give: legs/references/NAME.json.gz, greedy by transformers in float32, one prompt at a time.

    python -m tools.bench.make_reference [NAME ...]

Sampling as in the series: greedy, EOS ignored, and masked as long as min_tokens are not reached (here: always, min_tokens is max_tokens).
`margins` holds for each prompt the smallest distance, in logits, between the best and the second best id: where it is below the
arithmetic's own noise (about 1e-4 in float32) two right engines may differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legs.protocol import ProtocolError, read_corpus, sha256, to_gzip, to_json, write_atomic
from tools.bench.checkpoint import MODELS, recorded_sha256
from tools.bench.make_smollm2 import NAME as SMOLLM2

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Recipe:
    model: str
    prompts: int
    max_tokens: int


REFERENCES = {"smollm2-quick": Recipe(SMOLLM2, 16, 32), "smollm2": Recipe(SMOLLM2, 16, 64)}
"""Name of the reference, which is the corpus's too, to how it is made: the first `prompts` prompts, `max_tokens` ids each."""


def greedy(model: Any, prompt: Sequence[int], max_tokens: int, masked: Sequence[int]) -> tuple[list[int], float]:
    """`max_tokens` greedy ids after `prompt`, never one of `masked`, and the smallest margin of the best logit over the second."""
    import torch

    ids: list[int] = []
    margin = float("inf")
    inputs, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        for _ in range(max_tokens):
            out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = out.logits[0, -1].float(), out.past_key_values
            logits[list(masked)] = float("-inf")
            best = torch.topk(logits, 2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            ids.append(int(logits.argmax()))
            inputs = torch.tensor([[ids[-1]]])
    return ids, margin


def make(name: str) -> bytes:
    """The reference file's content for `name`, computed on this machine."""
    import torch
    import transformers

    recipe = REFERENCES[name]
    folder = ROOT / MODELS / recipe.model
    if (checkpoint := recorded_sha256(folder)) is None:
        raise ProtocolError(f"{folder.relative_to(ROOT)}: no complete checkpoint; run python -m tools.bench.make_smollm2 first")
    corpus_path = ROOT / "legs" / "corpora" / f"{name}.json.gz"
    corpus = read_corpus(corpus_path)
    eos = json.loads((folder / "generation_config.json").read_bytes())["eos_token_id"]
    masked = eos if isinstance(eos, list) else [eos]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids: dict[str, list[int]] = {}
    margins: dict[str, float] = {}
    for index in range(recipe.prompts):
        ids[str(index)], margins[str(index)] = greedy(model, corpus.prompts[index], recipe.max_tokens, masked)
        print(f"{name}: prompt {index + 1} of {recipe.prompts}, smallest margin {margins[str(index)]:.4g}", flush=True)
    return to_gzip(to_json({
        "schema": 1, "name": name, "model": recipe.model, "checkpoint_sha256": checkpoint, "corpus": name,
        "corpus_sha256": sha256(corpus_path.read_bytes()), "transformers": transformers.__version__, "torch": torch.__version__,
        "dtype": "float32", "max_tokens": recipe.max_tokens, "min_tokens": recipe.max_tokens, "ignore_eos": True, "masked": masked,
        "ids": ids, "margins": margins, "smallest_margin": min(margins.values()),
    }))


def main(names: list[str]) -> int:
    try:
        for name in names or list(REFERENCES):
            if name not in REFERENCES:
                raise ProtocolError(f"no reference {name!r}; there are {', '.join(REFERENCES)}")
            path = ROOT / "legs" / "references" / f"{name}.json.gz"
            if path.exists():
                print(f"{name} {sha256(path.read_bytes())}: there already; move it away to make it again", flush=True)
                continue
            data = make(name)
            write_atomic(path, data)
            print(f"{name} {sha256(data)}", flush=True)
    except ProtocolError as error:
        print(error, file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
