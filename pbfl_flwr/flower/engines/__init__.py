"""Engines that run a simulation's clients, with the same results: worker processes, Ray actors, Flower's own.

::

    processes   local.LocalGrid -> executors.ExecutorPool -> ProcessExecutor; with one worker all in this process
    ray         local.LocalGrid -> executors.ExecutorPool -> ray_actors.RayExecutor, on this machine or on a cluster
    flower      flower_simulation.FlowerSimulation: through ``flwr run``, as a SuperLink runs it
"""
