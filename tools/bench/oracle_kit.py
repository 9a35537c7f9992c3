"""Pack the pinned CUDA vLLM into one archive small enough to carry to a machine with no network, and unpack it there.

    python -m tools.bench.oracle_kit build FOLDER       # FOLDER/kit.tar.xz and FOLDER/kit.json
    parity oracle install vllm-cuda --kit FOLDER        # where the kit was carried to

The packages come from the package index by name and version (legs/oracles/vllm-cuda.pins).  A kit is not vLLM as published: kit.json lists
what it leaves out, and why one Hopper card serving a dense or hybrid model in bf16 never loads it.  Evidence made with a kit says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.oracle_install import KIT_ARCHIVE, KIT_IDENTITY
from legs.protocol import sha256, to_json
from tools.bench.checkpoint import file_sha256

PINS = Path("legs/oracles/vllm-cuda.pins")
PYTHON = "3.12"
GLIBC_MINORS = (5, 17, 24, 26, 27, 28, 31, 34, 35)
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS), "manylinux2014_x86_64", "manylinux1_x86_64")
"""Wheel tags that an x86-64 image with glibc 2.35 or later can load; pip matches each exactly."""

ARCHITECTURE = 90
"""Compute capability of Hopper, as fat binaries number it (9.0)."""

FAT_MAGIC = 0xBA55ED50
"""First word of a CUDA fat binary, as `nvcc` embeds it in an ELF file's .nv_fatbin section."""
FAT_HEADER = struct.Struct("<IHHQ")
"""magic, version, bytes of this header, bytes of all entries that follow."""
ENTRY_HEADER = struct.Struct("<HHIQIIHHI")
"""kind (1 PTX, 2 machine code), -, bytes of this header, bytes of the payload, bytes compressed, -, minor, major, architecture."""
MACHINE_CODE = 2


class Omission(NamedTuple):
    """What a kit lacks of the published packages, and why serving never misses it."""

    pattern: str
    why: str


OMISSIONS = (
    Omission("vllm/vllm_flash_attn/_vllm_fa2_C*", "FlashAttention 2: vLLM takes FlashAttention 3 on compute capability 9.0"),
    Omission("vllm/vllm-rs", "the Rust HTTP front end: the driver calls the engine class"),
    Omission("vllm/third_party/deep_gemm", "DeepGEMM: FP8 matrix products only"),
    Omission("vllm/third_party/fmha_sm100", "attention for compute capability 10.0"),
    Omission("vllm/_flashmla*", "FlashMLA: multi-head latent attention only"),
    Omission("vllm/_qutlass*", "QuTLASS: 4-bit weights only"),
    Omission("pycountry/locales", "translated country names"),
    Omission("xgrammar/lib/*.a", "static libraries for linking against"),
    Omission("mistral_common/data/tekken*", "a tokenizer of other models"),
)
PRUNED = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
PRUNED_WHY = f"PTX, and machine code for architectures other than {ARCHITECTURE}: zeroed in place, so the files load as before"
STRIPPED = "xgrammar/*.so"
NOT_PACKED = Omission("flashinfer-python", "not packed: vLLM then samples with its own kernels (VLLM_USE_FLASHINFER_SAMPLER=0) and needs "
                                           "gdn_prefill_backend=triton for a hybrid model")


class KitError(RuntimeError):
    """A kit that cannot be made or is not what it should be; the message names the file and what to do."""


