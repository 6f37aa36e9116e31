"""The scalars that travel in a round as each method's paper counts them, against the printed numbers."""

import pytest

from pbfl_flwr.task import Task

FMNIST, CIFAR_10, CIFAR_100 = ((10, 512, (1, 28, 28)), (10, 512, (3, 32, 32)), (100, 512, (3, 32, 32)))
SMALL_GENERATOR = {"noise_dim": 3, "hidden_dim": 8}
TWENTY = {"fedavg", "fedcpd", "fedfa", "fednh", "fedpa", "fedper", "fesem", "fml", "fedkd", "lg-fedavg"}


def held(total):
    """The classes of 20 clients that add up to the total."""
    return [total // 20] * 19 + [total - 19 * (total // 20)]


@pytest.mark.parametrize(
    ("name", "keys", "task", "counts", "expected"),
    [
        # 4-layer CNN, 20 clients, both ways: 23.28M, 35.14M, 36.99M; |w| = |θ| + (d + 1)·K
        ("fedavg", {}, FMNIST, [10] * 20, 40 * (576_896 + 5_130)),
        ("fedavg", {}, CIFAR_10, [10] * 20, 40 * (873_408 + 5_130)),
        ("fedavg", {}, CIFAR_100, [100] * 20, 40 * (873_408 + 51_300)),
        # 832 + 51,264 + 1024·512 + 512 = 576,896; ΣK_i = 106
        ("fedcpd", {}, FMNIST, held(106), 40 * 576_896 + (106 + 200) * 512),
        # Σ_i K·(K_i + K)
        ("feddistill", {}, (10, 500, (3, 32, 32)), held(102), 3_020),
        ("feddistill", {}, (100, 500, (3, 32, 32)), held(921), 292_100),
        ("feddistill", {}, (200, 500, (3, 32, 32)), held(1853), 1_170_600),
        ("fedfa", {}, CIFAR_10, [10] * 20, 40 * (878_538 + 5_120)),  # 2·M·(|w| + K·d)
        # 20·(2·(512·100 + 100) + 331,776), FedTGP's 8.69M
        ("fedgen", {}, CIFAR_100, [1] * 20, 8_687_520),
        # (Σ_i K_i + 2·K)·width for two clients, width d or K
        ("fedl2g", {}, (10, 500, (3, 32, 32)), [2, 3], 25 * 500),
        ("fedl2g", {"own": {"form": "logits"}}, (10, 500, (3, 32, 32)), [2, 3], 25 * 10),
        # the shared network is FML's auxiliary one at a quarter of d
        ("fedmrl", {}, (100, 256, (3, 32, 32)), [100] * 3, 6 * 162_660),
        ("fesem", {"own": {"centres": 3}}, CIFAR_10, [10] * 20, 40 * 878_538),  # each gets one of the models
        # two clients of 2 and 3 classes: (2 + 3)·500 + 2·(10·500 + 10)
        ("fedgh", {}, (10, 500, (3, 32, 32)), [2, 3], 2_500 + 2 * 5_010),
        # 2·M·(|θ| + K·d + 1) + M·(K·d + K)
        ("fednh", {}, CIFAR_100, [100] * 20, 40 * (873_408 + 51_200 + 1) + 20 * (51_200 + 100)),
        # |w| = 832 + 51,264 + 64·5 + 5 + 60, K_i = 2, K = 10, d = 5; G: (3 + 10)·8 + 8, 2·8, 8·5 + 5
        ("fedpa", {"own": SMALL_GENERATOR}, (10, 5, (1, 16, 16)), [2], 2 * 52_481 + 173 + 12 * 5 + 2),
        ("fedper", {"own": {"shared": "body"}}, CIFAR_10, [10] * 20, 34_936_320),
        ("fedper", {"own": {"shared": "stages"}}, CIFAR_10, [10] * 20, 40 * (2_432 + 51_264)),
        # one way 106·10³ in FedProto's protocol
        ("fedper", {"protocol": "fedproto", "models": "cnn2"}, (10, 50, (1, 28, 28)), [4] * 20, 40 * 5_280),
        ("fml", {}, (43, 500, (3, 32, 32)), [43] * 20, 40 * (854_196 + 501 * 43)),
        # one client, both ways, at d = 64: a hidden layer of d, and the released code's of 512
        ("fml", {}, (100, 64, (3, 32, 32)), [100], 2 * 162_660),
        ("fml", {"own": {"auxiliary": "cnn4-512"}}, (100, 64, (3, 32, 32)), [100], 2 * 879_908),
        # 2·M·d·K
        ("lg-fedavg", {}, (10, 500, (3, 32, 32)), [10] * 20, 200_000),
        ("lg-fedavg", {}, (4, 500, (3, 32, 32)), [4] * 20, 80_000),
        ("lg-fedavg", {}, (200, 500, (3, 32, 32)), [200] * 20, 4_000_000),
        # n(2d + 1)·w̄·M/S_T = 4·101·4·20/10, MNIST
        ("gfpl", {}, (10, 50, (1, 28, 28)), [4] * 20, 3232),
        ("gfpl", {"own": {"pseudo_features": False}}, (10, 50, (1, 28, 28)), [4] * 20, 0),
    ],
)  # fmt: skip
def test_cost_of_a_round_is_the_formula_of_the_paper(make_method, name, keys, task, counts, expected):
    models = {"models": "cnn4"} if name in TWENTY else {}
    method = make_method(name, **{"feature_dim": task[1], **models, **keys})
    assert method.paper_scalars(Task(*task), counts) == expected


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("fml", ["35.03", "36.21", "36.99"]),  # GTSRB, Flowers-102 (TinyProto), CIFAR-100 (FedTGP)
        ("fedkd", ["31.29", "32.34", "33.04"]),  # FML's times 0.8932
    ],
)
def test_costs_in_millions_are_those_printed(make_method, name, printed):
    tasks = [Task(K, d, (3, 32, 32)) for d, K in ((500, 43), (500, 102), (512, 100))]
    costs = [make_method(name).paper_scalars(task, [task.num_classes] * 20) for task in tasks]
    assert [f"{cost / 1e6:.2f}" for cost in costs] == printed
