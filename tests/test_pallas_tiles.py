"""FP8 codes as the reading kernels decode them in registers: every code, against ml_dtypes."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import FP8, config
from mla_jax.kernels import tiles


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["packed_pow2", "raw_e4m3fn", "plain_bfloat16"])
def test_pieces_are_equal_and_cover_a_row(name, pieces):
    for R in (128, 256, 384, 512, 640, 768, 1024):
        layout = config(name, R=R, P=64).layout
        latent = tiles.row_format(layout, wide=False, native=False, joined=False, pieces=pieces).latent
        assert [piece.start for piece in latent] == [i * latent[0].words for i in range(len(latent))]
        assert {piece.words for piece in latent} == {latent[0].words} and len(latent) <= pieces
        assert sum(piece.words * piece.numbers for piece in latent) == R
        # A scale of packed rows belongs to one piece.
        assert name != "packed_pow2" or latent[0].words * 4 % 128 == 0


@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("dialect", FP8)
def test_every_code_decodes_to_its_value(dialect, word):
    codes = np.arange(256, dtype=np.uint8)
    numbers = np.dtype(word).itemsize
    # Every code at every place of a word, with other codes beside it.
    shuffled = np.stack([np.roll(codes, 37 * b) for b in range(numbers)], axis=-1)
    words = np.ascontiguousarray(shuffled).view(word).reshape(16, 16)
    factor = np.float32(tiles.code_factor(dialect, numbers, False))
    for dtype in (jnp.float16, jnp.float32):
        planes = tiles.decode_codes(jnp.asarray(words), dialect, dtype, native=False)
        assert len(planes) == numbers
        for b, plane in enumerate(planes):
            assert plane.dtype == dtype
            with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN, which codes of e5m2 may be
                got = np.asarray(plane, np.float32).reshape(-1) * factor
            want = shuffled[:, b].view(FP8[dialect][0]).astype(np.float32)
            # Subnormals, both zeros, infinities of e5m2, and NaN where the code is NaN.
            np.testing.assert_array_equal(got, want)
            assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))
