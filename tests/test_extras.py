"""What base dependencies are enough for, and the one line of whatever needs an extra."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from PIL import Image

from pbfl_flwr.cli.common import engine_for
from pbfl_flwr.config import Settings, parse
from pbfl_flwr.data import LoadedData, load_pool
from pbfl_flwr.data.own.columns import column_names
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan.configuration import preflight
from pbfl_flwr.flower.api import Resources
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import ARCHITECTURES, base_and_sizes
from pbfl_flwr.prototypes.privacy import epsilon_of, gaussian
from pbfl_flwr.sinks import check
from pbfl_flwr.training.class_metrics import areas
from pbfl_flwr.util.extras import EXTRAS, lacking, require
from tests.models.kinds import EXAMPLES, shapes, task_of

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {
    "flwr_datasets": "flwr-datasets",
    "mlflow": "mlflow-skinny",
    "prometheus_client": "prometheus-client",
    "ray": "flwr",  # its extra `simulation` brings Ray
    "sklearn": "scikit-learn",
}
OF_TORCHVISION = [
    "efficientnet-b0",
    "googlenet",
    "mobilenet-v2",
    "resnet18",
    "resnet50",
    "shufflenet-v2",
    "vit-b-16",
]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let modules be missing."""

    def leave_out(*modules: str) -> None:
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return leave_out


def test_every_module_is_in_the_extra_that_is_named() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {Requirement(text).name for text in texts}
        for extra, texts in declared["optional-dependencies"].items()
    }
    for module, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(module, module) in extras[extra], module
    base = {Requirement(text).name for text in declared["dependencies"]}
    assert base & {DISTRIBUTIONS.get(module, module) for module in EXTRAS} == {"flwr"}


def test_what_is_there_is_not_asked_for(absent: Callable[..., None]) -> None:
    require("a test", "sklearn", "scipy")
    assert lacking("a test") == ""
    absent("scipy")
    line = "a test needs scipy, which is not installed: pip install 'pbfl-flwr[privacy]'"
    assert lacking("a test", "sklearn", "scipy") == line
    with pytest.raises(PbflError, match=r"pbfl-flwr\[privacy\]"):
        require("a test", "scipy")


def keys(**values: Any) -> Settings:
    return parse({"num-clients": 2, **values}, SECTIONS)


def before_a_run(**values: Any) -> object:
    return preflight(keys(**values), Resources(), LoadedData())


def cases() -> Iterator[Any]:
    """Yield what is done in a folder, the modules that are missing, the start of its line, and the extra."""
    for name in OF_TORCHVISION:
        build = partial(build_model, name, task_of(name, 8, shapes(name)[0]), 0)
        yield lambda _, build=build: build(), ["torchvision"], f"model '{name}'", "experiments"
    for dataset in ("cifar10", "emnist", "fashion-mnist", "flowers102", "gtsrb"):
        load = partial(load_pool, keys(dataset=dataset).data)
        yield lambda _, load=load: load(), ["torchvision"], f"dataset '{dataset}'", "experiments"
    hub = keys(dataset="flwr-datasets", partition="natural").data
    arrays = np.array([0, 1]), np.eye(2)
    yield lambda _: load_pool(keys(dataset="digits").data), ["sklearn"], "dataset 'digits'", "experiments"
    yield lambda _: load_pool(hub), ["flwr_datasets"], "dataset 'flwr-datasets'", "flwr-datasets"
    yield lambda folder: column_names(folder / "t.csv"), ["pandas"], "{folder}/t.csv", "tables"
    yield (
        lambda folder: column_names(folder / "t.parquet"),
        ["pyarrow", "pandas"],
        "{folder}/t.parquet",
        "parquet",
    )
    yield lambda _: build_method(keys(method="gfpl")), ["sklearn"], "method = 'gfpl'", "experiments"
    fesem, mlp = keys(method="fesem", models="mlp"), task_of("mlp", 8, (1, 16, 16))
    yield lambda _: build_method(fesem).check(mlp, ["mlp"]), ["sklearn"], "method = 'fesem'", "experiments"
    yield lambda _: before_a_run(auc=True), ["sklearn"], "auc = true", "experiments"
    yield lambda _: before_a_run(**{"dp-noise": 1.0, "dp-clip": 1.0}), ["scipy"], "dp-noise", "privacy"
    yield lambda _: areas(*arrays), ["sklearn"], "auc = true", "experiments"
    yield lambda _: epsilon_of(1.0, 1, 1e-5), ["scipy"], "dp-noise", "privacy"
    yield lambda _: gaussian(1, 1), ["scipy"], "dp-noise", "privacy"
    yield lambda _: engine_for("ray", "", None, 0.0, None), ["ray"], "--engine ray", "simulation"
    yield lambda _: check("wandb"), ["wandb"], "sinks = 'wandb' on the server", "wandb"


@pytest.mark.parametrize(("call", "modules", "who", "extra"), [*cases()])
def test_one_line_says_what_to_install(
    call: Callable[[Path], object],
    modules: list[str],
    who: str,
    extra: str,
    absent: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    absent(*modules)
    with pytest.raises(PbflError) as caught:
        call(tmp_path)
    said = who.format(folder=tmp_path)
    said += f" needs {modules[0]}, which is not installed: pip install 'pbfl-flwr[{extra}]'"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("who", "use"),
    [
        ("model 'resnet18'", lambda: build_model("resnet18", task_of("resnet18", 8, (3, 32, 32)), 0)),
        ("dataset 'cifar10'", lambda: load_pool(keys(dataset="cifar10").data)),
    ],
)
def test_one_line_says_that_torchvision_does_not_fit_torch(
    who: str, use: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PbflError) as caught:
        use()
    found = f"torch {version('torch')}, torchvision {version('torchvision')}"
    assert str(caught.value) == (
        f"{who} needs a torchvision that was built for the torch that is installed; found {found} "
        "(operator torchvision::nms does not exist); install both anew, from the same index"
    )


def test_base_dependencies_are_enough_for_a_device(tmp_path: Path) -> None:
    """Every network but torchvision's can be built, and small ones train on arrays and on a folder of images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(30) % 3)
    for number, image in enumerate(images):
        file = tmp_path / "folder" / "abc"[number % 3] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    done = subprocess.run(
        [sys.executable, "-c", DEVICE, *sorted({*EXTRAS} - {"jinja2"})],  # torch brings jinja2
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PBFL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    ours = [name for name in EXAMPLES if "torchvision" not in ARCHITECTURES[base_and_sizes(name)[0]].summary]
    assert done.stdout.splitlines()[-3:] == [str(sorted(ours)), "images.npz 2", "folder 2"]


DEVICE = """
import sys
for module in sys.argv[1:]:
    sys.modules[module] = None
from pathlib import Path

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.api import Resources, RunDirectory, federate
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import ARCHITECTURES, base_and_sizes
from tests.models.kinds import EXAMPLES, shapes, task_of, width

built = []
for name in EXAMPLES:
    try:
        build_model(name, task_of(name, width(name, 8), shapes(name)[0]), 0)
        built.append(name)
    except PbflError as error:
        assert "needs torchvision" in str(error), error
print(sorted(built))
common = {"models": "small-4", "feature-dim": 16, "num-server-rounds": 2, "train-share": 0.5, "partition": "iid"}
for kind, place in (("npz", "images.npz"), ("image-folder", "folder")):
    keys = {**common, "dataset": kind, "data-dir": str(Path(place).absolute())}
    federate(f"run-{place}", keys, 4, Resources(workers=1))
    print(place, len(RunDirectory(f"run-{place}").round_records()))
"""
