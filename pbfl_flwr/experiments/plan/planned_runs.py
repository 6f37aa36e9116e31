"""The runs of a comparison, sweep or reproduction: planned, checked, and how far each is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pbfl_flwr.config import PREDICTORS, DataSettings, RunSettings, Scalar, Settings, in_order
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError, abbreviate, writing
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.results import FinishedRun, Round, RunGroup, Statistic, with_the_same_keys
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.methods import build_method
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.locks import in_use
from pbfl_flwr.util.atomic_files import make_directory

LONGEST_RANGE = 1000  # of seeds; a longer one is taken for a typing error


@dataclass(frozen=True)
class PlannedRun:
    """One run of a table: its row, requested keys, directory, and block of a reproduction (else empty)."""

    label: str
    requested: configuration.RequestedKeys
    directory: Path
    block: str = ""

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.requested.values["seed"])

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.label}, seed {self.seed}"


def plan(
    runs: Mapping[str, Mapping[str, Scalar]],
    assignments: Iterable[str],
    seeds: Sequence[Scalar],
    out: Path,
    block: str = "",
    *,
    deal_anew: bool = False,
) -> list[PlannedRun]:
    """Return every run of a table, not checked yet.

    Args:
        runs: label -> keys.
        assignments: ``key=value`` for all runs.
        seeds: one run per label and seed, also if a seed is repeated; if empty, the seed in the keys.
        out: directory of the runs.
        block: of a reproduction.
        deal_anew: whether each seed is also that of the partition.

    Raises:
        PbflError: if an assignment is of a seed that ``seeds`` or ``deal_anew`` sets.
    """
    assigned = configuration.gather(None, assignments)
    if seeds and "seed" in assigned.values:
        raise PbflError("--set seed: each run gets its seed from a list; must be --seeds, e.g. --seeds 0,1")
    if deal_anew and "partition-seed" in assigned.values:
        raise PbflError("--set partition-seed: --deal-anew sets it to each run's seed; give one of the two")
    planned = []
    for label, keys in runs.items():
        row = configuration.scalars({**keys, **assigned.values})
        if "run-dir" in row.values:
            raise PbflError(
                f"{label}: run-dir = '{row.values['run-dir']}': runs are named by their rows; must be --out"
            )
        # The default is named, too, or a run that goes on would keep the number that it began with.
        values = {"num-server-rounds": RunSettings().num_server_rounds, **row.values}
        for seed in dict.fromkeys(seeds or [values.get("seed", 0)]):
            dealt = {"partition-seed": seed} if deal_anew else {}
            requested = configuration.RequestedKeys(
                {**values, "seed": seed, **dealt}, (*assigned.problems, *row.problems)
            )
            planned.append(PlannedRun(label, requested, out / f"{label}-seed{seed}", block))
    return planned


def selected(planned: Iterable[PlannedRun], labels: Sequence[str]) -> list[PlannedRun]:
    """Return the runs with these labels, all if there are none, after checking the keys of each.

    Raises:
        PbflError: if a label is unknown; else one line for every bad key of every run.
    """
    runs = list(planned)
    check_names("--only", labels, dict.fromkeys(run.label for run in runs))
    runs = [run for run in runs if not labels or run.label in labels]
    problems = []
    for run in runs:
        try:
            configuration.check(run.requested)
        except PbflError as error:
            problems += [f"{run.label}: {line}" for line in str(error).splitlines()]
    if problems:
        raise PbflError("\n".join(dict.fromkeys(problems)))
    return runs


def preflight(planned: Sequence[PlannedRun], resources: Resources, loaded: LoadedData) -> list[str]:
    """Load the data and try the models of every different configuration, before any run starts.

    Returns:
        Warnings about data, training and methods, one line each.

    Raises:
        PbflError: one line on the first problem, or if a run that is there was made with other samples.
    """
    unique: dict[str, None] = {}
    by_keys: dict[str, list[PlannedRun]] = {}
    for run in planned:
        by_keys.setdefault(str(sorted(run.requested.values.items())), []).append(run)
    for runs in by_keys.values():
        settings = configuration.check(runs[0].requested)
        method = configuration.preflight(settings, resources, loaded).method
        for run in runs:
            if standing(run).state in ("to resume", "finished"):
                check_samples(run.directory, settings.data, loaded)
        notes = [
            *configuration.data_warnings(settings, loaded),
            *configuration.training_warnings(settings, method),
        ]
        unique.update(dict.fromkeys(notes))
    return list(unique)


def check_samples(run_dir: Path, data: DataSettings, loaded: LoadedData) -> None:
    """Check that a run has the samples that its dataset has now.

    Raises:
        PbflError: if it has others.
    """
    directory = RunDirectory(run_dir)
    about, recorded = directory.record(), directory.partition().data
    deal, num_clients = about.clients[0].deal, int(about.configuration["num-clients"])
    if not loaded.is_of_run(data, num_clients, recorded, deal):
        where = f" (data-dir = '{data.data_dir}')" if data.data_dir else ""
        raise PbflError(
            f"{run_dir} was made with other samples than dataset = '{data.dataset}'{where} has now; restore them, "
            "or give another --out"
        )


def check_predictor(by: str | None, planned: Iterable[PlannedRun]) -> None:
    """Raise PbflError if tables are to be by a predictor that none of these runs has."""
    if by and by not in PREDICTORS:
        methods = (build_method(configuration.check(run.requested)) for run in planned)
        check_names(
            "--by", [by], in_order([*PREDICTORS, *(name for each in methods for name in each.predicts)])
        )


def check_names(option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise PbflError for the first unknown name given with a command-line option."""
    if unknown := [name for name in names if name not in known]:
        raise PbflError(f"{option} {unknown[0]}: must be one of {', '.join(known)}")


