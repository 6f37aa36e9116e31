"""Prototype-based federated learning (PBFL) on Flower.

Clients with different architectures and non-IID data exchange class prototypes (mean penultimate-layer
features), never weights. Start with :mod:`pbfl_flwr.methods` (the table of contents) and
:mod:`pbfl_flwr.method` (the contract every method follows).
"""

__version__ = "0.1.0"
