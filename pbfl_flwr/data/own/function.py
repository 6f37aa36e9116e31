"""Arrays that a user's function makes, named in the configuration as ``my_package.module:load``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pbfl_flwr import seeds
from pbfl_flwr.config import MAX_CLASSES, DataSettings
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.labels import names_in
from pbfl_flwr.data.own.npz import pool_of_arrays
from pbfl_flwr.data.validation import validate
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.user_code import call_user_function

FORM = "must be a dict of the arrays x, y and optionally client, and of the list classes"


def from_function(settings: DataSettings) -> Pool:
    """Return the samples of the function that ``dataset`` names, which is called in every process.

    It gets the settings, with all global generators seeded by ``partition-seed``, and returns a dict of the arrays
    that an .npz file would have (:func:`~pbfl_flwr.data.own.npz.npz`), and optionally ``classes``, the names of the
    labels 0..K-1.

    Raises:
        PbflError: if the function may not be imported here, raises, or returns anything else.
    """
    spec = settings.dataset
    with seeds.seeded(seeds.derive(settings.partition_seed, "dataset")):
        result = call_user_function("dataset", spec, "settings", settings, kind=object)
    if not isinstance(result, Mapping) or not {"x", "y"} <= {*result} <= {"x", "y", "client", "classes"}:
        found = (
            f"a dict of {', '.join(map(str, result))}"
            if isinstance(result, Mapping)
            else type(result).__name__
        )
        raise PbflError(f"dataset = '{spec}': the function returned {found}; {FORM}")
    try:
        arrays = {name: np.asarray(values) for name, values in result.items() if name != "classes"}
    except (TypeError, ValueError, RuntimeError) as error:  # rows of different lengths; a tensor on a GPU
        raise PbflError(
            f"dataset = '{spec}': the function returned what is no array ({error}); {FORM}"
        ) from error
    pool = pool_of_arrays(arrays, f"the result of {spec}", settings, label_names=_classes(result, spec))
    validate(pool, spec)
    return pool


def _classes(result: Mapping[str, object], spec: str) -> tuple[str, ...] | None:
    if "classes" not in result:
        return None
    where, cells = f"dataset = '{spec}': classes", np.ravel(np.asarray(result["classes"])).tolist()
    distinct, numbers = names_in(cells, np.arange(len(cells)), "class", lambda place: f"{where}[{place}]")
    names = [distinct[number] for number in numbers]
    if not 2 <= len(names) <= MAX_CLASSES or len(distinct) < len(names):
        raise PbflError(f"{where} are {names[:5]}; must be 2 to {MAX_CLASSES} different names")
    return tuple(names)
