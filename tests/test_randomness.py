from __future__ import annotations

import itertools

import torch

from pfedla.randomness import numpy_stream, seed_of, stream


def test_an_address_has_one_number() -> None:
    assert seed_of(7, "batches", 3, 12) == seed_of(7, "batches", 3, 12) == 1063323213188355117
    assert torch.equal(torch.rand(4, generator=stream(1, "a")), torch.rand(4, generator=stream(1, "a")))
    assert numpy_stream(1, "a").integers(10**9) == numpy_stream(1, "a").integers(10**9)


def test_addresses_do_not_collide() -> None:
    keys = [
        ("batches", 1, 12),
        ("batches", 11, 2),
        ("batches", 112),
        ("batches", "1", 12),
        ("model", 1, 12),
        ("a", "b"),
    ]
    seeds = [seed_of(seed, *key) for seed, key in itertools.product((0, 1, 12), keys)] + [seed_of(0, "ab"), seed_of(0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    torch.rand(3, generator=stream(0, "x"))
    assert torch.equal(torch.random.get_rng_state(), before)
