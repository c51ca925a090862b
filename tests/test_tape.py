"""The columns in which an engine keeps what its rows sample."""

import numpy as np

from agentfly_kit import seeds
from agentfly_kit.engines.tape import Tape
from agentfly_kit.types import Sampling


def test_a_lane_has_the_noise_of_its_seed_and_count_whoever_else_runs() -> None:
    """It is made for several tokens at a time, and a lane that another request takes over starts anew."""
    tape = Tape()
    rng = np.random.default_rng(3)
    running: dict[int, tuple[int, int]] = {}
    compared = 0
    for step in range(120):
        if len(running) < 20 and step % 2 == 0:
            seed = int(rng.integers(1 << 62))
            running[tape.open(Sampling(), seed, 1000)] = seed, 0
        lanes = np.array(sorted(running), dtype=np.int64)
        if step % 7 == 3:  # some wait
            lanes = lanes[rng.random(len(lanes)) < 0.5]
        if not len(lanes):
            continue
        expected = seeds.uniforms(
            np.array([running[int(lane)][0] for lane in lanes], dtype=np.uint64),
            np.array([running[int(lane)][1] for lane in lanes], dtype=np.uint64),
        )
        assert tape.noise(lanes).tolist() == expected.tolist()
        compared += len(lanes)
        zeros = np.zeros(len(lanes))
        tape.write(lanes, zeros.astype(np.int64), zeros.astype(np.float32), zeros.astype(np.float32), None, 0)
        for lane in lanes.tolist():
            running[lane] = running[lane][0], running[lane][1] + 1
        if step % 11 == 10:
            gone = int(rng.choice(sorted(running)))
            del running[gone]
            tape.close(gone)
    assert compared > 500
