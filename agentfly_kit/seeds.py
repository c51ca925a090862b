"""Counter-based random numbers, and digests of texts.

Each turn has a seed that is derived from the run seed, and each token uses one random number.
Results depend only on the arguments, never on earlier draws, so concurrency and order do not change them.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def derive(seed: int, *parts: str | int) -> int:
    """Derive a 63-bit seed from a run seed and other values, such as the purpose, rollout index, task id and turn.

    Different values yield independent seeds. Equal values yield the same seed on every machine and Python version.
    """
    digest = hashlib.blake2b(b"".join(map(_encode_part, (seed, *parts))), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Cached, because most parts occur repeatedly. The cache is typed, because 1 and True are different parts.
@functools.lru_cache(maxsize=4096, typed=True)
def _encode_part(part: str | int) -> bytes:
    # Include type and length, so that ("ab", "c") differs from ("a", "bc"), and (1,) from ("1",). NumPy integers are
    # encoded like Python integers.
    text = str(part).encode("utf-8", "surrogatepass")
    return b"%s:%d:%s" % (b"str" if isinstance(part, str) else b"int", len(text), text)


def digest(*texts: str, size: int = 8) -> str:
    """Return a hash of a sequence of texts as `2 * size` hex digits."""
    h = hashlib.blake2b(digest_size=size)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        h.update(f"{len(data)}:".encode() + data)
    return h.hexdigest()


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a uniform random number in [0, 1) for each pair (seed, counter), to sample one token in each of B rows.

    Shapes:  seeds (B,), counters (B,) -> (B,) float64 with 53 random bits.
    Source:  the finalizer of SplitMix64 (Steele, Lea, Flood 2014), applied twice.
    """
    import numpy as np

    def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        golden = np.uint64(0x9E3779B97F4A7C15)
        z = mix(mix(seeds.astype(np.uint64) + golden) + (counters.astype(np.uint64) + np.uint64(1)) * golden)
    return (z >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))
