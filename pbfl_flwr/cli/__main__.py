"""``python -m pbfl_flwr.cli``."""

from pbfl_flwr.cli import main

main()
