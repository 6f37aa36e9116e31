"""The stages of the prototype pipeline: pure functions on (K, d) tensors, one file per kind of stage.

    client   class sums, counts -> [scale] -> [mask: compress]                ~~wire~~>
    server   aggregate (mean | weighted | PPA | APS | trained | robust) -> [align] ~~wire~~>
    client   [mask: expand] -> [upscale] -> pull (next round's loss) and nearest (prediction)

Every stage takes and returns tensors or :class:`~pbfl_flwr.payloads.Prototypes`, has no state between calls
and gives the same result for the same input. An absent class is a zero row with ``present`` False, never NaN.
"""
