"""The compiled host kernels against the PyTorch references: native, and as compiled for CPUs with less."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.api import LLM, SamplingParams
from engine.kernels import activation, attention, dispatch, linear, norm, place
from engine.kernels.cpu import binding, build
from engine.score import TokenScores
from tests.engine.checkpoints import ARCHITECTURES, make_checkpoint, prompt
from tests.engine.conftest import Reference
from tests.engine.serving import check_parity, relative_l2

NARROWER = {"avx512": "skylake-avx512", "avx2": "haswell"}
Patch = pytest.MonkeyPatch


def compiled_for(target: str, cache: Path) -> ctypes.CDLL:
    flags = [flag if flag != "-march=native" else f"-march={target}" for flag in build.FLAGS]
    compiler, runtime = shutil.which("g++"), build.openmp_runtime()
    assert compiler and runtime
    return build.load(build.build(compiler, flags, runtime, cache))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    native = build.library()
    if native is None:
        pytest.skip("no compiler or no x86-64 here: plain PyTorch serves")
    cache, flags = tmp_path_factory.mktemp("kernels"), torch.backends.cpu.get_cpu_capability()
    usable = {name: target for name, target in NARROWER.items() if name == "avx2" or flags.startswith("AVX512")}
    return {"native": native, **{name: compiled_for(target, cache) for name, target in usable.items()}}


@pytest.fixture(params=["native", *NARROWER])
def form(request: pytest.FixtureRequest, forms: dict[str, ctypes.CDLL], monkeypatch: Patch) -> Iterator[str]:
    if request.param not in forms:
        pytest.skip(f"this CPU lacks {request.param}")
    monkeypatch.setattr(binding, "library", lambda: forms[request.param])
    yield request.param


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def planes(weight: torch.Tensor, count: int) -> torch.Tensor:
    """The weight cut to what `count` bfloat16 numbers hold; 3 hold all of it."""
    kept = torch.zeros_like(weight)
    for _ in range(count):
        kept += (weight - kept).bfloat16().float()
    return kept


def test_the_narrower_forms_say_so(forms: dict[str, ctypes.CDLL]) -> None:
    assert {name: forms[name].instructions().decode() for name in forms if name != "native"} == {
        name: name for name in forms if name != "native"}


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 100, 200])
@pytest.mark.parametrize(("outputs", "width"), [(24, 40), (50, 33), (97, 576), (3, 1000)])
def test_linear_is_as_exact_as_float32(form: str, rows: int, outputs: int, width: int) -> None:
    """Whatever the row counts, and however many bits the weights have; inputs of very different size."""
    x = random(rows, width) * torch.logspace(-3, 3, width)
    for count in (1, 2, 3):
        weight = planes(random(outputs, width, seed=1), count)
        exact = x.double() @ weight.double().t()
        found = binding.linear(x, weight)
        assert relative_l2(found, exact) < 1e-6
        assert (found - exact).abs().max() < 1e-6 * (x.double().abs() @ weight.double().abs().t()).max()


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 130])
@pytest.mark.parametrize(("inner", "width"), [(24, 40), (50, 33), (96, 64)])
def test_gated_product(form: str, rows: int, inner: int, width: int) -> None:
    x, weight, down = random(rows, width), random(2 * inner, width, seed=1), torch.eye(inner)
    exact = activation.swiglu_reference(x.double(), weight.double(), down.double())
    found = binding.gate_up(x, weight)
    assert relative_l2(found, exact) < 1e-6 and (found - exact).abs().max() < 1e-6 * exact.abs().max()


def test_gates_that_are_very_large(form: str) -> None:
    """exp neither overflows nor leaves silu's limits: x for large x, 0 for small ones."""
    gate = torch.tensor([-1e4, -100.0, -88.5, -20.0, 0.0, 20.0, 88.5, 100.0, 1e4]).unsqueeze(1)
    found = binding.gate_up(torch.ones(2, 1), torch.cat((gate, torch.ones(9, 1))))
    torch.testing.assert_close(found[1], torch.nn.functional.silu(gate[:, 0]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("width", [40, 576, 33])
def test_norms(form: str, rows: int, width: int) -> None:
    x, residual, weight = random(rows, width), random(rows, width, seed=1), random(width)
    torch.testing.assert_close(binding.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5))
    for found, expected in zip(
            binding.add_rms_norm(x, residual, weight, 1e-5), norm.add_rms_norm_reference(x, residual, weight, 1e-5), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (9, 3, 64), (2, 1, 24)])
