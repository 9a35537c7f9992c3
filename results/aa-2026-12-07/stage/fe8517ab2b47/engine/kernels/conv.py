"""Causal depthwise convolution over the tokens of a request, with SiLU behind it (Mamba, Gu and Dao 2023; Qwen3.5's gated delta net).

The last `width - 1` inputs of each request stay in its slot: states [slots, width - 1, C], oldest first, in the model's dtype.  A
request's first token finds no inputs before it, whatever its slot held for another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def conv_chunk_reference(inputs: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, first: bool) -> torch.Tensor:
    """inputs [T, C], consecutive tokens of one request, weight [C, width], its slot's state [width - 1, C], changed in place -> [T, C].

    y_t = silu(sum over j of weight[:, j] x_{t - width + 1 + j}), summed in float32, rounded once.  `first`: no token precedes these.
    """
    window = torch.cat((torch.zeros_like(state) if first else state, inputs))
    state.copy_(window[inputs.shape[0] :])
    return _convolve([window[j : j + inputs.shape[0]] for j in range(weight.shape[1])], weight)


def conv_decode_reference(
    inputs: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """inputs [D, C], one token of each of `slots` [D] -> [D, C]; `first` [D] tells rows with no token before theirs."""
    held = states[slots].masked_fill_(first[:, None, None], 0)
    window = torch.cat((held, inputs.unsqueeze(1)), dim=1)
    states[slots] = window[:, 1:]
    return _convolve(window.unbind(1), weight)


def _convolve(window: list[torch.Tensor] | tuple[torch.Tensor, ...], weight: torch.Tensor) -> torch.Tensor:
    """silu of the sum of window[j] [T, C] times weight[:, j]."""
    taps = weight.float().t().contiguous()
    total = window[0].float() * taps[0]
    for part, tap in zip(window[1:], taps[1:], strict=True):
        total.addcmul_(part.float(), tap)
    return F.silu(total, inplace=True).to(window[0].dtype)
