"""Claims in an object store: of many at once, one is made."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from rekindle.format.claim import Claim, Starts
from rekindle.format.names import CLAIMS, claim_name
from rekindle.storage.claims import claim_root, hold_claim, newest_claim
from rekindle.storage.open import open_store, urls_below
from tests.objects.servers import Server

SIDES = 4


def test_of_the_sides_of_a_start_one_claims_it(s3: Server, bucket: str) -> None:
    root = f"s3://{bucket}/claims-{secrets.token_hex(4)}/run"
    store = open_store(root)
    own, _ = claim_root(store, Starts(Claim(f"{1:016x}", 1)))
    former = Starts(own)
    sides = [Starts(Claim(f"{number:016x}", 2), former.remembered) for number in range(2, 2 + SIDES)]
    with ThreadPoolExecutor(SIDES) as pool:
        found = list(pool.map(lambda side: claim_root(store, side), sides))
    (winner,) = [own for own, rival in found if rival is None]
    assert newest_claim(store) == winner and winner.number == 2
    assert all(rival in (None, winner) for _, rival in found)
    hold_claim(store, Starts(winner))
    with pytest.raises(FileExistsError, match="the job goes on elsewhere"):
        hold_claim(store, former)
    assert store.extras(CLAIMS) == [claim_name(1), claim_name(2)]
    store.clean_up()
    assert store.published() == [] and urls_below(root) == []