def test_placing(form: str, with_norms: bool, heads: int, kv_heads: int, dim: int) -> None:
    qkv, angles = random(11, heads + 2 * kv_heads, dim), random(11, dim // 2)
    norms = (random(dim, seed=1), random(dim, seed=2)) if with_norms else None
    rows = torch.tensor([5, 6, 7, 30, 2, 17, 18, 19, 20, 21, 9])
    mine, theirs = (torch.zeros(8, 4, 2 * kv_heads, dim) for _ in range(2))
    changed = qkv.clone()
    place.place_reference(changed, heads, norms, 1e-5, angles.cos(), angles.sin(), theirs, rows)
    binding.place(qkv, heads, norms, 1e-5, angles.cos(), angles.sin(), mine, rows)
    torch.testing.assert_close(qkv, changed)
    torch.testing.assert_close(mine, theirs)
    assert int((mine.flatten(2).abs().sum(-1) > 0).sum()) == len(rows)


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (9, 3, 64), (5, 1, 32), (2, 2, 128), (14, 2, 256)])
def test_attention(form: str, block_size: int, heads: int, kv_heads: int, dim: int) -> None:
    """A chunk of 20 of 53 tokens and decodes of 1 and 40, in one call, over scattered blocks; queries are a part of wider rows."""
    blocks = -(-53 // block_size)
    cache = random(1 + 3 * blocks, block_size, 2 * kv_heads, dim)
    tables = torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(0)).view(3, blocks) + 1
    query = random(22, heads + 2 * kv_heads, dim, seed=1)[:, :heads]
    slots, positions = torch.tensor([2, 0, *[1] * 20]), torch.tensor([39, 0, *range(33, 53)])
    assert binding.serves_heads(query, cache)
    found = binding.attention(query, cache, tables, slots, positions, dim**-0.5)
    mask = attention.length_mask(positions[:2] + 1, blocks * block_size, torch.float32)
    expected = torch.cat((
        attention.attention_decode_reference(query[:2], cache, tables[slots[:2]], mask, dim**-0.5),
        attention.attention_prefill_reference(query[2:], cache, tables[1], 53, dim**-0.5)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_attention_to_one_far_larger_score(form: str) -> None:
    cache = torch.zeros(2, 64, 2, 16)
    cache[1, 40, 0], cache[1, :, 1] = 1e4, random(64, 16)
    out = binding.attention(torch.full((1, 1, 16), 10.0), cache, torch.tensor([[1]]), torch.tensor([0]), torch.tensor([63]), 0.25)
    torch.testing.assert_close(out[0, 0], cache[1, 40, 1])


@pytest.mark.parametrize("rows", [16, 200])
def test_a_row_does_not_depend_on_the_others_or_on_the_threads(form: str, rows: int) -> None:
    x, weight = random(rows, 576), random(96, 576, seed=1)
    whole = binding.linear(x, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(binding.linear(x, weight), whole)
    finally:
        torch.set_num_threads(1)
    fewer = rows - 9
    assert torch.equal(binding.linear(x[9:].contiguous(), weight), whole[9:]) and fewer > 0
    assert torch.equal(binding.gate_up(x[9:].contiguous(), weight), binding.gate_up(x, weight)[9:])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_layers_in_one_call_are_the_layers_one_by_one(form: str, kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """To the bit, for more tokens than pass through a layer together, for few, and over chunks."""
    make_checkpoint(tmp_path, kind, max_position_embeddings=1500)
    prompts = [prompt(length, seed=length) for length in (1200, 70, 5)]

    def serve() -> tuple[list[list[int]], list[TokenScores]]:
        llm = LLM(tmp_path, max_num_batched_tokens=1300, max_num_seqs=3, max_model_len=1400)
        made = [one.token_ids for one in llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))]
        return made, llm.score([(prompt, ids) for prompt, ids in zip(prompts, made, strict=True)], top=3)

    at_once = serve()
    asked = []
    monkeypatch.setattr(dispatch, "serves_layers", lambda layers, x: asked.append(x.shape[0]))
    assert serve() == at_once
    assert max(asked) == 1275


def test_the_engine_is_right_in_every_form(form: str, reference: Reference) -> None:
    llm = LLM(reference.folder, max_num_batched_tokens=150, max_num_seqs=5)
    assert form == "native" or llm.resolved["linear_backend"] == llm.resolved["attention_backend"] == form
    check_parity(llm, reference)


def test_without_a_library_pytorch_serves(monkeypatch: Patch, reference: Reference) -> None:
    monkeypatch.setattr(binding, "library", lambda: None)
    llm = LLM(reference.folder, max_num_batched_tokens=40)
    assert llm.resolved["linear_backend"] == llm.resolved["attention_backend"] == "torch-cpu"
    check_parity(llm, reference)


def test_there_is_no_library_without_a_compiler(monkeypatch: Patch, tmp_path: Path) -> None:
    make = build.library.__wrapped__
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert make() is None
    failing = tmp_path / "g++"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(failing))
    assert make() is None
    assert not list(tmp_path.rglob("*.so"))


def test_it_is_compiled_once_and_anew_for_other_sources(monkeypatch: Patch, tmp_path: Path) -> None:
    compiler, runtime = shutil.which("g++"), build.openmp_runtime()
    if compiler is None or runtime is None:
        pytest.skip("no compiler here: plain PyTorch serves")
    changed, cache = tmp_path / "sources", tmp_path / "cache"
    shutil.copytree(build.FOLDER, changed)
    monkeypatch.setattr(build, "FOLDER", changed)
    monkeypatch.setattr(build, "SOURCES", ("rows.cpp",))
    first = build.build(compiler, build.FLAGS, runtime, cache)
    stamp = first.stat().st_mtime_ns
    assert build.build(compiler, build.FLAGS, runtime, cache) == first and first.stat().st_mtime_ns == stamp
    assert [path.name for path in cache.iterdir()] == [first.name]
    for name in ("vector.h", "rows.cpp"):
        with (changed / name).open("a") as source:
            source.write("// changed\n")
        assert build.build(compiler, build.FLAGS, runtime, cache) != first
    assert len(list(cache.iterdir())) == 3


def test_other_dtypes_are_pytorch_s() -> None:
    x, weight = random(16, 40).bfloat16(), random(24, 40).bfloat16()
    assert not binding.serves(x, weight) and not binding.serves(random(40, 16).t(), random(24, 40))
    assert torch.equal(dispatch.linear(x, weight), linear.linear_cpu(x, weight))
    assert dispatch.backends("cpu", torch.bfloat16)["linear_backend"] == "torch-cpu"


@pytest.mark.parametrize(("names", "chosen"), [
    (("site/torch/lib/libgomp-1.so.1",), "site/torch/lib/libgomp-1.so.1"),
    (("site/scikit_learn.libs/libgomp-2.so.1", "site/torch/lib/libgomp-1.so.1"), "site/torch/lib/libgomp-1.so.1"),
    (("site/scikit_learn.libs/libgomp-2.so.1", "site/torch.libs/libgomp-1.so.1"), "site/torch.libs/libgomp-1.so.1"),
    (("/usr/lib/libgomp.so.1",), "/usr/lib/libgomp.so.1"),
    (("/usr/lib/libgomp.so.1", "site/scikit_learn.libs/libgomp-2.so.1"), None),
    (("site/torch/lib/libtorch_cpu.so",), None),
])
def test_the_openmp_runtime_is_pytorch_s_own_and_never_one_of_several(names: tuple[str, ...], chosen: str | None) -> None:
    found = build.choose_runtime({Path(name) for name in names}, Path("site/torch"))
    assert found == (None if chosen is None else Path(chosen))
