"""The oracle: every byte rule and every attention of this library in plain numpy, slow and obvious.

It shares no code with the implementations, so that an error in them cannot hide behind the same error here: it imports
numpy and ml_dtypes alone, loops where a loop reads better, and drops invisible keys instead of masking them. Bytes are
exact. Attention, logits and merges are computed in float64 and returned so; round them before comparing bits.

Letters: T tokens, S sequences, Q new tokens a sequence, H heads, R latent rank, P rope dim, K keys or top-k lanes,
M pages a sequence, d index key width, h index heads, G groups of 128 channels, W row bytes, ``*`` any leading axes.
A slot is page * page_size + offset. Bytes are little endian, and so must be the host.
"""

from mla_jax.reference.attending import attention as attention
from mla_jax.reference.attending import decode as decode
from mla_jax.reference.attending import dense as dense
from mla_jax.reference.attending import expand_rows as expand_rows
from mla_jax.reference.attending import indexer_logits as indexer_logits
from mla_jax.reference.attending import merge_lse as merge_lse
from mla_jax.reference.attending import positions_to_slots as positions_to_slots
from mla_jax.reference.attending import select_topk as select_topk
from mla_jax.reference.attending import sparse as sparse
from mla_jax.reference.attending import visible_keys as visible_keys
from mla_jax.reference.stored import decode_fp8 as decode_fp8
from mla_jax.reference.stored import decode_index_page as decode_index_page
from mla_jax.reference.stored import decode_rows as decode_rows
from mla_jax.reference.stored import encode_fp8 as encode_fp8
from mla_jax.reference.stored import encode_index_page as encode_index_page
from mla_jax.reference.stored import encode_rows as encode_rows
from mla_jax.reference.stored import index_ranges as index_ranges
from mla_jax.reference.stored import index_scale as index_scale
from mla_jax.reference.stored import packed_scale as packed_scale
from mla_jax.reference.stored import read_rows as read_rows
from mla_jax.reference.stored import write_index_keys as write_index_keys
from mla_jax.reference.stored import write_rows as write_rows
