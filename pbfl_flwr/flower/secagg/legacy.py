"""The prototype methods as strategies of Flower's older interface, ``aggregate_fit`` over FitRes.

For apps built on ``ServerApp(server_fn=...)`` or on a workflow, such as Flower's secure aggregation::

    strategy = LegacyMethodStrategy(settings, task)
    ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=settings.run.num_server_rounds))

and, with ``secure-aggregation``, in a ServerApp's main::

    DefaultWorkflow(fit_workflow=strategy.workflow())(grid, LegacyContext(context, config, strategy))

The ClientApp is the same, from ``make_client_app``; it recognises such messages by their records. There is no hello
round, so the task must be given, and no evaluation round, since clients are scored when they train.
"""

from __future__ import annotations

import uuid
from logging import WARNING
from typing import Any

import numpy as np
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    NDArray,
    Parameters,
    Scalar,
    parameters_to_ndarrays,
)
from flwr.common.logger import log
from flwr.compat.common import recorddict_compat as compat
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from flwr.server.workflow import SecAggPlusWorkflow

from pbfl_flwr.config import PrivacySettings, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, classes_counted
from pbfl_flwr.flower.secagg.messages import parameters_of, payload_of, report_of, summing
from pbfl_flwr.flower.server.exchange import rejection_reason
from pbfl_flwr.flower.server.rounds import summarise_accuracy
from pbfl_flwr.method import Method, Round
from pbfl_flwr.methods import build_method
from pbfl_flwr.payloads import Payload, Prototypes
from pbfl_flwr.prototypes import secure_sums as sums
from pbfl_flwr.task import Task


def workflow_of(keys: PrivacySettings, bound: float, num_clients: int, timeout: float) -> SecAggPlusWorkflow:
    """Return Flower's SecAgg+ for a plain sum of vectors within ±R, see :mod:`pbfl_flwr.prototypes.secure_sums`.

    Args:
        keys: give the share of clients whose secret shares must be received.
        bound: R.
        num_clients: clients that train in a round.
        timeout: seconds for each of the protocol's four stages.
    """
    return SecAggPlusWorkflow(
        1.0,
        keys.secure_threshold,
        max_weight=1.0,
        clipping_range=bound,
        quantization_range=2 ** sums.bits(num_clients),
        modulus_range=2**32,
        timeout=timeout,
    )


class TrainingOnly(Strategy):
    """A strategy without evaluation rounds: clients are scored when they train, and the server has no data."""

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return nothing."""
        return []

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Return nothing."""
        return None, {}

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Return nothing."""
        return None


class LegacyMethodStrategy(TrainingOnly):
    """A method of METHODS as a strategy of the older interface.

    Args:
        settings: the run configuration.
        task: what all clients agree on.
        experiment: the name under which clients keep their state; by default a new one.

    Attributes:
        state: the method's state after the last round.
        reports: Flower's client id -> report of the last round.
        failures: Flower's client id -> why its reply was left out of the last round.

    Raises:
        PbflError: if the method cannot be built, its uploads are not prototypes, or a setting is not supported.
    """

    def __init__(self, settings: Settings, task: Task, experiment: str | None = None) -> None:
        self.settings, self.task = settings, task
        self.method: Method[Any, Any, Any] = build_method(settings)
        if self.method.up is not Prototypes:
            raise PbflError(
                f"method = '{self.method.name}': the older interface is for methods whose uploads are prototypes"
            )
        if settings.attack.kind != "none":  # clients have no number before they reply
            raise PbflError(
                f"attack.kind = '{settings.attack.kind}': the older interface cannot identify malicious clients"
            )
        for key in ("new-clients", "min-clients", "patience"):
            if number := settings.as_dict()[key]:
                raise PbflError(f"{key} = {number}: not supported by the older interface; allowed is 0")
        if settings.run.keep_best:
            raise PbflError("keep-best = true: not supported by the older interface; allowed is false")
        self.experiment = experiment or f"{settings.fingerprint()}-{uuid.uuid4().hex[:8]}"
        self.state: Any = self.method.init(task, settings.run.seed)
        self.reports: dict[str, Report] = {}
        self.failures: dict[str, str] = {}

    def workflow(self) -> SecAggPlusWorkflow:
        """Return the fit workflow of a run with ``secure-aggregation``."""
        run = self.settings.run
        return workflow_of(self.settings.privacy, summing(self.method).bound, run.trained, run.round_timeout)

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Return the first broadcast."""
        return self._broadcast()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return instructions for the sampled clients, with the broadcast and the round."""
        run = self.settings.run
        client_manager.wait_for(run.num_clients, int(run.join_timeout))
        sampled = client_manager.sample(run.trained)
        config: dict[str, Scalar] = {"round": server_round, "experiment": self.experiment}
        return [(proxy, FitIns(self._broadcast(), dict(config))) for proxy in sampled]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Aggregate the valid uploads, or, with ``secure-aggregation``, the mean that every result then holds.

        An invalid reply is logged, added to ``failures`` and counted in the metrics; under secure aggregation its
        upload is still part of the sum.

        Raises:
            RejectedPayload: if the sum is invalid for the method.
        """
        ordered = sorted(results, key=lambda pair: pair[0].cid)
        uploads: dict[int, Payload] = {}
        self.reports, self.failures = {}, {}
        for number, (proxy, result) in enumerate(ordered):
            try:
                report = report_of(result.metrics, classes_counted(self.settings.evaluation, self.task))
                if not self.settings.privacy.secure_aggregation:
                    uploads[number] = self._upload_of(result)
                self.reports[proxy.cid] = report
            except Exception as error:  # trust boundary, as in replies.read
                self.failures[proxy.cid] = rejection_reason(error)
                log(
                    WARNING,
                    "round %s: client %s failed: %s",
                    server_round,
                    proxy.cid,
                    rejection_reason(error),
                )
        failed: dict[str, Scalar] = {"failures": len(self.failures)} if self.failures else {}
        if not self.reports:
            return None, failed
        if self.settings.privacy.secure_aggregation:
            mean = parameters_to_ndarrays(ordered[0][1].parameters)[0]
            uploads[0] = summed(self.method, mean, len(results), self.task, self.settings.run.num_clients)
        at = Round(server_round, self.task, self.settings.run.num_clients, self.settings.run.seed)
        self.state = self.method.aggregate(self.state, uploads, at)
        accuracy = summarise_accuracy(dict(enumerate(self.reports.values())))
        metrics = {f"accuracy-{name}": of.weighted for name, of in accuracy.items()}
        return self._broadcast(), {**metrics, **failed}

    def _upload_of(self, result: FitRes) -> Payload:
        record = payload_of(compat.parameters_to_arrayrecord(result.parameters, True))
        upload: Payload = wire.decode(record, self.method.up, self.task)
        self.method.validate(upload, self.state, self.task)
        return upload

    def _broadcast(self) -> Parameters:
        payload = self.method.broadcast(self.state, 0)
        return parameters_of(wire.encode(payload, self.settings.prototypes.wire_dtype))


def summed(
    method: Method[Any, Any, Any], mean: NDArray, clients: int, task: Task, num_clients: int
) -> Prototypes:
    """Return the upload that represents the sum of all uploads.

    Args:
        method: its uploads can be summed.
        mean: of the clients' vectors, as computed by Flower.
        clients: number of these clients.
        task: what all clients agree on.
        num_clients: M.

    Raises:
        RejectedPayload: if the vector is not a sum of tables.
    """
    total = np.asarray(mean, dtype=np.float64) * clients
    found = summing(method)
    return found.summed(sums.from_vector(total, task.num_classes, clients, found.bound), num_clients)
