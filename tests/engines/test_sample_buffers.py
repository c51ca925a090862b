"""The columns in which an engine keeps what its rows sample."""

import numpy as np

from agentfly_kit import seeds
from agentfly_kit.engines.local.sample_buffers import SampleBuffers
from agentfly_kit.types import Sampling


def test_a_row_has_the_noise_of_its_seed_and_count_whoever_else_runs() -> None:
    """Noise is generated for several tokens at a time; a row reused by another request starts from its own seed."""
    buffers = SampleBuffers()
    rng = np.random.default_rng(3)
    running: dict[int, tuple[int, int]] = {}
    compared = 0
    for step in range(120):
        if len(running) < 20 and step % 2 == 0:
            seed = int(rng.integers(1 << 62))
            running[buffers.allocate(Sampling(), seed, 1000)] = seed, 0
        rows = np.array(sorted(running), dtype=np.int64)
        if step % 7 == 3:  # some wait
            rows = rows[rng.random(len(rows)) < 0.5]
        if not len(rows):
            continue
        expected = seeds.uniforms(
            np.array([running[int(row)][0] for row in rows], dtype=np.uint64),
            np.array([running[int(row)][1] for row in rows], dtype=np.uint64),
        )
        assert buffers.noise(rows).tolist() == expected.tolist()
        compared += len(rows)
        zeros = np.zeros(len(rows))
        buffers.write(rows, zeros.astype(np.int64), zeros.astype(np.float32), zeros.astype(np.float32), None, 0)
        for row in rows.tolist():
            running[row] = running[row][0], running[row][1] + 1
        if step % 11 == 10:
            gone = int(rng.choice(sorted(running)))
            del running[gone]
            buffers.free(gone)
    assert compared > 500
