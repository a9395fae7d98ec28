"""How long a step's parts take: products, collectives, training, generation, transfers.

    training_seconds, inference_seconds   training.py    one optimizer step, one forward pass
    decode_seconds                        decode.py      prefill and decode of a batch of responses
    transfer_seconds, gathered_seconds    transfer.py    weights between layouts, by shares or whole
    offload_seconds                       transfer.py    states to the host and back
    Machine, Efficiency                   efficiency.py  a device and what it reaches of its data sheet
    Links                                 links.py       how devices are connected

Constants are in placement/data/timing.yaml, one set for each device generation.
"""
