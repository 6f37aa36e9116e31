"""For tests of your own methods and apps: clients with data, their uploads, whole apps, and the contract of methods.

::

    from pbfl_flwr.testing import check_method, client, uploads

    state, sent = uploads(method, [client((0, 0, 1)), client((1, 2), id=1)])   # the first round's
    check_method("my_package.module:build")                                    # what every method must do
"""

from pbfl_flwr.flower.engines.own_apps import run_app
from pbfl_flwr.testing.clients import client, uploads
from pbfl_flwr.testing.contract import check_method

__all__ = ["check_method", "client", "run_app", "uploads"]
