"""What malicious clients send, by hand, and who they are."""

from typing import get_args

import pytest
import torch

from pbfl_flwr import seeds
from pbfl_flwr.config import AttackSettings, Scalar, parse
from pbfl_flwr.config.keys import AttackKind
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.attacks import falsified, malicious

# Classes 0, 2 and 3 are held; class 3's row has the length 5.
HONEST = Prototypes(
    torch.tensor([[1.0, -2.0], [0, 0], [0, 4], [3, 4]]),
    torch.tensor([True, False, True, True]),
    torch.tensor([7, 0, 1, 3]),
    11,
)


def lie(kind: AttackKind, upload: Prototypes = HONEST, *seed: int, factor: float = 10.0) -> Prototypes:
    return falsified(upload, AttackSettings(kind=kind, factor=factor), seeds.generator(0, *seed))


@pytest.mark.parametrize(
    ("kind", "factor", "rows", "counts"),
    [
        ("sign-flip", 1, [[-1, 2], [0, 0], [0, -4], [-3, -4]], [7, 0, 1, 3]),
        ("scale", 10, [[10, -20], [0, 0], [0, 40], [30, 40]], [7, 0, 1, 3]),
        ("scale", -0.5, [[-0.5, 1], [0, 0], [0, -2], [-1.5, -2]], [7, 0, 1, 3]),
        # class 0 goes out as 2, 2 as 3, 3 as 0; 1 is not held
        ("permute", 1, [[3, 4], [0, 0], [1, -2], [0, 4]], [3, 0, 7, 1]),
    ],
)
def test_attacks_by_hand(kind: AttackKind, factor: float, rows: list[list[float]], counts: list[int]) -> None:
    before = HONEST.values.clone()
    sent = lie(kind, factor=factor)
    assert sent.values.tolist() == rows
    assert sent.counts is not None
    assert sent.counts.tolist() == counts
    assert torch.equal(sent.present, HONEST.present)
    assert sent.num_examples == 11
    assert torch.equal(HONEST.values, before), "the client's own rows stay"


def test_noise_has_the_length_of_the_row_and_no_direction_of_it() -> None:
    sent = lie("noise")
    torch.testing.assert_close(sent.values.norm(dim=1), torch.tensor([5**0.5, 0, 4, 5]))
    assert torch.equal(sent.values, lie("noise").values)
    assert not torch.equal(sent.values, lie("noise", HONEST, 1).values)
    many = Prototypes(torch.eye(200), torch.ones(200, dtype=torch.bool))
    cosines = lie("noise", many).values.diagonal()  # each with its own honest row
    assert cosines.abs().max() < 0.35  # of 200 with a deviation of 1/√200 = 0.07
    assert abs(float(cosines.mean())) < 0.02


@pytest.mark.parametrize("kind", get_args(AttackKind))
def test_absent_classes_of_a_dense_upload_stay_zero(kind: AttackKind) -> None:
    dense = Prototypes(HONEST.values, torch.ones(4, dtype=torch.bool))
    sent = lie(kind, dense)
    assert sent.values[1].tolist() == [0, 0]
    assert torch.isfinite(sent.values).all()
    assert torch.equal(sent.values, lie(kind).values)
    assert sent.counts is None


def test_one_class_has_nothing_to_swap_with() -> None:
    one = Prototypes(torch.tensor([[0.0, 0], [2, 1]]), torch.tensor([False, True]))
    assert torch.equal(lie("permute", one).values, one.values)
    nobody = Prototypes.empty(3, 2)
    assert torch.equal(lie("permute", nobody).values, nobody.values)


def drawn(share: float, clients: int = 20, seed: int = 0, kind: str = "sign-flip") -> tuple[int, ...]:
    return malicious(
        parse({"attack.kind": kind, "attack.share": share, "num-clients": clients, "seed": seed})
    )


def test_malicious_clients_depend_on_the_seed_and_the_number_of_clients_alone() -> None:
    assert drawn(0.2) == drawn(0.2, kind="permute")
    assert len(drawn(0.2)) == 4
    assert list(drawn(0.2)) == sorted(set(drawn(0.2)))
    assert set(drawn(0.2)) < set(drawn(0.5)) < set(range(20))
    assert len({drawn(0.2, seed=seed) for seed in range(10)}) > 5
    chosen = [client for seed in range(500) for client in drawn(0.2, seed=seed)]
    assert all(70 < chosen.count(client) < 130 for client in range(20))  # 100 ± 3.4 standard deviations


def test_shares_are_rounded() -> None:
    assert [len(drawn(share, 5)) for share in (0.11, 0.2, 0.29, 0.31, 0.89)] == [1, 1, 1, 2, 4]
    assert malicious(parse({})) == ()


def built(**keys: Scalar) -> object:
    return build_method(
        parse({"models": "cnn4", "num-clients": 10, "attack.kind": "noise", **keys}, SECTIONS)
    )


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_none_or_all_are_refused(share: float) -> None:
    with pytest.raises(PbflError, match="of 10 clients; must leave at least one malicious"):
        built(**{"attack.share": share})


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_send_no_class_rows_are_refused(method: str) -> None:
    if method in ("fedproto", "fedtgp", "tinyproto", "protonorm", "fedgh", "feddistill"):
        built(method=method)
        return
    with pytest.raises(PbflError, match=f"attack.kind = 'noise': method '{method}' sends .*; needs a method"):
        built(method=method)
