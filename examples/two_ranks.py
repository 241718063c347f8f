"""Two ranks as threads: each of a token's experts doubles it, and the sum comes home."""

import numpy as np

import ep
import ep.testing


def run_rank(comm):
    tokens = np.full((2, 8), 1.0 + comm.rank, dtype=np.float32)  # T = 2, H = 8
    experts = np.array([[0, 3], [2, -1]])  # [T, K]: token 1 has one expert only
    with ep.EPBuffer(comm, num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=16) as buf:
        rows = buf.dispatch(tokens, experts, layout="expert")  # grouped by expert
        output = buf.expert_output(rows.handle, dtype="float32")
        output[:] = 2 * rows.x
        y = buf.combine(output, rows.handle)
        return f"{rows.num_rows} rows for its experts; {tokens[:, 0]} came back as {y.x[:, 0]}"


for rank, line in enumerate(ep.testing.run(run_rank, num_ranks=2)):
    print(f"rank {rank}: {line}")
