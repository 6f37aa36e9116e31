import pytest
import torch

from pbfl_flwr.method import Round
from pbfl_flwr.methods.fesem import Centres
from pbfl_flwr.payloads import RejectedPayload, Weights


def weights(value, n=1):
    return Weights({"body": torch.zeros(3), "head.weight": torch.tensor([float(value), 0.0])}, n)


START = Centres((weights(0),), torch.zeros(0, dtype=torch.int64))


def values(state):
    return [float(centre.tensors["head.weight"][0]) for centre in state.weights]


@pytest.mark.parametrize("distance", ["all", "head"])
def test_em_by_hand(make_method, task, distance):
    method = make_method("fesem", models="cnn4", own={"distance": distance})
    uploads = {0: weights(1), 1: weights(2, n=100), 3: weights(10), 4: weights(12)}
    first = method.aggregate(START, uploads, Round(1, task, 6))
    # two clusters of the first trained weights: {1, 2} and {10, 12}, plain means 1.5 and 11
    assert sorted(values(first)) == [1.5, 11.0]
    low = values(first).index(1.5)
    assert first.assigned.tolist() == [low, low, -1, 1 - low, 1 - low, -1]
    assert method.broadcast(first, 4) is first.weights[1 - low]
    # E-step: 7 is nearer to 11 than to 1.5, client 1 changes; M-step: centre of {7, 9} is 8, of {1} is 1
    second = method.aggregate(first, {0: weights(1), 1: weights(7), 3: weights(9)}, Round(2, task, 6))
    assert sorted(values(second)) == [1.0, 8.0]
    assert second.assigned.tolist() == [low, 1 - low, -1, 1 - low, 1 - low, -1]  # client 4 keeps its centre
    assert values(first) != values(second)  # the old state is as it was
    assert first.assigned.tolist()[1] == low


@pytest.mark.parametrize("most", [0, 1])
def test_a_client_that_never_answered_follows_the_most(make_method, most):
    """Be it one that has been known, or one that joined since."""
    state = Centres((weights(1), weights(2)), torch.tensor([most, most, 1 - most, -1]))
    for client in (3, 4):
        assert make_method("fesem", models="cnn4").broadcast(state, client) is state.weights[most]


def test_an_empty_centre_stays(make_method, task):
    method = make_method("fesem", models="cnn4")
    state = Centres((weights(0), weights(100)), torch.tensor([0, 1]))
    after = method.aggregate(state, {0: weights(2), 1: weights(4)}, Round(2, task, 2))
    assert values(after) == [3.0, 100.0]
    assert after.assigned.tolist() == [0, 0]
    assert method.aggregate(state, {}, Round(3, task, 2)) is state


def test_fewer_clients_than_centres(make_method, task):
    method = make_method("fesem", models="cnn4", own={"centres": 4})
    state = method.aggregate(START, {0: weights(1), 1: weights(5), 2: weights(5)}, Round(1, task, 3))
    assert sorted(values(state)) == [0.0, 0.0, 1.0, 5.0]  # two different clients; the rest stays w_0
    assert state.assigned[1] == state.assigned[2] != state.assigned[0]
    assert method.report(state) == {
        f"centre-{k}.clients": float(v) for k, v in enumerate(state.sizes().tolist())
    }


def test_a_client_may_have_a_number_beyond_how_many_there_are(make_method, task):
    method = make_method("fesem", models="cnn4")
    state = method.aggregate(START, {0: weights(1), 5: weights(9)}, Round(1, task, 2))
    assert [client for client, centre in enumerate(state.assigned.tolist()) if centre >= 0] == [0, 5]
    assert values(state)[state.assigned[5]] == 9.0


@pytest.mark.parametrize("size", [1e3, 1.0, 1e-8])
@pytest.mark.parametrize("seed", range(4))
def test_equal_updates_are_one_to_the_first_clusters(make_method, task, seed, size):
    """Whatever a machine's eigenvectors round to: k-means is not asked for more clusters than there are updates."""
    draw = torch.Generator().manual_seed(seed)
    one, two = (
        {"body": size * torch.randn(300, generator=draw), "head.weight": torch.zeros(2)} for _ in range(2)
    )
    start = Centres((Weights({name: torch.zeros_like(t) for name, t in one.items()}, 1),), START.assigned)
    uploads = {client: Weights(one if client % 3 else two, 1) for client in range(12)}
    state = make_method("fesem", models="cnn4", own={"centres": 5}).aggregate(
        start, uploads, Round(1, task, 12)
    )
    assert sorted(state.sizes().tolist()) == [0, 0, 0, 4, 8]


def test_a_client_of_an_unknown_centre_is_rejected(task):
    state = Centres((weights(1), weights(2)), torch.tensor([0, -1, 1]))
    assert sum(c.scalars() for c in Centres.from_tensors(state.to_tensors(), task).weights) == 2 * 5
    with pytest.raises(RejectedPayload, match=r"outside 0\.\.1"):
        Centres.from_tensors({**state.to_tensors(), "assigned": torch.tensor([2])}, task)
