"""Whole runs from Python: start one in this process, and read what it wrote.

::

    from pbfl_flwr.flower.api import Resources, RunDirectory, federate

    federate("runs/mine", {"method": "fedproto"}, num_clients=20, resources=Resources(workers=2))
    RunDirectory("runs/mine").round_records()
"""

from pbfl_flwr.flower.engines.local import federate, federate_app
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.runs.directory import RunDirectory

__all__ = ["Resources", "RunDirectory", "federate", "federate_app"]