def read_pins(path: Path) -> list[str]:
    """The `name==version` lines of a pins file, comments and blank lines dropped."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise KitError(f"{path}: {error.strerror}; run from the repository's root or name the file with --pins") from error
    pins = [line for line in lines if line]
    if loose := [pin for pin in pins if len(pin.split("==")) != 2 or not all(pin.split("=="))]:
        raise KitError(f"{path}: {loose[0]!r} is not of the form name==version; only exact versions make a kit")
    if not pins:
        raise KitError(f"{path}: names no package")
    return pins


def prune_device_code(data: bytearray, architecture: int) -> tuple[int, int]:
    """Zero, in place, every fat binary payload in `data` that is not machine code for `architecture`.

    Returns (payloads kept, payloads zeroed).  Raises :class:`KitError` on an entry that does not lie within its fat binary.
    """
    kept = zeroed = 0
    magic = struct.pack("<I", FAT_MAGIC)
    at = data.find(magic)
    while 0 <= at <= len(data) - FAT_HEADER.size:
        _, version, header, size = FAT_HEADER.unpack_from(data, at)
        end = at + header + size
        if version != 1 or header != FAT_HEADER.size or end > len(data):
            at = data.find(magic, at + 4)  # the word by chance, in code or data
            continue
        entry = at + header
        while entry < end:
            kind, _, head, length, *_, found = ENTRY_HEADER.unpack_from(data, entry)
            payload, following = entry + head, entry + head + length
            if head < ENTRY_HEADER.size or following > end:
                raise KitError(f"fat binary entry at byte {entry}: header {head}, payload {length} leave its fat binary; unknown layout")
            if (kind, found) == (MACHINE_CODE, architecture):
                kept += 1
            else:
                data[payload:following] = bytes(length)
                zeroed += 1
            entry = following
        at = data.find(magic, end)
    return kept, zeroed


def install(site: Path, pins: Sequence[str]) -> None:
    """Have pip put the pinned wheels for the target machine into `site`, whatever interpreter runs here."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--only-binary=:all:",
               "--implementation", "cp", "--python-version", PYTHON, "--target", str(site)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    if subprocess.run([*command, *pins], check=False).returncode:
        raise KitError("pip could not install the pins; see its message above")


def reduce(site: Path) -> list[dict[str, object]]:
    """Apply OMISSIONS and PRUNED to `site`; returns what was left out, with reasons.  Raises :class:`KitError` where nothing matched."""
    left_out: list[dict[str, object]] = []
    for pattern, why in OMISSIONS:
        found = sorted(site.glob(pattern))
        if not found:
            raise KitError(f"{pattern}: nothing of that name in the packages; the list of omissions is for another release")
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        left_out.append({"what": pattern, "why": why})
    for name in PRUNED:
        data = bytearray((site / name).read_bytes())
        kept, zeroed = prune_device_code(data, ARCHITECTURE)
        if not kept:
            raise KitError(f"{name}: no machine code for architecture {ARCHITECTURE} found in it")
        (site / name).write_bytes(data)
        left_out.append({"what": name, "why": PRUNED_WHY, "payloads_kept": kept, "payloads_zeroed": zeroed})
    subprocess.run(["strip", "--strip-debug", *map(str, site.glob(STRIPPED))], check=True)
    left_out.append({"what": STRIPPED, "why": "debugging symbols"})
    left_out.append({"what": NOT_PACKED.pattern, "why": NOT_PACKED.why})
    return left_out


def pack(site: Path, archive: Path) -> None:
    """Write `site` as a tar.xz archive; equal content gives an equal listing (names sorted, no owner, no time)."""
    subprocess.run(
        ["tar", "--create", "--xz", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--file", str(archive),
         "--directory", str(site), "."],
        check=True, env={**os.environ, "XZ_OPT": "-T0 -7"},
    )


def build(folder: Path, pins_file: Path) -> None:
    """Make `folder`/kit.tar.xz and kit.json; refuses to replace a kit."""
    if (folder / KIT_ARCHIVE).exists():
        raise KitError(f"{folder / KIT_ARCHIVE}: exists already; remove it or name another folder")
    pins = read_pins(pins_file)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        install(site, pins)
        left_out = reduce(site)
        packed = Path(scratch) / KIT_ARCHIVE
        pack(site, packed)
        shutil.move(packed, folder / KIT_ARCHIVE)
    size = (folder / KIT_ARCHIVE).stat().st_size
    identity = {
        "pins": pins, "pins_sha256": sha256(pins_file.read_bytes()), "python": PYTHON, "architecture": ARCHITECTURE, "left_out": left_out,
        "archive": KIT_ARCHIVE, "bytes": size, "sha256": file_sha256(folder / KIT_ARCHIVE),
    }
    (folder / KIT_IDENTITY).write_bytes(to_json(identity))
    print(f"{folder / KIT_ARCHIVE}: {size / 2**20:.1f} MiB, {len(left_out)} things left out, listed in {KIT_IDENTITY}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, or 1 with a message."""
    parser = argparse.ArgumentParser(prog="oracle_kit", description="Pack the pinned CUDA vLLM for a machine without a package index.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="make FOLDER/kit.tar.xz and FOLDER/kit.json")
    making.add_argument("folder", type=Path, metavar="FOLDER")
    making.add_argument("--pins", type=Path, default=PINS, help="file of name==version lines (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        build(chosen.folder, chosen.pins)
    except (KitError, OSError, subprocess.CalledProcessError) as error:
        print(f"oracle_kit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
