"""What a device need not load: Ray, the simulation engine, torch's compiler, secure aggregation."""

import os
import subprocess
import sys
from pathlib import Path

ANSWER = """
import sys

sys.modules["ray"] = None  # as on a device: importing it raises ImportError
sys.modules["flwr.simulation"] = None

from pathlib import Path
from client_app.app import app
from pbfl_flwr.config import parse
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import METHODS, SECTIONS
from tests.flower.inprocess import InProcessGrid

place = sys.argv[1]
base = {"num-clients": 1, "num-server-rounds": 1, "models": "cnn2", "feature-dim": 64, "partition": "iid"}
for method in METHODS:
    auxiliary = {f"{method}.auxiliary": "cnn2"} if method in ("fml", "fedkd") else {}
    config = {**base, "method": method, "max-samples": 100, "seed": 1, **auxiliary}
    if method == "gfpl":
        config |= {"gfpl.start": 1, "gfpl.interval": 1}
    grid = InProcessGrid(app, config, 1, node_configs=[{"client-id": 0, "state-dir": place}])
    strategy = MethodStrategy(parse(config, SECTIONS), None)
    strategy.start(grid)
    assert strategy.history[0].trained == [0], strategy.history
    assert [path for path in Path(place).rglob("*") if strategy.experiment in str(path) and path.is_file()]
# The compiler takes three seconds of every message's process; no run here aggregates securely.
unwanted = ("ray", "torch._dynamo", "pbfl_flwr.flower.secagg")
loaded = [name for name, module in sys.modules.items() if module and name.startswith(unwanted)]
assert not loaded, loaded
print("answered")
"""


def test_device_answers_in_every_method_without_ray_compiler_and_secure_aggregation(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(tmp_path / "state")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PBFL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "answered\n"
