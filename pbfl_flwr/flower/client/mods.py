"""Flower mods around the clients' handlers: those given to the app, then those that the key ``mods`` names.

A mod is ``mod(message, context, call_next) -> Message``: it may change the message, call the handler or not, and change
or replace its reply. The first one is outermost. Those of the key are resolved with every message, since an app is
built before it knows the run configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings, comma_list
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.device import client_id_of
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.util.user_code import import_function, own_code, returned


def checked_mods(mods: Sequence[Mod]) -> list[Mod]:
    """Return the mods given to an app.

    Raises:
        PbflError: naming one that cannot be called.
    """
    for mod in mods:
        if not callable(mod):
            raise PbflError(
                f"mods: {mod!r} is no mod; must be functions mod(message, context, call_next), as Flower defines them"
            )
    return [*mods]


def configured_mods(settings: Settings) -> list[Mod]:
    """Import the mods that the configuration names.

    Raises:
        PbflError: if there is no such module or function, or importing the module raises.
    """
    names = [own_code(name, settings.code) for name in comma_list(settings.run.mods)]
    return [cast(Mod, import_function("mods", name)) for name in names]


def call_with_mods(
    mods: Sequence[Mod], settings: Settings, message: Message, context: Context, handler: ClientAppCallable
) -> Message:
    """Return the handler's reply to a message as the given and the configured mods leave it.

    The generators of torch (CPU), NumPy and Python are seeded for the mods by run, client, round and kind of message,
    and separately for the handler, so that neither's draws depend on the other's, the engine or the worker.

    Raises:
        PbflError: as :func:`configured_mods`, or if a mod returns no message; also whatever mods and handler raise.
    """
    around = [*mods, *configured_mods(settings)]
    if not around:
        return handler(message, context)
    config, (client, _) = message.content.config_records.get(wire.CONFIG), client_id_of(context.node_config)
    number = int(str(config["round"])) if config and "round" in config else 0  # the handshake has none
    use = settings.run.seed, client, number, message.metadata.message_type

    def seeded_handler(message: Message, context: Context) -> Message:
        with seeds.seeded(seeds.derive("handler", *use)):
            return handler(message, context)

    call: ClientAppCallable = seeded_handler
    for mod in reversed(around):
        call = _around(mod, call)
    with seeds.seeded(seeds.derive("mods", *use)):
        return call(message, context)


def _around(mod: Mod, call_next: ClientAppCallable) -> ClientAppCallable:
    def call(message: Message, context: Context) -> Message:
        reply = mod(message, context, call_next)
        return returned(mod, reply, Message)

    return call
