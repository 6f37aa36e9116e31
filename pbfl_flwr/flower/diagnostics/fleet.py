"""The SuperLink's Fleet API, asked in a way that changes nothing; over gRPC, or over HTTP as from Flower 1.40 on.

A SuperNode joins with ActivateNode. Flower looks at the signature's time first, then at the key, then at the heartbeat
interval. An interval of zero is refused, so the answer tells how far the request came, and no node joins.
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

from pbfl_flwr.flower.flower_version import has_one_port
from pbfl_flwr.security import split_address

ANSWER_SECONDS = 10.0
UNKNOWN_KEY, BAD_INTERVAL, OTHER_VERSION = 2004, 2003, 1001  # Flower's ApiErrorCode
CLOCK = "Invalid timestamp"


class Fleet:
    """A Fleet API.

    Args:
        address: HOST:PORT.
        ca: PEM file of the authority; None means the system's.
        insecure: without TLS.
        key: the device's; a throwaway one is used if it is None.
    """

    def __init__(
        self, address: str, ca: Path | None, *, insecure: bool, key: ec.EllipticCurvePrivateKey | None
    ) -> None:
        self._address, self._ca, self._insecure = address, ca, insecure
        self._key = key or ec.generate_private_key(ec.SECP384R1())
        self._public = public_key_to_bytes(self._key.public_key())

    def ask(self, shift: float = 0.0) -> int | str:
        """Ask to join, signed ``shift`` seconds in the future.

        Returns:
            Flower's error code, CLOCK if the time was refused, or Flower's words.
        """
        stamp = (datetime.now(UTC) + timedelta(seconds=shift)).isoformat()
        signature = sign_message(self._key, stamp.encode("ascii"))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=0.0)
        said = (self._over_http if has_one_port() else self._over_grpc)(request, stamp, signature)
        known = FlowerError.from_json(said)
        return said if known is None else known.code

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
        return "a node without heartbeat was let in"

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
            # The signature is right: of what Flower looks at before the key, only the time can be wrong.
            return CLOCK if answer.status == 401 else answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return str(error)
        finally:
            connection.close()
