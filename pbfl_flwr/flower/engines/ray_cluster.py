"""The connection to a Ray cluster, or to a Ray of this process's own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc
import ray

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.addresses import HOST_AND_PORT, split_address

CONNECT_SECONDS = 10.0


@contextmanager
def connected(address: str, cpus: int) -> Iterator[None]:
    """Connect to the cluster at an address, or without one start a Ray with this many CPUs and end it afterwards.

    Raises:
        PbflError: if the address is none, or there is no cluster at it.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    scratch = ""
    if not address:
        # Short, since it contains Ray's sockets, whose paths are limited to about 100 characters.
        scratch = tempfile.mkdtemp(prefix="pbfl-", dir="/tmp" if os.name == "posix" else None)
        options |= {"num_cpus": cpus, "include_dashboard": False, "_temp_dir": scratch}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else Ray warns; actors hide GPUs themselves.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _need_answer(address)
        try:
            ray.init(address=address or "local", **options)
        except ConnectionError as error:  # there is none to be found by the address auto
            raise _no_cluster(address, str(error)) from None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def _need_answer(address: str) -> None:
    """Check that a Ray cluster answers at HOST:PORT; Ray would try for many minutes."""
    if address in ("", "auto"):
        return
    place = split_address(address.removeprefix("ray://"), "--ray-address", f"{HOST_AND_PORT}, or auto")
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from None
    if address.startswith("ray://") or "RAY_USE_TLS" in os.environ:
        return  # there is no such check, or only with certificates
    # Without a proxy, as Ray itself.
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            raise _no_cluster(address, f"gRPC's health check: {error.code().name}") from None


def _no_cluster(address: str, reason: str) -> PbflError:
    return PbflError(f"--ray-address {address}: no Ray cluster answers ({reason})")


def cluster_resources(address: str, cpus: int, gpus: float) -> tuple[int, int]:
    """Return the numbers of CPUs and GPUs of the whole cluster.

    Args:
        address: of the cluster.
        cpus: that a worker needs.
        gpus: that a worker needs.

    Raises:
        PbflError: as :func:`connected`, or if no node has room for a worker, which Ray would await for ever.
    """
    with nullcontext() if ray.is_initialized() else connected(address, 0):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    if not any(cpus <= has_cpus and gpus <= has_gpus for has_cpus, has_gpus in found):
        each = " or ".join(f"{has_cpus} CPUs and {has_gpus} GPUs" for has_cpus, has_gpus in sorted({*found}))
        raise PbflError(
            f"--cpus-per-client {cpus} --gpus-per-client {gpus:g}: fit on no node of the Ray cluster; its nodes have "
            f"{each}"
        )
    return sum(has_cpus for has_cpus, _ in found), sum(has_gpus for _, has_gpus in found)
