"""The stages of the prototype pipeline: pure functions on (K, d) tensors, one file per kind of stage.

    client   class sums, counts -> [scale] -> [mask: compress]                ~~wire~~>
    server   aggregate (mean | weighted | PPA | APS | trained | robust) -> [align] ~~wire~~>
    client   [mask: expand] -> [upscale] -> regularise (next round's loss), nearest (prediction)

Every stage takes and returns tensors or :class:`~pbfl_flwr.payloads.Prototypes`, has no state between calls
and gives the same result for the same input. An absent class is a zero row with ``present`` False, never NaN.
"""
