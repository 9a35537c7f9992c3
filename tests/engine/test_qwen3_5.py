"""Qwen3.5 against transformers: same greedy ids, same logits, however prompts are cut and slots change hands; and planted faults seen."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from engine.api import LLM, CheckpointError, SamplingParams
from engine.kernels import gated_attention, gdn, norm_centred
from engine.kernels.conv import conv_decode_reference
from engine.models import qwen3_5
from engine.models.config import ModelConfig, read_config
from engine.request import Request
from engine.scheduler import Row, Step
from tests.engine.checkpoints import VOCAB, prompt, reference_greedy
from tests.engine.conftest import Reference
from tests.engine.qwen3_5_checkpoint import make_qwen3_5, refer
from tests.engine.serving import check_parity, relative_l2, serve

LENGTHS = (1, 2, 5, 33, 70, 140)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=[False, True], ids=["text", "whole"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A checkpoint of either architecture with what transformers makes of it; the whole one has a vision tower."""
    return refer(tmp_path_factory.mktemp("qwen3_5"), LENGTHS, whole=request.param)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return refer(tmp_path_factory.mktemp("text"), (1, 5, 33, 70))


def test_the_checkpoint_is_sensitive(text: Reference) -> None:
    """Outputs are varied, and each of 16 prompt ids matters to the first eight ids at the latest."""
    ids = prompt(48, seed=1)
    output, _ = reference_greedy(text.model, ids, 32)
    assert len(set(output)) >= 16
    unchanged = []
    for position in range(0, 48, 3):
        changed = list(ids)
        changed[position] = 3 + (changed[position] + 101) % (VOCAB - 3)
        if reference_greedy(text.model, changed, 8)[0] == output[:8]:
            unchanged.append(position)
    assert not unchanged


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("seqs", "budget", "every"), [(8, 2048, 0), (1, 64, 0), (3, 33, 0), (8, 7, 3), (2, 1, 2)])
def test_ids_and_logits_equal_transformers(checkpoint: Reference, depth: int, seqs: int, budget: int, every: int) -> None:
    """Fewer slots than prompts: each slot's second request finds another's states in it, and one of a single token comes first and last."""
    order = (0, 3, 5, 1, 4, 2) if budget > 1 else (3, 0, 1)
    llm = LLM(checkpoint.folder, depth=depth, max_num_seqs=seqs, max_num_batched_tokens=budget, block_size=16)
    check_parity(llm, checkpoint, order, every)
    check_parity(llm, checkpoint, order[::-1], every)


