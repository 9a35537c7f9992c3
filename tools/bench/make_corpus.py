"""Make the frozen prompts of a series: legs/corpora/NAME.json.gz, in the format of legs.protocol.Corpus.

    python -m tools.bench.make_corpus [NAME ...]

The files are kept in the repository and named by their hash in the series' specs; this program is how they came to be.
"""

from __future__ import annotations

import platform
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from legs.protocol import ProtocolError, corpus_bytes, parse_corpus, sha256, write_atomic
from tools.bench.checkpoint import MODELS
from tools.bench.make_smollm2 import NAME as SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
SEED = 20260726
PROMPT_IDS = 128
SOURCE_PROMPTS, SOURCE_PROMPT_IDS = 128, 131_784
"""The workload that the Qwen series repeat: 128 prompts of 1029 or 1030 ids."""


def smollm2_windows(vocabulary: Path) -> Iterator[tuple[int, ...]]:
    """Windows of 128 ids of real text, each begun at a paragraph, in a fixed order."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vocabulary))
    for _, text in sorted(topics.items()):
        paragraphs = text.split("\n\n")[1:]
        start = 0
        while start < len(paragraphs):
            ids: list[int] = []
            while start < len(paragraphs) and len(ids) < PROMPT_IDS:
                ids += tokenizer.encode(paragraphs[start].strip() + "\n\n", add_special_tokens=False).ids
                start += 1
            if len(ids) >= PROMPT_IDS:
                yield tuple(ids[:PROMPT_IDS])


def smollm2(name: str, prompts: int, warmup: int) -> dict[str, Any]:
    """`prompts` + `warmup` windows drawn from Python's own documentation."""
    vocabulary = ROOT / MODELS / SMOLLM2 / "tokenizer.json"
    if not vocabulary.exists():
        raise ProtocolError(f"{vocabulary.relative_to(ROOT)}: not there; run python -m tools.bench.make_smollm2 first")
    windows = {window[:16]: window for window in smollm2_windows(vocabulary)}
    chosen = random.Random(SEED).sample(list(windows.values()), prompts + warmup)
    source = (f"Reference topics of Python {platform.python_version()} (module pydoc_data.topics, PSF license), windows of {PROMPT_IDS} "
              f"ids from paragraph starts by the tokenizer of {SMOLLM2}, seed {SEED}")
    return {"name": name, "source": source, "vocab_size": 49_152, "prompts": chosen[:prompts], "warmup": chosen[prompts:]}


def uniform(name: str, vocab_size: int, first_special: int) -> dict[str, Any]:
    """704 prompts of random ids and 32 warm-up prompts of 256; no id at or above `first_special` is drawn.

    The first 128 have 131,784 ids; their lengths, in their order, come again and again.
    """
    shorter, longer = divmod(SOURCE_PROMPT_IDS, SOURCE_PROMPTS)
    lengths = [shorter + (index < longer) for index in range(SOURCE_PROMPTS)]
    random.Random(SEED).shuffle(lengths)
    kinds = {"prompts": (lengths * 6)[:704], "warmup": [256] * 32}
    return {
        "name": name, "source": f"ids drawn uniformly from 0..{first_special - 1}", "vocab_size": vocab_size,
        **{kind: {"seed": f"{name} {kind} {SEED}", "below": first_special, "lengths": sizes} for kind, sizes in kinds.items()},
    }


CORPORA: dict[str, Callable[[str], dict[str, Any]]] = {
    "smollm2-quick": lambda name: smollm2(name, 16, 4),
    "smollm2": lambda name: smollm2(name, 64, 16),
    "qwen3-4b": lambda name: uniform(name, 151_936, 151_643),
    "qwen3.5-4b": lambda name: uniform(name, 248_320, 248_000),
}
"""Qwen3's special ids begin at 151,643; Qwen3.5's lie above 248,000."""


def make(name: str, folder: Path) -> str:
    """Write corpus `name` into `folder` unless the same bytes are there; return its SHA-256.  Raises :class:`ProtocolError` otherwise."""
    corpus = CORPORA[name](name)
    data = corpus_bytes(corpus)
    parse_corpus(name, data)
    path = folder / f"{name}.json.gz"
    if not path.exists():
        write_atomic(path, data)
    elif path.read_bytes() != data:
        raise ProtocolError(f"{path.name}: sha256 {sha256(path.read_bytes())} is there, {sha256(data)} would be made ({corpus['source']}); "
                            "a frozen corpus is not replaced: move it away if a new one is meant")
    return sha256(data)


def main(names: list[str]) -> int:
    try:
        for name in names or list(CORPORA):
            if name not in CORPORA:
                raise ProtocolError(f"no corpus {name!r}; there are {', '.join(CORPORA)}")
            print(f"{name} {make(name, ROOT / 'legs' / 'corpora')}", flush=True)
    except ProtocolError as error:
        print(error, file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
