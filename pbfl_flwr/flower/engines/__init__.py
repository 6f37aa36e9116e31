"""Engines that run a simulation's clients, with the same results: worker processes, Ray actors, Flower's own.

::

    processes   grid.LocalGrid -> executors.WorkerPool -> ProcessWorker; with one worker all in this process
    ray         grid.LocalGrid -> executors.WorkerPool -> ray_actors.RayWorker, on this machine or on a cluster
    flower      flower/deploy/superlink.py: through ``flwr run``, as a SuperLink runs it
"""