@pytest.mark.parametrize("overrides", [
    {"tie_word_embeddings": False, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
    {"linear_num_key_heads": 1, "linear_key_head_dim": 24, "linear_value_head_dim": 8, "num_hidden_layers": 3,
     "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3, "head_dim": 32,
     "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}},
], ids=["untied", "uneven", "order"])
def test_other_shapes(tmp_path: Path, overrides: dict[str, Any]) -> None:
    reference = refer(tmp_path, (9, 90), **overrides)
    check_parity(LLM(tmp_path, max_num_batched_tokens=40), reference)


CALM = 0.1


@pytest.mark.parametrize("gain", [CALM, 1.0])
def test_bfloat16_logits_are_near_float32(tmp_path: Path, gain: float) -> None:
    """Teacher-forced.  What is bounded is rounding, which a sensitive checkpoint amplifies: 1e-2 on a calm one, and on both no more than
    transformers' own bfloat16 is off by."""
    model = make_qwen3_5(tmp_path, dtype=torch.bfloat16, gain=gain)
    rounded = copy.deepcopy(model).bfloat16()
    prompts = [prompt(length, length) for length in (7, 50)]
    llm = LLM(tmp_path, max_num_batched_tokens=32)
    assert llm.resolved["dtype"] == "bfloat16"
    served = serve(llm, prompts, (0, 1))
    for index, ids in enumerate(prompts):
        tokens = torch.tensor([ids + served.ids[index]])
        with torch.inference_mode():
            expected, theirs = (one(tokens).logits[0, len(ids) - 1 : -1].float() for one in (model, rounded))
        error = relative_l2(torch.stack(served.logits[index]), expected)
        assert (error <= 1e-2 or gain > CALM) and error <= 1.1 * relative_l2(theirs, expected)


TOKENS, CUTS, SLOTS = 1200, 50, 3


def cuts(generator: torch.Generator) -> list[int]:
    """Ends of the pieces of a prompt of TOKENS tokens: up to 8 cuts anywhere and one beside another, so a piece of one token is there."""
    count = int(torch.randint(1, 8, (1,), generator=generator))
    found = torch.randint(1, TOKENS - 1, (count,), generator=generator).tolist()
    return sorted({*found, found[0] + 1, TOKENS})


@dataclass
class Piece:
    """A prompt on its way through its slot: `ends` of its pieces, and the logits found at each."""

    request: Request
    ends: list[int]
    found: dict[int, torch.Tensor]

    def next_row(self) -> Row:
        start = self.request.computed
        end = next(end for end in self.ends if end > start)
        self.request.computed = end
        return Row(self.request, start, end - start, True, False)


def run_cut(llm: LLM, prompts: Sequence[list[int]], generator: torch.Generator) -> list[tuple[list[int], dict[int, torch.Tensor]]]:
    """CUTS prompts, three slots at a time, each cut at random; (prompt, logits at each cut's end) of each."""
    logits: list[torch.Tensor] = []
    sample = llm.runner.sample

    def keep(found: torch.Tensor, batch: Any) -> torch.Tensor:
        logits[:] = found.clone().unbind(0)
        return sample(found, batch)

    llm.runner.sample = keep  # type: ignore[method-assign]
    waiting, running, done = [prompts[i % len(prompts)] for i in range(CUTS)], {}, []
    blocks = llm.blocks.needed(TOKENS)
    while waiting or running:
        admitted = []
        for slot in range(SLOTS):
            if slot not in running and waiting:
                request = Request(str(len(waiting)), waiting.pop(), SamplingParams())
                request.slot, request.blocks = slot, [1 + slot * blocks + i for i in range(blocks)]
                running[slot] = Piece(request, cuts(generator), {})
                admitted.append(request)
        rows = [piece.next_row() for piece in running.values()]
        llm.runner.collect(llm.runner.launch(Step(tuple(rows), tuple(admitted))))
        for row, found in zip(rows, logits, strict=True):
            piece = running[row.request.slot]
            piece.found[row.start + row.length - 1] = found
            if row.start + row.length == TOKENS:
                done.append((list(row.request.prompt), piece.found))
                del running[row.request.slot]
    return done


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
def test_fifty_random_cuts_of_1200_tokens_in_reused_slots(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """Four layers; logits at the end of every piece against transformers' float32 over the whole prompt at once."""
    model = make_qwen3_5(tmp_path, dtype=dtype, gain=1.0 if dtype == torch.float32 else CALM)
    prompts = [prompt(TOKENS, seed) for seed in range(4)]
    with torch.inference_mode():
        expected = {tuple(ids): model(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts}
    llm = LLM(tmp_path, max_num_seqs=SLOTS, max_num_batched_tokens=4096)
    worst = 0.0
    for ids, found in run_cut(llm, prompts, torch.Generator().manual_seed(5)):
        assert len(found) > 1
        places = sorted(found)
        worst = max(worst, relative_l2(torch.stack([found[place] for place in places]), expected[tuple(ids)][places]))
    assert worst <= tolerance, f"relative L2 {worst:.2e}"


def random_rule(heads: int, dim: int, seed: int, similar: float = 0.0) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta of TOKENS tokens, two value heads a key head; `similar` is the part that all keys share."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(TOKENS, count, dim, generator=generator) for count in (heads, heads, 2 * heads))
    key = key + similar * torch.randn(1, heads, dim, generator=generator)
    g = -torch.rand(TOKENS, 2 * heads, generator=generator) ** 4
    return query, key, value, g, torch.rand(TOKENS, 2 * heads, generator=generator)


@pytest.mark.parametrize("similar", [0.0, 3.0])
def test_the_chunked_form_equals_the_recurrent_one(similar: float) -> None:
    """Over 1,200 tokens: outputs and final state, in one go and over 50 random cuts; keys that resemble each other are the hard case."""
    inputs = random_rule(1, 48, seed=7, similar=similar)
    state = torch.zeros(2, 48, 48)
    expected = gdn.recurrent_reference(*inputs, state)
    generator = torch.Generator().manual_seed(8)
    for ends in [[TOKENS], *(cuts(generator) for _ in range(CUTS))]:
        held, parts, start = torch.zeros(2, 48, 48), [], 0
        for end in ends:
            parts.append(gdn.chunked_reference(*(part[start:end] for part in inputs), held))
            start = end
        assert relative_l2(torch.cat(parts), expected) <= 1e-5
        assert relative_l2(held, state) <= 1e-5


def test_both_forms_equal_transformers() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    inputs = random_rule(2, 32, seed=9)
    batched = [part.unsqueeze(0) for part in inputs]
    chunk, last = theirs.torch_chunk_gated_delta_rule(*batched, output_final_state=True, use_qk_l2norm_in_kernel=True)
    token, _ = theirs.torch_recurrent_gated_delta_rule(*batched, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for form in (gdn.chunked_reference, gdn.recurrent_reference):
        state = torch.zeros(4, 32, 32)
        found = form(*inputs, state)
        assert relative_l2(found, chunk[0]) <= 1e-5 and relative_l2(found, token[0]) <= 1e-5
        assert relative_l2(state.transpose(1, 2), last[0]) <= 1e-5


def test_a_slot_that_holds_no_numbers_harms_no_new_request(text: Reference) -> None:
    """Every state is NaN before the first request: nothing of it is read, not even multiplied by zero."""
    llm = LLM(text.folder, max_num_batched_tokens=48)
    for state in llm.runner.caches.states:
        state.conv.fill_(float("nan"))
        state.recurrent.fill_(float("nan"))
    check_parity(llm, text)


def test_states_lie_in_float32_whatever_the_model_s_dtype(tmp_path: Path) -> None:
    make_qwen3_5(tmp_path, dtype=torch.bfloat16)
    llm = LLM(tmp_path, max_num_seqs=5)
    assert len(llm.runner.caches.states) == 3 and llm.runner.caches.keys_values.shape[0] == 1
    for state in llm.runner.caches.states:
        assert state.recurrent.dtype == torch.float32 and state.recurrent.shape == (5, 4, 16, 16)
        assert state.conv.dtype == torch.bfloat16 and state.conv.shape == (5, 3, 128)
    assert llm.runner.model.weights["0.a_log"].dtype == torch.float32


# What is in a checkpoint beside the text model, and what must not be


def with_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def test_vision_and_mtp_tensors_are_passed_over_and_unknown_ones_refused(tmp_path: Path) -> None:
    make_qwen3_5(tmp_path, whole=True)
    assert any(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    with_tensors(tmp_path, **{"mtp.layers.0.fc.weight": torch.zeros(2)})
    LLM(tmp_path)
    with_tensors(tmp_path, **{"model.language_model.layers.0.linear_attn.in_proj_qkv.bias": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"in_proj_qkv\.bias is unknown"):
        LLM(tmp_path)


def test_a_text_checkpoint_has_no_vision_tensors(tmp_path: Path) -> None:
    make_qwen3_5(tmp_path)
    with_tensors(tmp_path, **{"model.visual.patch_embed.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"model\.visual\.patch_embed\.weight is unknown"):
        LLM(tmp_path)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("layer_types", ["full_attention", "sliding_attention", "linear_attention", "linear_attention"], "layer_types"),
    ("layer_types", ["full_attention"], "layer_types"),
    ("layer_types", ["linear_attention"] * 4, "one full at least"),
    ("linear_num_value_heads", 5, "no multiple"),
    ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim is 1"),
    ("linear_key_head_dim", None, "linear_key_head_dim is None"),
    ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype is 'bfloat16'"),
    ("attention_bias", True, "attention_bias"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "rope_type is 'yarn'"),
])
def test_a_config_that_is_not_computed_exactly_is_refused(tmp_path: Path, field: str, value: Any, message: str) -> None:
    make_qwen3_5(tmp_path, whole=True)
    raw = json.loads((tmp_path / "config.json").read_bytes())
    raw["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


# Planted faults: with each, the parity check must fail


def state_not_reset(patch: Patch) -> None:
    """A request begins with what its slot's last owner left in the recurrent state."""
    zeroed, recurrent = gdn.gdn_prefill_reference, gdn.conv_chunk_reference

    def faulty(projected: torch.Tensor, weights: Any, state: Any, slot: int, first: bool) -> torch.Tensor:
        if not first:
            return zeroed(projected, weights, state, slot, first)
        patch.setattr(gdn, "conv_chunk_reference", lambda inputs, weight, held, _: recurrent(inputs, weight, held, True))
        out = zeroed(projected, weights, state, slot, False)
        patch.setattr(gdn, "conv_chunk_reference", recurrent)
        return out

    patch.setattr(gdn, "gdn_prefill_reference", faulty)


def conv_state_not_reset(patch: Patch) -> None:
    """A request's first tokens are convolved with the last ones of its slot's last owner."""
    conv = gdn.conv_chunk_reference
    patch.setattr(gdn, "conv_chunk_reference", lambda inputs, weight, state, first: conv(inputs, weight, state, False))


def decode_states_not_reset(patch: Patch) -> None:
    """The same for a prompt of one token, which goes the way of decodes."""
    decode = gdn.gdn_decode_reference
    patch.setattr(gdn, "gdn_decode_reference", lambda projected, weights, state, slots, first: decode(
        projected, weights, state, slots, torch.zeros_like(first)))


def conv_state_off_by_one(patch: Patch) -> None:
    """A chunk leaves the inputs one token too early for the next."""
    conv = gdn.conv_chunk_reference

    def faulty(inputs: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, first: bool) -> torch.Tensor:
        out = conv(inputs, weight, state, first)
        state.copy_(state.roll(1, 0))
        return out

    patch.setattr(gdn, "conv_chunk_reference", faulty)


def conv_reads_one_ahead(patch: Patch) -> None:
    """The convolution's taps in the wrong order."""
    patch.setattr(gdn, "conv_decode_reference", lambda inputs, weight, *rest: conv_decode_reference(inputs, weight.flip(1), *rest))


def beta_without_sigmoid(patch: Patch) -> None:
    gates = gdn.gates_reference
    patch.setattr(gdn, "gates_reference", lambda a, b, *rest: (gates(a, b, *rest)[0], b.float()))


def decay_without_softplus(patch: Patch) -> None:
    patch.setattr(gdn, "gates_reference", lambda a, b, a_log, dt_bias: (-a_log.exp() * F.relu(a + dt_bias), b.sigmoid()))


def output_gate_missing(patch: Patch) -> None:
    """The delta net's output without silu(z)."""
    norm = gdn.gated_norm_reference
    patch.setattr(gdn, "gated_norm_reference", lambda out, z, weight, eps: norm(out, torch.full_like(z, 1.27846), weight, eps))


def attention_gate_missing(patch: Patch) -> None:
    patch.setattr(gated_attention, "gate_reference", lambda out, projected, heads: out)


def gates_beside_the_wrong_heads(patch: Patch) -> None:
    """All query heads first, then all gates, instead of in pairs."""
    gate = gated_attention.gate_reference
    patch.setattr(gated_attention, "gate_reference", lambda out, projected, heads: gate(
        out, torch.stack((projected[:, :heads], projected[:, heads : 2 * heads]), 2).flatten(1, 2), heads))


def rotary_over_the_whole_head(patch: Patch) -> None:
    patch.setattr(ModelConfig, "rotary_dim", property(lambda config: config.head_dim))


def norms_not_centred(patch: Patch) -> None:
    norm = norm_centred.add_rms_norm_centred_reference
    patch.setattr(norm_centred, "add_rms_norm_centred_reference", lambda x, residual, weight, eps: norm(x, residual, weight - 1, eps))


def key_heads_interleaved(patch: Patch) -> None:
    """Value head h reads key head h mod Hk."""
    unit = gdn._unit
    patch.setattr(gdn, "_unit", lambda query, key, heads: tuple(
        part.unflatten(1, (-1, heads // key.shape[1])).transpose(1, 2).flatten(1, 2) for part in unit(query, key, heads)))


def states_of_another_layer(patch: Patch) -> None:
    """Two layers share a state."""
    init = qwen3_5.Qwen3_5.__init__

    def faulty(self: Any, *args: Any) -> None:
        init(self, *args)
        self.index[1] = 0

    patch.setattr(qwen3_5.Qwen3_5, "__init__", faulty)


FAULTS: list[Callable[[Patch], None]] = [
    state_not_reset, conv_state_not_reset, decode_states_not_reset, conv_state_off_by_one, conv_reads_one_ahead, beta_without_sigmoid,
    decay_without_softplus, output_gate_missing, attention_gate_missing, gates_beside_the_wrong_heads, rotary_over_the_whole_head,
    norms_not_centred, key_heads_interleaved, states_of_another_layer,
]


def serve_twice(reference: Reference) -> None:
    """Two slots, prompts cut at 24 tokens, everything twice: every slot is used again, by the prompt of one token too."""
    llm = LLM(reference.folder, max_num_batched_tokens=24, max_num_seqs=2)
    for _ in range(2):
        check_parity(llm, reference, (3, 0, 2, 1))


def test_without_a_fault_the_check_passes(text: Reference) -> None:
    serve_twice(text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_fails_the_check(monkeypatch: Patch, text: Reference, fault: Callable[[Patch], None]) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        serve_twice(text)
