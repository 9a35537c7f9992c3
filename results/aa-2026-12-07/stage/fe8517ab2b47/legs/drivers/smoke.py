"""One tiny kernel of each extension that an arm's interpreter would use, run as `python -m legs.drivers.smoke engine|vllm DEVICE`.

A wrong toolkit, a driver that rejects a kernel or a library of another build shows here in seconds, not after a model has been loaded.
Prints a line of JSON for each kernel: {"kernel", "ok", "detail"}.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Callable

import torch

HOST = "cpu"


def matmul(device: str) -> str:
    """PyTorch's own library for matrix products."""
    x = torch.full((64, 64), 0.5, device=device)
    _expect(x @ x, torch.full((64, 64), 16.0))
    return f"torch {torch.__version__}"


def rms_norm(device: str) -> str:
    """The engine's own kernels: Triton's compiler on a card, the compiled extension on the host."""
    from engine.kernels import dispatch

    backend = dispatch.backends(device, torch.float32)["attention_backend"]
    if device == HOST and backend == "torch-cpu" and platform.machine() in ("x86_64", "AMD64") and shutil.which("g++"):
        raise RuntimeError("the compiled kernels could not be built or loaded: the engine would run on plain PyTorch")
    x = torch.arange(1, 129, dtype=torch.float32).reshape(2, 64)
    weight = torch.linspace(0.5, 2, 64)
    found = dispatch.rms_norm(x.to(device), weight.to(device), 1e-6)
    _expect(found, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight)
    return backend


def vllm_c(device: str) -> str:
    """vLLM's compiled extension, as its own platform loads it."""
    import vllm
    import vllm._custom_ops

    out = torch.empty((2, 64), device=device)
    x = torch.linspace(-2, 2, 256).reshape(2, 128)
    torch.ops._C.silu_and_mul(out, x.to(device))
    _expect(out, torch.nn.functional.silu(x[:, :64]) * x[:, 64:])
    return f"vllm {vllm.__version__}"


def kernels(driver: str, device: str) -> dict[str, Callable[[str], str]]:
    """What an arm of `driver` has on `device`, by the name that is shown."""
    shown: dict[str, Callable[[str], str]] = {"torch matmul": matmul}
    if device != HOST:
        shown["Triton rms_norm"] = rms_norm
    elif driver == "engine":
        shown["engine rms_norm"] = rms_norm
    if driver == "vllm":
        shown["vllm._C silu_and_mul"] = vllm_c
    return shown


def run(name: str, kernel: Callable[[str], str], device: str) -> dict[str, object]:
    """The kernel's line: whether it ran and was right, what it ran on, or the first line of its error."""
    try:
        return {"kernel": name, "ok": True, "detail": kernel(device)}
    except Exception as error:  # whatever an extension raises is the answer
        text = next(iter(str(error).strip().splitlines()), "no message")
        return {"kernel": name, "ok": False, "detail": f"{type(error).__name__}: {text[:200]}"}


def _expect(found: torch.Tensor, right: torch.Tensor) -> None:
    found = found.to(HOST)
    if not torch.allclose(found, right, rtol=1e-3, atol=1e-3):
        raise RuntimeError(f"a wrong result: off by {(found - right).abs().max().item():.3g} at most")


if __name__ == "__main__":
    for shown_name, function in kernels(sys.argv[1], sys.argv[2]).items():
        print(json.dumps(run(shown_name, function, sys.argv[2])), flush=True)
