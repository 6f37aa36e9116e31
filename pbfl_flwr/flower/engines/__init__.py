"""How a run is started: on Flower's simulation engine, in processes of this machine, or on SuperNodes."""
