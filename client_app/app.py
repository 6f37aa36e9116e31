"""The ClientApp of every method, on the simulation engine and on devices."""

from pbfl_flwr.flower.client.app import make_client_app

app = make_client_app()
