"""What the ranks of `test_hang.py` do: importable by name in every process."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import Dataset

from torchcrew.data import DataLoader
from torchcrew.launcher.ledger import Call, Ledger, Phase


class Digits(Dataset[int]):
    """Its second item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(60)
        return index


def be(ledger: Ledger, rank: int, what: str, ready: Any) -> None:
    """Be a rank that does something for ever, or ends."""
    ledger.enter(rank, Phase.RUNNING)
    for number in range(1, 118):
        ledger.begin(rank, Call("all_reduce", sequence=number, site="train.py:40"))
        ledger.end(rank)
    ready.release()
    if what == "ends":
        return
    globals()[f"_{what}"](ledger, rank)


def _waits(ledger: Ledger, rank: int) -> None:
    ledger.begin(rank, Call("all_reduce", sequence=118, site="train.py:40"))
    time.sleep(60)


def _is_ahead(ledger: Ledger, rank: int) -> None:
    for number in (118, 119):
        ledger.begin(rank, Call("all_reduce", sequence=number, site="train.py:40"))
    time.sleep(60)


def _receives(ledger: Ledger, rank: int) -> None:
    ledger.begin(rank, Call("recv", detail="src=0", site="train.py:44"))
    time.sleep(60)


def _waits_in_a_group(ledger: Ledger, rank: int) -> None:
    ledger.begin(rank, Call("broadcast", group="tp", sequence=3, site="train.py:50"))
    time.sleep(60)


def _gets_an_item(ledger: Ledger, rank: int) -> None:
    Digits()[1]


def _loads(ledger: Ledger, rank: int) -> None:
    list(DataLoader(Digits(), num_workers=1, batch_size=1))


def _returns(ledger: Ledger, rank: int) -> None:
    ledger.enter(rank, Phase.RETURNED)
    time.sleep(60)


def _fails(ledger: Ledger, rank: int) -> None:
    ledger.enter(rank, Phase.FAILED)
    time.sleep(60)


def _idles(ledger: Ledger, rank: int) -> None:
    ledger.enter(rank, Phase.IDLE)
    time.sleep(60)
