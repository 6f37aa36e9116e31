"""Two rounds of the app in this process, without Flower's processes: python -m pytest"""

from pathlib import Path

from own_app.client import app, my_data

from pbfl_flwr.testing import run_app

HERE = Path(__file__).parent


def test_two_rounds() -> None:
    """With the keys of pyproject.toml, some of them changed."""
    strategy = run_app(HERE, app, {"num-clients": 3, "num-server-rounds": 2, "app.noise": 0.0})
    assert [line.failures for line in strategy.history] == [[], []]
    assert strategy.history[-1].accuracy["head"].weighted > 0.2


def test_noise_reaches_the_data() -> None:
    """A key of this app's own."""
    settings = run_app(HERE, app, {"num-clients": 3, "num-server-rounds": 1, "app.noise": 0.5}).settings
    assert settings.app["noise"] == 0.5
    assert float(my_data(settings, 0).train.inputs.min()) < 0
