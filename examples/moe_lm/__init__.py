"""The parts of examples/train_moe.py: a small mixture-of-experts language model.

Read them in this order:

    config.py   every size of a run
    text.py     the text, its byte-pair tokens, each rank's shard
    model.py    the model; `MoE.forward` is where tokens travel: route, dispatch, experts, combine
    train.py    one rank's process: train, sum gradients over the ranks, write a sample
    replay.py   the same training in one process without `ep`, for --check
    report.py   comparing the two, report.json, the picture
"""
