"""Uploads: a pinned buffer that is refilled too early shows the new bytes on the device; the ring's buffers never do."""

from __future__ import annotations

import torch

from engine.kernels.transfer import PinnedRing

BUSY = 200_000_000
"""Cycles that hold the stream up, about a tenth of a second: the host is done long before."""


def target() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")


def test_a_shared_pinned_buffer_is_a_race_and_a_pageable_one_is_none() -> None:
    for pinned, arrives in ((True, 2), (False, 1)):
        source, there = torch.ones(1 << 20, dtype=torch.uint8, pin_memory=pinned), target()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        there.copy_(source, non_blocking=True)
        source.fill_(2)
        torch.cuda.synchronize()
        assert there.unique().tolist() == [arrives]


def test_the_ring_waits_before_it_lends_a_buffer_again() -> None:
    for depth in (1, 2):
        ring, there = PinnedRing(depth, 1 << 20), [target() for _ in range(5)]
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        for number, one in enumerate(there):
            with ring.lend(1 << 20) as held:
                held.fill_(number + 1)
                one.copy_(held, non_blocking=True)
        torch.cuda.synchronize()
        assert [one.unique().tolist() for one in there] == [[1], [2], [3], [4], [5]]


def test_a_ring_deeper_than_what_is_in_flight_does_not_wait() -> None:
    ring, there = PinnedRing(3, 64), target()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    for _ in range(3):
        with ring.lend(64) as held:
            there[:64].copy_(held, non_blocking=True)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_a_larger_loan_grows_the_buffer() -> None:
    ring, there = PinnedRing(2, 16), target()
    for number in range(1, 5):
        with ring.lend(1000 * number) as held:
            assert held.numel() == 1000 * number and held.is_pinned()
            held.fill_(number)
            there[: held.numel()].copy_(held, non_blocking=True)
    torch.cuda.synchronize()
    assert there[:4000].unique().tolist() == [4]