def parse_seeds(text: str) -> list[int]:
    """Parse ``--seeds``: whole numbers from 0, separated by commas; ``0-2`` stands for 0, 1 and 2.

    Raises:
        PbflError: if it is not such a list.
    """
    numbers: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if (ends := re.fullmatch(r"(\d{1,15})(?:\s*-\s*(\d{1,15}))?", part)) is None:
            raise PbflError(
                f"--seeds {text}: must be whole numbers from 0, separated by commas, or a range like 0-2"
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + LONGEST_RANGE:
            raise PbflError(
                f"--seeds {text}: must be a range of up to {LONGEST_RANGE} numbers, in ascending order"
            )
        numbers += range(first, last + 1)
    return numbers


def finished(run: PlannedRun) -> bool:
    """Whether a run is finished with its keys; False if it cannot be read or has other keys."""
    return standing(run).state == "finished"


def _is_finished(run: PlannedRun, directory: RunDirectory, done: int) -> bool:
    """Whether a run is finished, after checking that its ``done`` rounds were run with its keys.

    Raises:
        PbflError: if it was run with other keys or for more rounds, or is damaged.
    """
    wanted = configuration.check(run.requested)
    about = directory.record()
    made = configuration.check(configuration.RequestedKeys(about.configuration))
    now, then = ({**each.relevant(), **_patience(each)} for each in (wanted, made))
    odd = [f"{key} = {value}" for key, value in then.items() if now.get(key) != value]
    if odd := odd or [f"no {key}" for key in now if key not in then]:  # keys of an app have no default
        raise PbflError(
            f"{run.directory} was run with {', '.join(odd)}; give the same keys, or another --out"
        )
    rounds, until = wanted.run.num_server_rounds, made.run.num_server_rounds
    if about.ended_after is not None and about.ended_after <= rounds:
        rounds = until = about.ended_after
    # Its first rounds are not the shorter run: the final scoring and schedules depend on the last round.
    if done >= rounds and until > rounds:
        raise PbflError(
            f"{run.directory} was run with num-server-rounds = {until}, not {rounds}; give at least as many "
            "rounds, or another --out"
        )
    return configuration.is_complete(directory, wanted, done)


def _patience(settings: Settings) -> dict[str, Scalar]:
    run = settings.run
    return {"patience": run.patience, **({"patience-on": run.patience_on} if run.patience else {})}


@dataclass(frozen=True)
class Standing:
    """What is to be done with a planned run.

    Attributes:
        state: "refused" if it was run with other keys, or cannot go on, see
            :func:`pbfl_flwr.experiments.plan.configuration.resumed`; "to run again" if it was made with other code.
        rounds: number of its finished rounds.
        keys: to start or resume it with; None if there is nothing to do.
        refusal: the run's name and why it is refused; empty if it is not.
        edited: functions of the user's that were edited since.
    """

    state: Literal["to run", "to run again", "to resume", "finished", "refused"]
    rounds: int = 0
    keys: configuration.RequestedKeys | None = None
    refusal: str = ""
    edited: tuple[str, ...] = ()


def standing(run: PlannedRun) -> Standing:
    """Return what is to be done with a run, from the files in its directory."""
    directory = RunDirectory(run.directory)
    try:
        if not directory.taken:
            directory.check_new()
            return Standing("to run", keys=run.requested)
        rounds = directory.finished_rounds()
        finished = _is_finished(run, directory, rounds)
        if (edited := directory.record().edited) and not run.requested.values.get("new-code"):
            return Standing("to run again", keys=run.requested, edited=edited)
        if finished:
            return Standing("finished", rounds)
        return Standing("to resume", rounds, configuration.resumed(run.directory, run.requested))
    except PbflError as error:
        return Standing("refused", refusal=f"{run.name}: {error}")
    except OSError as error:  # a name that is too long, a directory of another user
        return Standing("refused", refusal=f"{run.name}: {run.directory}: {error.strerror}")


def edited_line(planned: Iterable[PlannedRun]) -> str:
    """Return a line on the runs that were made with other code; empty if there are none."""
    runs, functions = _edited(planned)
    if not runs:
        return ""
    folders = ", ".join(dict.fromkeys(str(_other_code(run)) for run in runs))
    return (
        f"made before {functions} was edited, to be run again and then kept in {folders}: "
        f"{abbreviate([run.name for run in runs])}; --set new-code=true takes them as they are"
    )


def left_out_line(others: Iterable[PlannedRun]) -> str:
    """Return a line on the runs among those not chosen whose code was edited; empty if there are none."""
    runs, functions = _edited(others)
    if not runs:
        return ""
    return (
        f"made before {functions} was edited and not chosen, so not in the tables: "
        f"{abbreviate([run.name for run in runs])}"
    )


def _edited(planned: Iterable[PlannedRun]) -> tuple[list[PlannedRun], str]:
    """Return the runs that were made with other code, and the names of the functions that were edited since."""
    edited = [(run, names) for run in planned if (names := standing(run).edited)]
    return [run for run, _ in edited], ", ".join(sorted({name for _, names in edited for name in names}))


def set_aside(run: PlannedRun) -> None:
    """Move a run that was made with other code out of the way.

    Raises:
        PbflError: if a process works on it, or it cannot be moved.
    """
    experiment, folder = RunDirectory(run.directory).record().experiment, _other_code(run)
    if in_use(run.directory):
        raise PbflError(f"'{run.directory}' was made with other code, but is in use by a run")
    with writing(folder):
        make_directory(folder)
        run.directory.rename(folder / f"{run.directory.name}-{experiment[-8:]}")


def _other_code(run: PlannedRun) -> Path:
    return run.directory.parent / "other-code"


def reason_not_to_write(planned: Iterable[PlannedRun]) -> str:
    """Return why existing tables must not be overwritten; empty if new ones can be written."""
    states = {standing(run).state for run in planned}
    if "refused" in states:
        return "a run is refused"
    return "" if "finished" in states else "no run is finished"


def finished_groups(
    planned: Iterable[PlannedRun], by: str = "", statistic: Statistic = "weighted", at: Round = "last"
) -> list[RunGroup]:
    """Return the finished runs of every label that has any; the arguments are those of :class:`FinishedRun`."""
    done = [run for run in planned if finished(run)]
    loaded = [FinishedRun.load(run.directory, by=by, statistic=statistic, at=at) for run in done]
    by_label: dict[str, list[FinishedRun]] = {}
    for run, finished_run in zip(done, with_the_same_keys(loaded), strict=True):
        by_label.setdefault(run.label, []).append(finished_run)
    return [RunGroup(label, tuple(runs)) for label, runs in by_label.items()]


def unfinished_lines(planned: Iterable[PlannedRun], groups: Iterable[RunGroup]) -> list[str]:
    """Return a sentence on the runs that are in no row of a table, by label; empty if there are none."""
    present = {run.path for group in groups for run in group.runs}
    seeds: dict[str, list[str]] = {}
    for run in planned:
        if run.directory not in present:
            seeds.setdefault(run.label, []).append(str(run.seed))
    rows = [
        f"{label} ({'seed' if len(missing) == 1 else 'seeds'} {', '.join(missing)})"
        for label, missing in seeds.items()
    ]
    return [f"Not finished: {', '.join(rows)}."] if rows else []
