"""A probe of the SuperLink's Fleet API without side effects; over gRPC, or over HTTP for Flower 1.40 and later.

A SuperNode joins with ActivateNode. Flower checks the timestamp of the signature first, then the key, then the
heartbeat interval. The probe has an interval of zero, which is refused, so the error tells which checks passed and no
node joins.
"""

from __future__ import annotations

import base64
import http.client
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.error import FlowerError
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from pbfl_flwr.flower.deploy.certificates import split_address
from pbfl_flwr.flower.flower_version import has_one_port

ANSWER_SECONDS = 10.0
UNKNOWN_KEY, BAD_INTERVAL, OTHER_VERSION = 2004, 2003, 1001  # Flower's ApiErrorCode
CLOCK = "Invalid timestamp"


class Fleet:
    """A Fleet API.

    Args:
        address: HOST:PORT.
        ca: PEM file of the certificate authority; None means the system's.
        insecure: connect without TLS.
        key: the device's; None makes a temporary one.
    """

    def __init__(
        self, address: str, ca: Path | None, *, insecure: bool, key: ec.EllipticCurvePrivateKey | None
    ) -> None:
        self._address, self._ca, self._insecure = address, ca, insecure
        self._key = key or ec.generate_private_key(ec.SECP384R1())
        self._public = public_key_to_bytes(self._key.public_key())

    def probe(self, shift: float = 0.0) -> int | str:
        """Send an ActivateNode request whose timestamp is ``shift`` seconds in the future.

        Returns:
            Flower's error code, CLOCK if the timestamp was refused, or Flower's error message.
        """
        stamp = (datetime.now(UTC) + timedelta(seconds=shift)).isoformat()
        signature = sign_message(self._key, stamp.encode("ascii"))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=0.0)
        message = (self._over_http if has_one_port() else self._over_grpc)(request, stamp, signature)
        error = FlowerError.from_json(message)
        return message if error is None else error.code

    def _over_grpc(self, request: ActivateNodeRequest, stamp: str, signature: bytes) -> str:
        metadata = (
            (PUBLIC_KEY_HEADER, self._public),
            (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, signature),
        )
        ca = self._ca.read_bytes() if self._ca and not self._insecure else None
        version = RuntimeVersionClientInterceptor(component_name="SuperNode")
        channel = create_channel(self._address, self._insecure, ca, interceptors=[version])
        try:
            FleetStub(channel).ActivateNode(request, metadata=metadata, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return CLOCK if error.details() == "Invalid timestamp" else str(error.details())
        finally:
            channel.close()
        return "a node without heartbeat was admitted"

    def _over_http(self, request: ActivateNodeRequest, stamp: str, signature: bytes) -> str:
        host, port = split_address(self._address)
        connection: http.client.HTTPConnection
        if self._insecure:
            connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
        else:
            trust = ssl.create_default_context(cafile=self._ca)
            connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_SECONDS, context=trust)
        headers = {
            "Content-Type": "application/protobuf",
            "Accept": "application/protobuf",
            PUBLIC_KEY_HEADER.removesuffix("-bin"): base64.b64encode(self._public).decode("ascii"),
            SIGNATURE_HEADER.removesuffix("-bin"): base64.b64encode(signature).decode("ascii"),
            TIMESTAMP_HEADER: stamp,
        }
        try:
            connection.request("POST", "/v1/fleet/activate-node", request.SerializeToString(), headers)
            answer = connection.getresponse()
            # The signature is valid, so of the checks before the key only the timestamp can fail.
            return CLOCK if answer.status == 401 else answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return str(error)
        finally:
            connection.close()
