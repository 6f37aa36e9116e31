"""The server of PPA and APS reads the clients' class counts off the uploads: n_ij·c̄_ij is as long as it is counted.

What it uses is what it gets anyway: every client's u_ij = n_ij·c̄_ij, their sum S_j, and n_i from the reports.

Projection   p_ij = <u_ij, S_j> / <S_j, S_j>     the client's share of class j along the class's direction
             Σ_j p_ij·n_j = n_i                  an equation a client, solved for the sizes n_j >= 0 of the classes
             n̂_ij = p_ij·n_j
Length       n̂_ij = n_i·|u_ij| / Σ_k |u_ik|      the class means of one network are about equally long

    python docs/examples/count_projection_attack.py
"""

import numpy as np
import torch
from scipy.optimize import nnls

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.data import client_data
from pbfl_flwr.method import Client, Round
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import architecture_of
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.task import Task

ROUNDS, CLIENTS = 5, 20


def projection(uploads: dict[int, Prototypes], totals: np.ndarray) -> np.ndarray:
    """Return n̂ (M, K) from the uploads of one round and n_i (M,)."""
    u = torch.stack([upload.values for upload in uploads.values()]).double()  # (M, K, d)
    S = u.sum(0)
    shares: np.ndarray = ((u * S).sum(-1) / (S * S).sum(-1).clamp_min(1e-12)).numpy()
    sizes, _ = nnls(shares, totals)
    return shares * sizes


def length(uploads: dict[int, Prototypes], totals: np.ndarray) -> np.ndarray:
    """Return n̂ (M, K) likewise."""
    norms = torch.stack([upload.values for upload in uploads.values()]).double().norm(dim=-1).numpy()
    found: np.ndarray = totals[:, None] * norms / norms.sum(1, keepdims=True).clip(1e-12)
    return found


def play(**keys: Scalar) -> tuple[np.ndarray, dict[int, Prototypes]]:
    """Run the federation without Flower, and return the true counts and the uploads of the last round."""
    config: dict[str, Scalar] = {"num-clients": CLIENTS, "aggregation": "ppa", **keys}
    settings = parse(config, SECTIONS)
    method = build_method(settings)
    data = [client_data(settings.data, CLIENTS, i) for i in range(CLIENTS)]
    task = Task(data[0].num_classes, settings.models.feature_dim, data[0].input_shape)
    models = [build_model(architecture_of(settings.models.models, i), task, 0) for i in range(CLIENTS)]
    memories: list[dict[str, torch.Tensor]] = [{} for _ in range(CLIENTS)]
    state, uploads = method.init(task, 0), {}
    for number in range(1, ROUNDS + 1):
        for i in range(CLIENTS):
            client = Client(
                i,
                number,
                task,
                models[i],
                data[i],
                settings.training,
                settings.evaluation,
                memory=memories[i],
            )
            update = method.local_update(client, method.broadcast(state, i))
            uploads[i], memories[i] = update.payload, dict(update.memory)
        state = method.aggregate(state, uploads, Round(number, task, CLIENTS))
    truth = np.stack([shard.counts.numpy() for shard in data])
    return truth, uploads


def main() -> None:
    """Print a row a setting: correlation of guess and truth, and how many n_ij >= 2 are guessed within 10 %."""
    torch.set_num_threads(1)
    noise: dict[str, Scalar] = {"total-examples": 1338, "min-class-count": 1}
    noise |= {"dp-clip": 10.0, "dp-unit": "sample"}
    settings: dict[str, dict[str, Scalar]] = {
        "PPA": {},
        "PPA, one architecture": {"models": "cnn2"},
        "PPA, dp-noise = 1, unit sample": {**noise, "dp-noise": 1.0},
        "PPA, dp-noise = 20, unit sample": {**noise, "dp-noise": 20.0},
    }
    print(f"{'digits, Dirichlet(0.1), 20 clients, round 5':44}{'projection':>22}{'length':>22}")
    shown = []
    for name, keys in settings.items():
        truth, uploads = play(**keys)
        totals, held, cells = truth.sum(1).astype(float), truth >= 2, []
        for attack in (projection, length):
            guess = attack(uploads, totals)
            error = np.abs(guess - truth)[held] / truth[held]
            correlation = np.corrcoef(truth.ravel(), guess.ravel())[0, 1]
            cells.append(f"{correlation:.3f} {100 * (error < 0.1).mean():.0f} %")
            if name == "PPA":
                shown.append(f"client 0, {attack.__name__:12}" + "".join(f"{n:5.0f}" for n in guess[0]))
        print(f"{name:44}{cells[0]:>22}{cells[1]:>22}")
        if name == "PPA":
            shown.insert(0, f"client 0, {'true':12}" + "".join(f"{n:5d}" for n in truth[0]))
    print("\n".join(shown))


if __name__ == "__main__":
    main()
