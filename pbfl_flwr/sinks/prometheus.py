"""Prometheus: figures of the last finished round under ``http://ADDRESS/metrics``, as long as the server's half runs.

ADDRESS is PBFL_PROMETHEUS in the environment of the server's process, by default 127.0.0.1:9464. Counters start at 0
again when a run is resumed, which Prometheus expects of them.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from pbfl_flwr.runs.records import Bytes, RunRecord
from pbfl_flwr.sinks import KINDS, OTHER_KIND, Ending, Metrics, prometheus_address


class Prometheus:
    """An HTTP endpoint with a run's metrics, labelled with the name of its directory."""

    def __init__(self, run_dir: Path, about: RunRecord) -> None:
        self._run, self._clients = run_dir.name, len(about.clients)
        registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"pbfl_{name}", text, ("run", *labels), registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pbfl_{name}", text, ("run", *labels), registry=registry)

        self._round = gauge("round", "Last finished round")
        self._online = gauge(
            "clients_online", "Clients without those that were not connected in the last round"
        )
        self._figures = gauge("figure", "Any other figure of the last round", "name")
        self._accuracy = gauge("accuracy", "Accuracy over clients", "predictor", "statistic")
        self._seconds = gauge("seconds", "Seconds of the last round, by part", "part")
        self._counters = {
            "bytes": counter("bytes", "Bytes of messages", "direction", "part"),
            "failures-by-kind": counter("failures", "Clients that did not complete their task", "kind"),
        }
        for labels in product(("up", "down"), Bytes.model_fields):  # at 0 from the start, as rate() needs
            self._counters["bytes"].labels(self._run, *labels)
        for kind in {*KINDS.values(), OTHER_KIND}:
            self._counters["failures-by-kind"].labels(self._run, kind)
        host, port = prometheus_address()
        self._server, self._thread = start_http_server(port, host, registry)

    @property
    def port(self) -> int:
        """Port of the endpoint."""
        return int(self._server.server_port)

    def log(self, step: int, metrics: Metrics) -> None:
        """Set the gauges and add to the counters."""
        for name, value in metrics.items():
            family, _, rest = name.partition("/")
            if family in self._counters:
                self._counters[family].labels(self._run, *rest.split("/")).inc(value)
            elif family == "accuracy":
                self._accuracy.labels(self._run, *rest.split("/")).set(value)
            elif family == "seconds":
                self._seconds.labels(self._run, rest).set(value)
            else:
                self._figures.labels(self._run, name).set(value)
        if "trained" in metrics:  # not if these are only accuracies of the round before
            self._clients += int(metrics.get("joined", 0))
            disconnected = metrics.get("failures-by-kind/disconnected", 0.0)
            self._round.labels(self._run).set(step)
            self._online.labels(self._run).set(self._clients - disconnected)

    def close(self, ending: Ending) -> None:
        """Close the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
